"""Memory for frames that come goes round, and what nobody uses is let go."""

import mmap
import weakref

from collectives.channel.buffer_pool import BufferPool


def address(array):
    return array.__array_interface__["data"][0]


def test_twice_a_model_goes_round():
    buffers = BufferPool()
    lengths = [100_000] * 9 + [70_001, 90_000]
    places = []
    held = []
    for _ in range(6):
        new = [buffers.take(length) for length in lengths]  # while the last ones are held
        assert [array.size for array in new] == lengths
        assert not {address(a) for a in new} & {address(a) for a in held}
        places.append({address(array) for array in new})
        held = new
    assert places[2] == places[4] == places[0]
    assert places[3] == places[5] == places[1]


def test_what_somebody_keeps_for_good_is_not_in_the_way():
    buffers = BufferPool()
    kept = [buffers.take(50_000) for _ in range(20)]
    first = buffers.take(50_000)
    place = address(first)
    del first
    found = []
    for _ in range(4):  # it looks at some of them each time
        found.append(address(buffers.take(50_000)))
    assert place in found
    assert not {address(array) for array in kept} & set(found)


def test_what_was_not_used_for_longest_is_let_go():
    buffers = BufferPool()
    held = [buffers.take(112 << 20) for _ in range(7)]  # never written to
    bases = [weakref.ref(array.base) for array in held]
    held.clear()
    assert [base() is None for base in bases] == [True] * 3 + [False] * 4
    longer = buffers.take((1 << 27) + 1)
    base = weakref.ref(longer.base)
    del longer
    assert base() is None  # it was not kept


def test_frames_begin_with_a_page():
    buffers = BufferPool()
    lengths = [32_769, 100_000, 8 << 20, 64 << 20, (1 << 27) + 1]  # of the last, nothing is kept
    for _ in range(2):  # new ones, and the same again
        taken = [buffers.take(length) for length in lengths]
        assert [array.size for array in taken] == lengths
        assert [address(array) % mmap.PAGESIZE for array in taken] == [0] * len(lengths)
        del taken
