"""Data that ranks have together: in memory once on each node, or row by row on whoever is free."""

import errno
import gc
import itertools
import mmap
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import inprocess
import strategies
from strategies.errors import InvalidArgumentError, OutOfRangeError
from strategies.input import (
    FileBatches,
    broadcast_batches,
    input_producer,
    once_per_node,
    preload,
    range_input_producer,
    slice_input_producer,
    string_input_producer,
)
from strategies.rpc import Service

LIMIT = 20.0


def maps():
    """What this process has mapped of such memory: lines whose fifth word is the file's number."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:unisono" in line]


def table():
    return {"x": np.arange(12.0).reshape(4, 3), "y": (np.array([1, 0, 1, 1], bool), np.int8(7))}


def check_once_per_node(comm):
    calls = []
    found = once_per_node(lambda: calls.append(1) or table(), comm)
    assert len(calls) == (comm.rank == 0)
    np.testing.assert_array_equal(found["x"], table()["x"])
    np.testing.assert_array_equal(found["y"][0], table()["y"][0])
    assert (found["y"][1].dtype, found["y"][1].item()) == (np.int8, 7)
    with pytest.raises(ValueError, match="read-only"):
        found["x"][0] = 1
    # Who is on the same node has the same memory: the same file.
    own = {line.split()[4] for line in maps()}
    everyone = comm.allgather_object((comm.node_rank, own))
    same = [files for node, files in everyone if node == comm.node_rank]
    assert set.intersection(*same)
    read = preload(lambda: (np.arange(5), np.arange(5) * 2), rows=5, num_epochs=1, comm=comm)
    numbers, doubles = read()
    assert sorted(numbers) == list(range(5))
    np.testing.assert_array_equal(doubles, 2 * numbers)
    with pytest.raises(OutOfRangeError):
        read()
    empty = once_per_node(lambda: np.empty((0, 3)), comm)
    assert empty.shape == (0, 3)


def test_data_is_in_memory_once_on_each_node(world):
    world.run(check_once_per_node)


def test_data_is_sent_to_the_first_rank_of_each_node():
    inprocess.run_ranks(5, check_once_per_node, leaders=[0, 0, 2, 2, 2])


def test_an_error_of_the_rank_that_reads_is_one_on_all(comm):
    def fail():
        raise ValueError("no such data")

    with pytest.raises(ValueError, match="no such data"):
        once_per_node(fail, comm)
    with pytest.raises(TypeError, match="once_per_node: expected arrays of numbers, got <U1"):
        once_per_node(lambda: np.array(["a"]), comm)
    assert once_per_node(lambda: np.arange(2), comm).tolist() == [0, 1]


def test_more_than_the_memory_of_the_node_is_an_error_on_all(comm):
    huge = np.broadcast_to(np.float64(1), (1 << 50,))  # which takes no memory itself
    with pytest.raises((OSError, RuntimeError), match="not enough memory on this node, expec"):
        once_per_node(lambda: huge, comm)
    assert once_per_node(lambda: np.arange(2), comm).tolist() == [0, 1]


def test_a_node_that_cannot_map_its_memory_is_an_error_on_all(monkeypatch):
    real, calls = mmap.mmap, itertools.count()

    def one_fails(file, nbytes, **options):
        # Only the first rank of each node maps memory to write; larger memory is for operations.
        if not options and nbytes < 1000 and next(calls) == 0:
            raise OSError(errno.ENOMEM, "no memory to map")
        return real(file, nbytes, **options)

    def check(comm):
        with pytest.raises((OSError, RuntimeError), match="no memory to map"):
            once_per_node(lambda: np.arange(2), comm)
        assert once_per_node(lambda: np.arange(2), comm).tolist() == [0, 1]

    monkeypatch.setattr(mmap, "mmap", one_fails)
    inprocess.run_ranks(5, check, leaders=[0, 0, 2, 2, 2])


def test_wrong_options_on_one_rank_are_an_error_on_all(comm):
    for name, bad in (("rows", 0), ("num_epochs", 0), ("seed", -1)):
        given = bad if comm.rank == comm.size - 1 else 2
        with pytest.raises((ValueError, RuntimeError), match=f"preload: bad {name}, expected"):
            preload(lambda: np.arange(3), comm=comm, **{name: given})
    halves = once_per_node(lambda: np.ones(3, ml_dtypes.bfloat16), comm)
    assert (halves.dtype, halves.sum()) == (ml_dtypes.bfloat16, 3)


@inprocess.on_ranks(1)
def test_memory_goes_when_nobody_refers_to_it(comm):
    def mapped():
        gc.collect()
        return len(maps())

    before = mapped(), len(os.listdir("/proc/self/fd"))
    found = once_per_node(lambda: np.arange(1 << 16), comm)
    part = found[5:]
    assert mapped() > before[0]
    del found
    assert part[0] == 5
    del part
    assert (mapped(), len(os.listdir("/proc/self/fd"))) == before


MAKERS = {
    "range": lambda **options: range_input_producer(23, **options),
    "rows": lambda **options: input_producer({"a": np.arange(23)}, **options),
    "slices": lambda **options: slice_input_producer([np.arange(23), np.arange(23)], **options),
    "text": lambda **options: string_input_producer([str(n) for n in range(23)], **options),
}


def drained(queue, kind):
    """Yield the numbers of the rows that come, to the end."""
    while True:
        try:
            element = queue.dequeue(timeout=LIMIT)
        except OutOfRangeError:
            return
        if kind == "slices":
            assert element[0] == element[1]
            yield int(element[0])
        else:
            yield int(element["a"] if kind == "rows" else element)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("capacity", [4, -1])
def test_producers_share_rows_by_name(comm, kind, shuffle, capacity):
    with Service(comm) as service:
        options = {
            "num_epochs": 2, "shuffle": shuffle, "service": service, "shared_name": kind
        }  # fmt: skip
        producer = MAKERS[kind](**options, capacity=capacity)
        (thread,) = producer.runner.create_threads(start=True)
        own = list(drained(producer.queue, kind))
        thread.join(LIMIT)
        assert not thread.is_alive()
        taken = [n for numbers in comm.allgather_object(own) for n in numbers]
        assert sorted(taken) == sorted(2 * list(range(23)))
        if comm.size == 1 and not shuffle:
            assert taken == 2 * list(range(23))


def test_producers_that_mean_different_rows_are_refused(comm):
    with Service(comm) as service:
        options = {"service": service, "shared_name": "rows", "shuffle": False}
        range_input_producer(5, **options)
        comm.barrier()
        with pytest.raises(InvalidArgumentError, match="other limit, expected 5, got 6"):
            range_input_producer(6, **options)
        for other in (np.arange(5.0), np.zeros((5, 2), int), {"a": np.arange(5)}):
            with pytest.raises(InvalidArgumentError, match="other rows, expected .*int64"):
                input_producer(other, **options)
        with pytest.raises(ValueError, match="bad seed, expected an integer >= 0, got -1"):
            range_input_producer(5, seed=-1, **options)
        with pytest.raises(ValueError, match="both service and shared_name or neither"):
            range_input_producer(5, shared_name="rows")
        comm.barrier()


FILES = {f"file {n}": np.arange(10 * n, 10 * n + 3 + n % 2) for n in range(6)}


@pytest.mark.parametrize("policy", ["file", "auto", "data", "off"])
def test_batches_of_files_are_distributed_by_file(comm, policy):
    read = []

    def records(name):
        read.append(name)
        return [(number, {"half": number / 2}) for number in FILES[name]]

    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=["/cpu:0", "/cpu:1"])
    batches = FileBatches(list(FILES), records, 4)
    own = []
    for numbers, halves in strategy.distribute_dataset(batches, policy=policy):
        parts = strategy.local_results(numbers)
        own += [int(n) for part in parts for n in part]
        for part, half in zip(parts, strategy.local_results(halves["half"]), strict=True):
            np.testing.assert_array_equal(half, part / 2)
    everyones = comm.allgather_object((own, read))
    taken = sorted(n for numbers, _ in everyones for n in numbers)
    names = sorted(name for _, found in everyones for name in found)
    whole = sorted(n for numbers in FILES.values() for n in numbers)
    by_file = policy in ("file", "auto")
    assert taken == (whole if policy != "off" else sorted(whole * comm.size))
    assert names == (sorted(FILES) if by_file else sorted(list(FILES) * comm.size))


def test_fewer_files_than_processes(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    batches = FileBatches(["file 1"], FILES.get, 2)
    rows = [r for batch in strategy.distribute_dataset(batches) for r in batch.tolist()]
    assert sorted(n for own in comm.allgather_object(rows) for n in own) == [10, 11, 12, 13]
    if comm.size > 1:
        with pytest.raises(InvalidArgumentError, match="fewer files than processes, expected"):
            strategy.distribute_dataset(batches, policy="file")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_batches_of_one_rank_are_those_of_all(comm, count):
    root = comm.size - 1
    batches = [{"x": np.full((2, 3), i), "y": ["a", i]} for i in range(count)]
    given = iter(batches) if comm.rank == root else None
    got = list(broadcast_batches(given, comm, root=root))
    assert len(got) == count
    for mine, batch in zip(got, batches, strict=True):
        np.testing.assert_array_equal(mine["x"], batch["x"], strict=True)
        assert mine["y"] == batch["y"]


def test_an_error_of_the_only_reader_is_raised_on_all(comm):
    def read():
        yield np.zeros(1)
        raise ValueError("line 2 is damaged")

    batches = broadcast_batches(read(), comm)
    assert next(batches).tolist() == [0]
    with pytest.raises(ValueError, match="line 2 is damaged"):
        next(batches)
    assert comm.allreduce(1, op=cc.SUM) == comm.size
    with pytest.raises(ValueError, match="root"):
        next(broadcast_batches([1], comm, root=comm.size))
    if comm.size > 1:
        with pytest.raises(cc.MismatchError):
            next(broadcast_batches([1], comm, root=min(comm.rank, 1)))
