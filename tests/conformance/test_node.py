"""The node engine: ranks that meet in shared memory, in plans, and in any order of calls."""

import functools
import itertools
import logging
import os
import re

import numpy as np
import pytest

import collectives as cc
import inprocess
import oracle
from collectives.algorithms.cost_model import RankLayout
from collectives.communicator import group_of
from collectives.core import links, topology
from collectives.core.settings import Settings
from collectives.kernels import machine_code
from collectives.node import engine, kernel_selection
from collectives.tools import explain

OPS = [cc.SUM, cc.MEAN, cc.MIN, cc.MAX, cc.PRODUCT]

# Around the limits of one shot, of a piece, and of several rounds of pieces.
COUNTS = [0, 1, 3, 12, 1000, 16_384, 16_385, 70_001, 300_007]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
def test_plans_reduce_in_place_again_and_again(comm, op):
    for dtype in oracle.DTYPES:
        if not oracle.is_defined(op, dtype):
            continue
        for count in COUNTS if dtype == np.float32 else [1, 1031]:
            arrays = [oracle.data(rank, (count,), dtype) for rank in range(comm.size)]
            for x in (np.empty(count, dtype), comm.shared_empty(count, dtype)):
                plan = comm.plan_allreduce(x, op=op)
                for _ in range(2):
                    x[...] = arrays[comm.rank]
                    assert plan() is x
                    oracle.assert_close(x, arrays, op)


def test_a_large_result_is_the_same_in_place_and_elsewhere(comm, world):
    """Elsewhere it is stored plainly and past the caches, where no line of them begins."""
    if world.kind != "shared":
        pytest.skip("about the node engine")
    count = (1 << 20) + 7  # of 4 bytes
    x = np.arange(count, dtype=np.float32) + comm.rank
    total = comm.allreduce(x, op=cc.SUM, out=x.copy())
    everyones = [np.arange(count, dtype=np.float32) + rank for rank in range(comm.size)]
    joined = np.concatenate(everyones)
    for _ in range(9):  # the first, three by either way, and what was faster
        result = np.zeros(count + 2, np.float32)
        comm.allreduce(x, op=cc.SUM, out=result[1:-1])
        assert result[0] == result[-1] == 0
        np.testing.assert_array_equal(result[1:-1], total)
        rows = np.zeros(joined.size + 2, np.float32)
        comm.allgather(x, out=rows[1:-1])
        assert rows[0] == rows[-1] == 0
        np.testing.assert_array_equal(rows[1:-1], joined)
        result[1:-1] = x
        comm.broadcast(result[1:-1], comm.size - 1, out=result[1:-1])
        np.testing.assert_array_equal(result[1:-1], everyones[-1])
    np.testing.assert_array_equal(comm.allreduce(x, op=cc.SUM, out=x), total)
    comm.barrier()


# Where the way of a call changes, in bytes: one shot, a part, one shot of two ranks and of many, a
# slot, two slots; and what lies beside each.
EDGES = [4 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20]
LARGE = [(3 << 20) + 20, (16 << 20) + 4]


def in_rank_order(arrays, op):
    """Combine the ranks' arrays from rank 0 on, as the engine's page promises, by NumPy alone."""
    dtype, divisor = arrays[0].dtype, len(arrays)
    half = dtype.itemsize == 2 and dtype.kind != "i"
    parts = [array.astype(np.float32) if half else array for array in arrays]
    real = parts[0].real.dtype
    if op is cc.MEAN and not half:
        parts = [(part.view(real) / real.type(divisor)).view(dtype) for part in parts]
    ufunc = {cc.MIN: np.minimum, cc.MAX: np.maximum, cc.PRODUCT: np.multiply}.get(op, np.add)
    with np.errstate(over="ignore"):
        total = functools.reduce(ufunc, parts)
    if op is cc.MEAN and half:
        total = total / np.float32(divisor)
    return total.astype(dtype)


def reductions(comm, x, op, root):
    """Yield an array that this rank has reduced, and which part of the whole it should be."""
    bounds = topology.chunk_bounds(x.size, comm.size)
    own = slice(bounds[comm.rank], bounds[comm.rank + 1])
    every = slice(None)
    yield comm.allreduce(x, op=op), every
    beside = np.empty(x.size + 2, x.dtype)[1:-1]  # begins in the middle of a line
    yield comm.allreduce(x, op=op, out=beside), every
    memory = x.copy()
    yield comm.allreduce(memory, op=op, out=beside if comm.rank else memory), every
    for memory in (np.empty_like(x), comm.shared_empty(x.size, x.dtype)):
        memory[...] = x
        yield comm.plan_allreduce(memory, op=op)(), every
        memory[...] = x
        yield comm.allreduce(memory, op=op, out=memory), every
    result = comm.reduce(x, root, op=op)
    yield (result, every) if comm.rank == root else (x[:0], slice(0))
    yield comm.reduce_scatter(x, op=op), own
    memory = x.copy()
    yield comm.reduce_scatter(memory, op=op, out=memory[own]), own


def test_reductions_have_the_bits_of_the_sum_in_rank_order(comm, world):
    """In whatever way an array goes, at sizes on either side of where ways change."""
    if not world.shared:
        pytest.skip("about the node engine")
    dtypes = [np.dtype(name) for name in ("f4", "f2", oracle.BFLOAT16, "f8", "i4", "c8")]
    for op, dtype in itertools.product(OPS, dtypes):
        if not oracle.is_defined(op, dtype) or (op is cc.PRODUCT and dtype.kind == "c"):
            continue  # how parts of products are rounded is up to the compiler
        every = op in (cc.SUM, cc.MEAN) and dtype == np.float32
        sizes = EDGES if every else EDGES[1::3]
        counts = [nbytes // dtype.itemsize + more for nbytes in sizes for more in (0, 1)]
        counts += [nbytes // 4 for nbytes in LARGE] if every and op is cc.SUM else []
        for count in counts:
            arrays = [oracle.data(rank, (count,), dtype) for rank in range(comm.size)]
            expected = in_rank_order(arrays, op)
            x = arrays[comm.rank]
            for result, part in reductions(comm, x, op, count % comm.size):
                assert result.tobytes() == expected[part].tobytes(), (op, dtype, count)
            np.testing.assert_array_equal(x, oracle.data(comm.rank, (count,), dtype))


def test_all_ranks_keep_the_same_nan_in_place_and_elsewhere(comm, world):
    """Every NaN has the bits of NumPy's, because a compiler may exchange the operands of a loop."""
    if not world.shared or world.size == 1:
        pytest.skip("about the node engine, and several ranks")
    firsts = {"f2": 0x7E00, oracle.BFLOAT16: 0x7FC0, "f4": 0x7FC00000, "f8": 0x7FF8 << 48}
    for (name, first), op, count in itertools.product(firsts.items(), OPS, COUNTS[1::2]):
        dtype = np.dtype(name)
        sign = (comm.rank + 1) % 2 << (8 * dtype.itemsize - 1)
        x = np.full(count, sign + first + comm.rank, f"u{dtype.itemsize}").view(dtype)
        results = [comm.allreduce(x, op=op), comm.allreduce(x, op=op, out=np.empty_like(x))]
        for elsewhere in ([], [0], [comm.size - 1]):
            memory = x.copy()
            out = np.empty_like(x) if comm.rank in elsewhere else memory
            results.append(comm.allreduce(memory, op=op, out=out))
        found = comm.allgather_object([result.tobytes() for result in results])
        numpys = np.full(count, first, f"u{dtype.itemsize}").tobytes()
        assert {bits for of_rank in found for bits in of_rank} == {numpys}, (dtype, op, count)


def test_shared_arrays_are_reduced_in_place_in_whole_or_in_part(comm):
    x = comm.shared_empty((300, 7), np.float64)
    assert not x.any()
    x[...] = comm.rank + 1
    assert comm.allreduce(x, op=cc.SUM, out=x) is x
    total = comm.size * (comm.size + 1) / 2
    np.testing.assert_array_equal(x, total)
    part = x[10:20]
    part[...] = comm.rank
    comm.allreduce(part, op=cc.MAX, out=part)
    np.testing.assert_array_equal(x[10:20], comm.size - 1)
    np.testing.assert_array_equal(x[:10], total)
    np.testing.assert_array_equal(comm.allreduce(x[20:], op=cc.MIN), total)


def test_explain_says_in_which_kind_of_call_arrays_are_reduced(comm):
    if not group_of(comm).node_engine or comm.size > (os.cpu_count() or 1):
        return  # `explain` supposes a core for each rank
    layout = RankLayout(comm.size, 1, links.DEFAULT)
    known = links.MeasuredMachine(links.DEFAULT, ("default",) * 3)
    for nbytes in (8, 8 << 10, (8 << 10) + 8, 256 << 10, (256 << 10) + 8, 1 << 20):
        said = explain.table(explain.Question("allreduce", nbytes), layout, known)
        line = next(row for row in said.splitlines() if row.startswith("Private arrays"))
        plain, _, converted = line.partition(", means")
        for op, words in ((cc.SUM, plain), (cc.MEAN, converted or plain)):
            x = np.zeros(nbytes // 8)
            kernel = group_of(comm).node_engine.plan_allreduce(x, x, op, 1).kernel
            kinds = {"one round": "one_shot", "slots": "direct", "chunks": "pipelined"}
            kind = next(kind for word, kind in kinds.items() if word in words.partition("(")[0])
            assert kernel is machine_code.function("collectives.node.reduce_kernels", kind), said


def test_calls_of_all_kinds_and_sizes_follow_each_other_without_a_trace(comm):
    # Slots are filled again two rounds later: a rank that is late must still find what it needs.
    random = np.random.default_rng(5)  # the same on all ranks
    own = np.random.default_rng(comm.rank)
    shared = comm.shared_empty(40_000, np.float32)
    for _ in range(150):
        count = int(random.choice([1, 40, 5000, 40_000, 200_000]))
        kind = random.integers(7)
        root = int(random.integers(comm.size))
        busy = own.standard_normal(own.integers(1, 20_000))  # ranks come at different times
        busy.sort()
        arrays = [oracle.data(r, (count,), np.dtype(np.float32)) for r in range(comm.size)]
        x = arrays[comm.rank]
        if kind == 0:
            oracle.assert_close(comm.allreduce(x, op=cc.SUM), arrays, cc.SUM)
        elif kind == 1:
            np.testing.assert_array_equal(comm.broadcast(x, root), arrays[root])
        elif kind == 2:
            np.testing.assert_array_equal(comm.allgather(x), np.concatenate(arrays))
        elif kind == 3:
            result = comm.reduce_scatter(x, op=cc.MEAN)
            parts = [np.array_split(a, comm.size)[comm.rank] for a in arrays]
            oracle.assert_close(result, parts, cc.MEAN)
        elif kind == 4:
            y = shared[: min(count, shared.size)]
            y[...] = x[: y.size]
            oracle.assert_close(
                comm.allreduce(y, op=cc.SUM, out=y), [a[: y.size] for a in arrays], cc.SUM
            )
        elif kind == 5:  # in place, where the own array is read as the sum replaces it
            y = x.copy()
            comm.allreduce(y, op=cc.SUM, out=y)
            oracle.assert_close(y, arrays, cc.SUM)
        else:
            result = comm.reduce(x, root, op=cc.MAX)
            if comm.rank == root:
                oracle.assert_close(result, arrays, cc.MAX)


# In one shot and in several rounds.
@pytest.mark.several
@pytest.mark.parametrize("count", [4, 600_011])
def test_a_plan_meets_only_the_same_plan(comm, count):
    x = np.ones(count, np.float32)
    plan = comm.plan_allreduce(x, op=cc.SUM)
    call = comm.barrier if comm.rank == 1 else plan
    with pytest.raises(cc.MismatchError, match=r"barrier at test_node\.py:\d+ on rank 1$"):
        call()
    np.testing.assert_array_equal(x, 1)
    np.testing.assert_array_equal(plan(), comm.size)


def test_integers_of_any_kind_are_dimensions_of_shared_arrays(comm):
    three, five = (np.int64(3), np.uint8(5)) if comm.rank == 1 else (3, 5)
    for shape, expected in [
        (five, (5,)), ((three, 2), (3, 2)), ([three], (3,)), (np.array([three, 2]), (3, 2)),
        ((), ()),
    ]:  # fmt: skip
        x = comm.shared_empty(shape, ">f4")
        assert (x.shape, x.dtype) == (expected, np.float32)


def test_a_plan_ends_with_its_communicator(comm):
    part = comm.split(0)
    x = np.ones(3)
    plan = part.plan_allreduce(x)
    part.close()
    if comm.size > 1:
        with pytest.raises(cc.CollectiveError, match="since it was closed"):
            plan()


def test_only_ranks_that_share_memory_have_the_node_algorithm(world):
    def check(comm):
        if world_shares(comm):
            assert comm.allreduce(1, op=cc.SUM, algorithm="node") == comm.size
        else:
            with pytest.raises(ValueError, match="'node' needs two or more ranks"):
                comm.allreduce(1, op=cc.SUM, algorithm="node")

    def world_shares(comm):
        return world.shared and comm.size > 1

    world.run(check)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rounds_of_all_sizes_rotate_in_their_slots(ranks, monkeypatch):
    """In any order, and often enough to begin again at the start of a slot."""
    monkeypatch.setattr(os, "cpu_count", lambda: ranks)  # ranks that share a core do not rotate

    def check(comm):
        random = np.random.default_rng(0)
        for count in 2 ** random.integers(8, 18, 300) + random.integers(0, 2, 300):
            x = np.arange(count, dtype=np.float32)
            total = comm.allreduce(x + comm.rank, op=cc.SUM)
            np.testing.assert_array_equal(total, comm.size * x + sum(range(comm.size)))
            np.testing.assert_array_equal(comm.broadcast(x * comm.rank, root=1), x)
            rows = comm.allgather(x[:, None] + comm.rank)
            np.testing.assert_array_equal(rows[-count:, 0], x + comm.size - 1)
        return True

    settings = Settings(timeout=60, shared_memory="/dev/shm")
    assert inprocess.run_ranks(ranks, check, settings=settings) == [True] * ranks


@pytest.mark.parametrize("directory", ["/nowhere", "/proc"])
def test_without_shared_memory_messages_serve_and_the_reason_is_logged_once(directory, caplog):
    def check(comm):
        return [float(comm.allreduce(comm.rank, op=cc.SUM)) for _ in range(3)]

    with caplog.at_level(logging.WARNING):
        settings = Settings(timeout=20, shared_memory=directory)
        assert inprocess.run_ranks(3, check, settings=settings) == [[3.0] * 3] * 3
    told = [r.getMessage() for r in caplog.records if "no shared memory" in r.getMessage()]
    assert len(told) == 1
    assert directory in told[0]
    assert "MiB" in told[0]


def test_too_little_shared_memory_is_noticed_before_it_is_used(caplog, monkeypatch):
    monkeypatch.setattr(kernel_selection, "SLOT_BYTES", 1 << 50)
    monkeypatch.setattr(engine, "_MOST_SLOT_BYTES", 1 << 50)
    settings = Settings(timeout=20, shared_memory="/dev/shm")
    total = inprocess.run_ranks(2, lambda c: int(c.allreduce(1, op=cc.SUM)), settings=settings)
    assert total == [2, 2]
    assert "no shared memory on this node" in caplog.text
    assert re.search(r"expected \d+ MiB in /dev/shm, got \d+ MiB free of \d+ MiB", caplog.text)
    assert "docker run --shm-size=" in caplog.text
    own = f"unisono-{os.getpid()}-"
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(own)]


@pytest.mark.parametrize("count", [2, 600_011])
def test_a_rank_that_never_comes_to_a_plan_is_named(comm, count):
    pair = comm.split(0 if comm.rank < 2 else None)
    if comm.size > 1 and comm.rank < 2:
        plan = pair.plan_allreduce(np.ones(count), timeout=2)  # in which both make it
        if comm.rank == 0:
            words = r"within 2 s, still waiting for rank 1"
            with pytest.raises(cc.CollectiveTimeout, match=words):
                plan()
            with pytest.raises(cc.CollectiveError, match="CollectiveTimeout"):
                plan()
    comm.barrier()
