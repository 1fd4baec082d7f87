"""Device arrays pass through the host in slices: the order of copies, and what may overlap."""

import numpy as np
import pytest

from collectives.arrays import staging
from collectives.arrays.device import Device, DeviceBuffer
from collectives.arrays.host_arrays import address
from fakecupy import FakeCupy, Stream

SLICE = 64
COUNT = 100  # float32: six slices of 16, and one of 4


@pytest.fixture
def cupy():
    return FakeCupy()


def buffer_of(cupy, values):
    array = cupy.array(values)
    return DeviceBuffer(Device(cupy, array.device), array, array.dtype)


def plus_one(part, number):
    part += np.float32(1)


def passed(cupy, windows, work=plus_one):
    """Values that a late producer makes, and where they go."""
    source = buffer_of(cupy, np.zeros(COUNT, np.float32))
    target = buffer_of(cupy, np.zeros(COUNT, np.float32))
    values = np.arange(COUNT, dtype=np.float32)
    cupy.later(lambda: source.view.memory.__setitem__(slice(None), values))
    copies = staging.CopyStreams(cupy, cupy.device)
    copies.stream_through(windows, source, target, work, source)
    return values, target.view.memory


def test_every_slice_goes_there_and_back(cupy):
    values, result = passed(cupy, staging.pinned(cupy, SLICE))
    np.testing.assert_array_equal(result, values + 1)


def test_the_next_slice_is_under_way_before_one_is_worked_on(cupy):
    begun = []

    def work(part, number):
        begun.append([name for name, _ in cupy.log].count("to host"))
        part += np.float32(1)

    passed(cupy, staging.pinned(cupy, SLICE), work)
    assert begun == [2, 3, 4, 5, 6, 7, 7]
    names = [name for name, _ in cupy.log]
    assert names[:5] == ["to host", "to host", "from host", "to host", "from host"]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 32, 49])
def test_arrays_of_any_length_pass_in_place(cupy, count):
    values = np.arange(count, dtype=np.float32)
    array = buffer_of(cupy, values)
    numbers = []

    def work(part, number):
        numbers.append((number, part.size))
        plus_one(part, number)

    copies = staging.CopyStreams(cupy, cupy.device)
    copies.stream_through(staging.pinned(cupy, SLICE), array, array, work, array)
    np.testing.assert_array_equal(array.view.memory, values + 1)
    assert [n for n, _ in numbers] == list(range(-(-count // 16)))
    assert sum(size for _, size in numbers) == count


def test_a_window_is_not_filled_while_it_still_goes_back(cupy):
    # Nothing comes from the device, so that only the copies back are in the way.
    target = buffer_of(cupy, np.zeros(COUNT, np.float32))

    def work(part, number):
        part[...] = number

    copies = staging.CopyStreams(cupy, cupy.device)
    copies.stream_through(staging.pinned(cupy, SLICE), None, target, work, target)
    np.testing.assert_array_equal(target.view.memory, np.arange(COUNT) // 16)


def test_what_only_leaves_the_device_is_seen_in_order(cupy):
    source = buffer_of(cupy, np.arange(COUNT, dtype=np.float32))
    seen = []
    copies = staging.CopyStreams(cupy, cupy.device)
    copies.stream_through(
        staging.pinned(cupy, SLICE), source, None, lambda part, _: seen.extend(part), source
    )
    assert seen == list(range(COUNT))


def test_a_failure_leaves_nothing_on_its_way(cupy, monkeypatch):
    streams = []

    def stream(**options):
        streams.append(Stream(**options))
        return streams[-1]

    monkeypatch.setattr(cupy.cuda, "Stream", stream)

    def work(part, number):
        if number == 2:
            raise ValueError("a rank is gone")

    copies = staging.CopyStreams(cupy, cupy.device)
    array = buffer_of(cupy, np.zeros(COUNT, np.float32))
    with pytest.raises(ValueError, match="a rank is gone"):
        copies.stream_through(staging.pinned(cupy, SLICE), array, array, work, array)
    assert [made.queue for made in streams] == [[], []]  # out and back


@pytest.mark.parametrize("can", [True, False])
def test_shared_memory_is_pinned_where_that_is_possible(caplog, can):
    cupy = FakeCupy(can_register=can)
    memory = np.zeros(staging.WINDOWS * SLICE, np.uint8)
    with caplog.at_level("INFO"):
        windows = staging.pin_existing(cupy, memory)
    assert cupy.registered == ({address(memory): memory.nbytes} if can else {})
    assert ("cannot be pinned" in caplog.text) is not can
    assert [address(part) - address(memory) for part in windows.parts] == [0, SLICE, 2 * SLICE]
    values, result = passed(cupy, windows)
    np.testing.assert_array_equal(result, values + 1)
    windows.release()
    assert not cupy.registered


def test_slices_grow_with_the_ranks_that_cut_them():
    assert staging.slice_bytes(2, by_messages=True) == 2 << 20
    assert staging.slice_bytes(16, by_messages=True) == 4 << 20
    assert staging.slice_bytes(1024, by_messages=True) == 8 << 20
    assert staging.slice_bytes(1024, by_messages=False) == 2 << 20
    for size in range(1, 100):  # every element fits without a rest, and every page
        assert staging.slice_bytes(size, by_messages=True) % 4096 == 0
