"""What every algorithm has to do, on ranks that are threads and on ranks that are MPI processes."""

import ctypes
import zlib
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import oracle
from collectives.communicator import group_of
from collectives.transport import mpi
from pairwise import crossed

OPS = [cc.SUM, cc.MEAN, cc.MIN, cc.MAX, cc.PRODUCT]

# None at all, one, fewer than ranks, about as many, odd, several slices of a ring.
SHAPES = [(0,), (1,), (), (2,), (3,), (5,), (4, 3), (0, 4), (1023,), (200_001,)]


def everyones(comm, shape, dtype):
    """The arrays of all ranks; the caller's own is number `comm.rank`."""
    return [oracle.data(rank, shape, dtype) for rank in range(comm.size)]


@pytest.mark.algorithms("allreduce")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
def test_allreduce_equals_the_reduction_of_all_arrays(comm, algorithm, op):
    for dtype in oracle.DTYPES:
        for shape in SHAPES if dtype == np.float32 else [(0,), (7,), (1030,)]:
            if oracle.is_defined(op, dtype):
                arrays = everyones(comm, shape, dtype)
                before = arrays[comm.rank].copy()
                result = comm.allreduce(arrays[comm.rank], op=op, algorithm=algorithm)
                oracle.assert_close(result, arrays, op)
                np.testing.assert_array_equal(arrays[comm.rank], before)


@pytest.mark.algorithms("allreduce")
def test_allreduce_gives_the_same_bits_on_all_ranks_and_again(comm, algorithm):
    x = oracle.data(comm.rank, (50_001,), np.dtype(np.float32))
    first = comm.allreduce(x, algorithm=algorithm)
    again = comm.allreduce(x, algorithm=algorithm)
    np.testing.assert_array_equal(first, again)
    others = comm.allgather(first.reshape(1, -1))
    np.testing.assert_array_equal(others, np.broadcast_to(first, others.shape))


def test_allreduce_with_out_fills_it_and_returns_it(comm):
    arrays = everyones(comm, (6, 5), np.dtype(np.float64))
    x = arrays[comm.rank]
    contiguous = np.empty((6, 5))
    strided = np.empty((12, 5))[::2]
    for out in (contiguous, strided):
        assert comm.allreduce(x, op=cc.SUM, out=out) is out
        oracle.assert_close(out, arrays, cc.SUM)
    in_place = x.copy()
    assert comm.allreduce(in_place, op=cc.SUM, out=in_place) is in_place
    oracle.assert_close(in_place, arrays, cc.SUM)
    half = np.empty((6, 5), np.float16)
    comm.allreduce(x.astype(np.float16), op=cc.SUM, out=half)
    oracle.assert_close(half, [a.astype(np.float16) for a in arrays], cc.SUM)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::-1],
        lambda x: x[:, ::2],
        lambda x: x.T,
        lambda x: np.asfortranarray(x),
        lambda x: np.broadcast_to(x[0], x.shape),
        lambda x: x.astype(">f8"),
    ],
    ids=["reversed", "strided", "transposed", "fortran", "broadcast", "big-endian"],
)
def test_allreduce_takes_any_memory_layout(comm, view):
    arrays = [view(a) for a in everyones(comm, (8, 6), np.dtype(np.float64))]
    result = comm.allreduce(arrays[comm.rank], op=cc.SUM)
    oracle.assert_close(result, [a.astype(np.float64) for a in arrays], cc.SUM)


def test_allreduce_takes_read_only_arrays_numbers_and_lists(comm):
    x = np.arange(4.0)
    x.flags.writeable = False
    np.testing.assert_array_equal(comm.allreduce(x, op=cc.MAX), x)
    assert comm.allreduce(comm.rank, op=cc.MAX) == comm.size - 1
    assert comm.allreduce([1, 2], op=cc.SUM).tolist() == [comm.size, 2 * comm.size]


def check_out(comm, operation, algorithm, pairs):
    """Let rank 0 give (array, out) pairs of any layout, the others plain ones."""
    for dtype in (np.dtype(np.float32), np.dtype(np.uint8), oracle.BFLOAT16):
        arrays = everyones(comm, (6, 6), dtype)
        for step in range(2):  # the second call may take a shorter way
            plain = [(np.empty((6, 6), dtype),) * 2] * len(pairs(dtype))
            for x, out in pairs(dtype) if comm.rank == 0 else plain:
                x[...] = arrays[comm.rank]
                options = {} if operation == "broadcast" else {"op": cc.MAX}
                call = getattr(comm, operation)
                result = call(x, out=out, algorithm=algorithm, **options)
                if operation == "reduce" and comm.rank:
                    assert result is None
                    continue
                assert result is out
                kept = arrays[:1] if operation == "broadcast" else arrays
                np.testing.assert_array_equal(out, np.max(kept, axis=0), f"step {step}")


def overlapping(dtype):
    both, square, turned = (np.zeros((8, 6), dtype) for _ in range(3))
    return [
        (both[:6], both[2:]), (both[2:], both[:6]), (square[:6], square[:6].T),
        (turned[:6], turned[5::-1]),
    ]  # fmt: skip


def unaligned(dtype):
    x, out = (
        np.empty(36 * dtype.itemsize + 1, np.uint8)[1:].view(dtype).reshape(6, 6) for _ in range(2)
    )
    return [(x, out), (x, x)]


@pytest.mark.parametrize("pairs", [overlapping, unaligned])
@pytest.mark.parametrize("operation", ["allreduce", "reduce", "broadcast"])
def test_an_out_may_overlap_or_lie_anywhere(world, operation, pairs):
    for algorithm in world.algorithms(operation):
        world.run(lambda comm, way=algorithm: check_out(comm, operation, way, pairs))


@pytest.mark.algorithms("allreduce")
def test_infinities_and_nans_reach_every_rank(comm, algorithm):
    for dtype in oracle.FLOATS:
        x = np.zeros(4, dtype)
        if comm.rank == comm.size - 1:
            x[1:3] = np.nan, np.inf
        for op in (cc.SUM, cc.MEAN):
            result = comm.allreduce(x, op=op, algorithm=algorithm).astype(np.float64)
            np.testing.assert_array_equal(result, [0, np.nan, np.inf, 0])


# Algorithms by which several ranks compute the same element.
EACH_COMPUTES = ("node", "doubling")


@pytest.mark.algorithms("allreduce")
def test_all_ranks_get_the_same_nan(comm, algorithm):
    for dtype in oracle.FLOATS:
        bits = np.dtype(f"u{dtype.itemsize}")
        numpys = np.array([np.nan], dtype).view(bits)
        sign = (comm.rank + 1) % 2 << (8 * dtype.itemsize - 1)
        x = np.full(70, int(numpys[0]) + sign + comm.rank, bits).view(dtype)
        for op in (cc.SUM, cc.MEAN, cc.PRODUCT, cc.MIN, cc.MAX):
            result = comm.allreduce(x, op=op, algorithm=algorithm)
            assert np.isnan(result.astype(np.float64)).all(), (dtype, op)
            if algorithm != "native":  # MPI does not promise the bits of its results
                assert len(set(comm.allgather_object(result.tobytes()))) == 1, (dtype, op)
            if comm.size > 1 and algorithm in EACH_COMPUTES:
                np.testing.assert_array_equal(result.view(bits), numpys[0])


def test_mean_does_not_overflow_where_it_fits(comm):
    for dtype in (np.float16, oracle.BFLOAT16, np.float32, np.float64):
        limits = ml_dtypes.finfo(dtype)
        large = np.full(5, 0.99 * float(limits.max)).astype(dtype)
        rows = large.reshape(1, 5)
        results = {
            "allreduce": comm.allreduce(large),
            "scan": comm.scan(large, op=cc.MEAN),
            "exscan": comm.exscan(large, op=cc.MEAN),
            "prefix": comm.scan(large, op=cc.MEAN, algorithm="prefix"),
            "rows": comm.sparse_allreduce([3], rows, algorithm="rows")[1][0],
            "dense": comm.sparse_allreduce([3], rows, num_rows=4, algorithm="dense")[1][0],
        }
        if comm.rank == 0:
            assert results.pop("exscan") is None
        for name, result in results.items():
            np.testing.assert_allclose(
                result.astype(np.float64), large.astype(np.float64),
                rtol=float(limits.eps), err_msg=name,
            )  # fmt: skip


@pytest.mark.algorithms("reduce")
def test_reduce_gives_the_result_to_every_root(comm, algorithm):
    for root in range(comm.size):
        for shape in [(0,), (1,), (1023,), ()]:
            arrays = everyones(comm, shape, np.dtype(np.float32))
            x = arrays[comm.rank]
            result = comm.reduce(x, root, op=cc.MEAN, algorithm=algorithm)
            if comm.rank == root:
                oracle.assert_close(result, arrays, cc.MEAN)
            else:
                assert result is None


@pytest.mark.algorithms("broadcast")
def test_broadcast_copies_the_roots_bits(comm, algorithm):
    shapes = [(), (0,), (5, 3), (40_000,)]
    for root, dtype, shape in crossed(range(comm.size), oracle.DTYPES, shapes):
        arrays = everyones(comm, shape, dtype)
        result = comm.broadcast(arrays[comm.rank], root, algorithm=algorithm)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, arrays[root])
        own = arrays[comm.rank].copy()
        assert comm.broadcast(own, root, out=own, algorithm=algorithm) is own
        np.testing.assert_array_equal(own, arrays[root])


@pytest.mark.parametrize(
    "rows", [lambda r: 2, lambda r: r, lambda r: 3 if r == 0 else 0, lambda r: 0]
)
@pytest.mark.algorithms("gather")
def test_gather_joins_rows_in_rank_order_on_every_root(comm, algorithm, rows):
    for root in range(comm.size):
        for dtype in oracle.DTYPES:
            arrays = [oracle.data(r, (rows(r), 3), dtype) for r in range(comm.size)]
            result = comm.gather(arrays[comm.rank], root, algorithm=algorithm)
            if comm.rank == root:
                assert result.dtype == dtype
                np.testing.assert_array_equal(result, np.concatenate(arrays))
            else:
                assert result is None


@pytest.mark.parametrize(
    "rows", [lambda r: 2, lambda r: r, lambda r: 3 if r == 0 else 0, lambda r: 0]
)
@pytest.mark.algorithms("allgather")
def test_allgather_joins_rows_in_rank_order_on_every_rank(comm, algorithm, rows):
    for dtype in oracle.DTYPES:
        arrays = [oracle.data(r, (rows(r), 3), dtype) for r in range(comm.size)]
        result = comm.allgather(arrays[comm.rank], algorithm=algorithm)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, np.concatenate(arrays))
    assert comm.allgather(comm.rank).tolist() == list(range(comm.size))


@pytest.mark.algorithms("reduce_scatter")
def test_reduce_scatter_gives_each_rank_its_rows(comm, algorithm):
    for count in (0, 1, comm.size, comm.size + 1, 100):
        for op in OPS:
            arrays = everyones(comm, (count, 3), np.dtype(np.float32))
            result = comm.reduce_scatter(arrays[comm.rank], op=op, algorithm=algorithm)
            own = [np.array_split(a, comm.size)[comm.rank] for a in arrays]
            oracle.assert_close(result, own, op)


@pytest.mark.algorithms("barrier")
def test_nobody_leaves_a_barrier_before_the_last_has_entered(comm, algorithm, tmp_path_factory):
    # Every rank leaves a mark before it enters; whoever is out must see all marks.
    folder = comm.broadcast_object(str(tmp_path_factory.mktemp("marks")))
    (Path(folder) / str(comm.rank)).touch()
    comm.barrier(algorithm=algorithm)
    assert len(list(Path(folder).iterdir())) == comm.size


def test_objects_arrive_as_equal_copies(comm):
    own = {"rank": comm.rank, "text": "x" * comm.rank, "nothing": None}
    for root in range(comm.size):
        result = comm.broadcast_object(own, root)
        assert result == {"rank": root, "text": "x" * root, "nothing": None}
        assert (result is own) == (comm.rank == root)
    assert comm.allgather_object(comm.rank * "y") == [r * "y" for r in range(comm.size)]


def test_split_makes_independent_groups(comm):
    part = comm.split(comm.rank % 2, key=-comm.rank)
    members = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    assert part.size == len(members)
    assert members[part.rank] == comm.rank
    assert part.allgather(comm.rank).tolist() == members
    nobody = comm.split(None if comm.rank == 0 else 1)
    assert (nobody is None) == (comm.rank == 0)
    if nobody is not None:
        assert nobody.allreduce(1, op=cc.SUM) == comm.size - 1
        nobody.close()
    part.close()


def test_colors_and_keys_may_be_larger_than_mpis(comm):
    colors = [zlib.crc32(b"node %d" % (r // 2)) for r in range(comm.size)]
    assert colors[0] > 1 << 31
    part = comm.split(np.uint32(colors[comm.rank]), -comm.rank << 40)
    members = [r for r in reversed(range(comm.size)) if colors[r] == colors[comm.rank]]
    assert part.allgather(comm.rank).tolist() == members
    whole = comm.split((1 << 63) - 1, (-1 << 63) + comm.rank)
    assert whole.allgather(comm.rank).tolist() == list(range(comm.size))


def test_a_closed_communicator_says_so(comm):
    part = comm.split(0)
    part.close()
    part.close()
    with pytest.raises(cc.CollectiveError, match="not usable any more, since it was closed"):
        part.barrier()


@pytest.mark.algorithms("scatter")
def test_scatter_shares_the_roots_rows(comm, algorithm):
    numbers = (0, 1, 7, 20 * comm.size)
    for root, dtype, rows in crossed(range(comm.size), oracle.DTYPES, numbers):
        x = oracle.data(0, (rows, 3), dtype) if comm.rank == root else None
        result = comm.scatter(x, root, algorithm=algorithm)
        assert result.dtype == dtype
        expected = np.array_split(oracle.data(0, (rows, 3), dtype), comm.size)
        np.testing.assert_array_equal(result, expected[comm.rank])
    for root in range(comm.size):
        splits = [2 * r for r in range(comm.size)]
        everything = np.arange(sum(splits))
        x = everything if comm.rank == root else None
        own = comm.scatter(x, root, counts=splits, algorithm=algorithm)
        first = sum(splits[: comm.rank])
        np.testing.assert_array_equal(own, everything[first : first + splits[comm.rank]])


@pytest.mark.algorithms("alltoall")
def test_alltoall_exchanges_rows_between_all_pairs(comm, algorithm):
    def sent(source, dest, dtype):
        """The rows from one rank to another, a different number for every pair."""
        return oracle.data(10 * source + dest, ((source + 2 * dest) % 4, 3), dtype)

    for dtype in oracle.DTYPES:
        parts = [sent(comm.rank, dest, dtype) for dest in range(comm.size)]
        splits = [len(part) for part in parts]
        x = np.concatenate(parts)
        result = comm.alltoall(x, counts=splits, algorithm=algorithm)
        assert result.dtype == dtype
        expected = [sent(source, comm.rank, dtype) for source in range(comm.size)]
        np.testing.assert_array_equal(result, np.concatenate(expected))
    even = comm.alltoall(np.arange(2 * comm.size) + 100 * comm.rank, algorithm=algorithm)
    expected = [[100 * r + 2 * comm.rank, 100 * r + 2 * comm.rank + 1] for r in range(comm.size)]
    np.testing.assert_array_equal(even, np.ravel(expected))


@pytest.mark.algorithms("alltoall")
def test_rows_without_elements_are_counted_by_alltoall(comm, algorithm):
    splits = [comm.rank + 2 * dest for dest in range(comm.size)]
    result = comm.alltoall(np.empty((sum(splits), 0, 3)), counts=splits, algorithm=algorithm)
    received = sum(source + 2 * comm.rank for source in range(comm.size))
    assert result.shape == (received, 0, 3)
    even = comm.alltoall(np.empty((2 * comm.size, 0), np.float32), algorithm=algorithm)
    assert (even.shape, even.dtype) == ((2 * comm.size, 0), np.float32)


def test_small_operations_where_the_functions_of_mpi_are_hidden(world, monkeypatch):
    """As where mpi4py was linked with a static library: then Python sends what is small."""

    class Hidden(dict):
        def __missing__(self, name):
            raise AttributeError(name)

    hidden = SimpleNamespace(CDLL=lambda path: Hidden(), cast=ctypes.cast, c_void_p=ctypes.c_void_p)
    monkeypatch.setattr(mpi, "ctypes", hidden)

    def check(comm):
        assert group_of(comm).transport.native_mpi is None
        for _ in range(2):
            for op in OPS:
                arrays = everyones(comm, (7,), np.dtype(np.float32))
                oracle.assert_close(comm.allreduce(arrays[comm.rank], op=op), arrays, op)
            comm.barrier()

    world.run(check)
