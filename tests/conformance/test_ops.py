"""Reductions beside sums: of bits, of truth, of integers, scaled, and where the best number is."""

import numpy as np
import pytest

import collectives as cc
import oracle
from requirements import installed

BITS = [cc.BITWISE_AND, cc.BITWISE_OR, cc.BITWISE_XOR]
TRUTH = [cc.LOGICAL_AND, cc.LOGICAL_OR, cc.LOGICAL_XOR]
F32 = np.dtype(np.float32)


def brought(rank, shape, dtype, op):
    """What a rank brings; to a logical op zeros on some ranks."""
    x = oracle.data(rank, shape, dtype)
    if op in TRUTH:
        x *= oracle.data(rank + 7, shape, oracle.BOOL).astype(dtype)
    return x


@pytest.mark.algorithms("allreduce")
@pytest.mark.parametrize("op", [*BITS, *TRUTH, cc.INTEGER_MEAN], ids=lambda op: op.value)
def test_allreduce_of_bits_truth_and_integers(comm, algorithm, op):
    for dtype in filter(lambda dtype: oracle.is_defined(op, dtype), oracle.DTYPES):
        for shape in [(), (0,), (7,), (40_001,)] if dtype == np.int32 else [(5, 3)]:
            arrays = [brought(r, shape, dtype, op) for r in range(comm.size)]
            before = arrays[comm.rank].copy()
            for _ in range(2):
                result = comm.allreduce(arrays[comm.rank], op=op, algorithm=algorithm)
                oracle.assert_close(result, arrays, op)
            assert arrays[comm.rank].tobytes() == before.tobytes()
            out = np.zeros((2, *shape), dtype).T[..., 0].T
            assert comm.allreduce(before, op=op, out=out, algorithm=algorithm) is out
            oracle.assert_close(out, arrays, op)
            assert comm.allreduce(before, op=op, out=before, algorithm=algorithm) is before
            oracle.assert_close(before, arrays, op)


@pytest.mark.parametrize("op", [cc.BITWISE_XOR, cc.LOGICAL_XOR, cc.INTEGER_MEAN])
def test_other_reductions_of_bits_truth_and_integers(comm, world, op):
    arrays = [brought(r, (7, 3), np.dtype(np.int16), op) for r in range(comm.size)]
    x, root = arrays[comm.rank], comm.size - 1
    for algorithm in world.algorithms("reduce"):
        result = comm.reduce(x, root, op=op, algorithm=algorithm)
        if comm.rank == root:
            oracle.assert_close(result, arrays, op)
    own = [np.array_split(x, comm.size)[comm.rank] for x in arrays]
    for algorithm in world.algorithms("reduce_scatter"):
        for out in (None, np.empty_like(own[0])):
            result = comm.reduce_scatter(x, op=op, out=out, algorithm=algorithm)
            assert out is None or result is out
            oracle.assert_close(result, own, op)
    assert comm.allreduce_async(x, op=op).wait().dtype == np.int16
    pair = [x, arrays[comm.rank].astype(np.uint64)]
    for _ in range(2):
        first, second = comm.grouped_allreduce(pair, op=op)
        oracle.assert_close(first, arrays, op)
        oracle.assert_close(second, [a.astype(np.uint64) for a in arrays], op)


def test_truth_is_one_whatever_is_not_zero(comm):
    x = np.array([0, 2, -0.0, np.nan, np.inf])
    assert comm.allreduce(x, op=cc.LOGICAL_AND).tolist() == [0, 1, 0, 1, 1]
    odd = comm.size % 2
    assert comm.allreduce(x, op=cc.LOGICAL_XOR).tolist() == [0, odd, 0, odd, odd]
    assert comm.allreduce(True, op=cc.LOGICAL_OR).dtype == bool


def test_the_mean_of_integers_is_truncated_towards_zero_and_does_not_wrap(comm):
    x = np.array([127, -128, comm.rank, -comm.rank], np.int8)
    total = sum(range(comm.size))
    expected = [127, -128, total // comm.size, -(total // comm.size)]
    assert comm.allreduce(x, op=cc.INTEGER_MEAN).tolist() == expected
    with pytest.raises(TypeError, match="say INTEGER_MEAN"):
        comm.allreduce(x)
    assert comm.allreduce(x, op=cc.INTEGER_MEAN).tolist() == expected


@pytest.mark.algorithms("allreduce")
def test_arrays_are_scaled_before_and_after(comm, algorithm):
    for dtype in [*oracle.FLOATS, np.dtype(np.complex64)]:
        for op in (cc.SUM, cc.MEAN, cc.MIN, cc.PRODUCT):
            if not oracle.is_defined(op, dtype):
                continue
            for shape in [(), (1031,)]:
                arrays = [oracle.data(r, shape, dtype) for r in range(comm.size)]
                x = arrays[comm.rank].copy()
                out = np.empty_like(x)
                result = comm.allreduce(
                    x, op=op, prescale=0.75, postscale=-3, out=out, algorithm=algorithm
                )
                assert result is out
                assert x.tobytes() == arrays[comm.rank].tobytes()
                wide = [a.astype(np.complex128 if dtype.kind == "c" else float) for a in arrays]
                exact = oracle.reduced([0.75 * a for a in wide], op)
                assert out.dtype == dtype
                half = dtype.itemsize == 2
                eps = 2.0 ** -(7 if dtype == oracle.BFLOAT16 else 10) if half else 0
                work = np.finfo(np.float32 if half else dtype).eps
                size = np.sum(np.abs(wide), axis=0) + np.abs(exact.values)
                # A rounding for each scale, beside those of the reduction; one to 16 bits.
                allowed = 3 * ((2 * comm.size + 3) * work * size + eps * np.abs(exact.values))
                assert (np.abs(out.astype(wide[0].dtype) + 3 * exact.values) <= allowed).all()


def test_scaled_16_bits_are_added_in_32(comm):
    # 1 + 2^-10 is the next float16 after 1, which rounding to 16 bits before a sum would lose.
    x = np.array([2.0**-9, 60000], np.float16)
    result = comm.allreduce(x, op=cc.SUM, prescale=2.0**-20, postscale=2.0**20)
    expected = np.array([comm.size * 2.0**-9, comm.size * 60000.0])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(result, expected.astype(np.float16))
    tiny = comm.allreduce(x, op=cc.SUM, prescale=1 / (64 * comm.size))
    np.testing.assert_allclose(tiny[1], 60000 / 64, rtol=2.0**-10)
    (grouped,) = comm.grouped_allreduce([x], op=cc.SUM, prescale=2.0**-20, postscale=2.0**20)
    assert grouped.tobytes() == result.tobytes()


def test_all_reductions_are_scaled(comm):
    x = np.full((comm.size, 2), comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    how = {"op": cc.SUM, "prescale": 2, "postscale": np.float32(0.25)}
    for _ in range(2):
        assert (comm.allreduce(x, **how) == total / 2).all()
        assert (comm.allreduce(x, op=cc.SUM) == total).all()  # not by the other's plan
        reduced = comm.reduce(x, 0, **how)
        assert comm.rank or (reduced == total / 2).all()
        assert (comm.reduce_scatter(x, **how) == total / 2).all()
        assert (comm.reduce_scatter(x, op=cc.SUM) == total).all()
        for y in comm.grouped_allreduce([x, x[0]], **how):
            assert (y == total / 2).all()
        own = [x.copy(), x[0].astype(np.float32)]
        for y, to in zip(comm.grouped_allreduce(own, out=own, **how), own, strict=True):
            assert y is to
            assert (y == total / 2).all()
        packed = comm.allreduce(x.astype(F32), compression=cc.BF16, **how)
        assert (packed == total / 2).all()


def test_other_libraries_are_scaled_too(comm):
    torch = installed("torch")
    x = torch.full((3,), 2.0, dtype=torch.bfloat16)
    assert comm.allreduce(x, op=cc.SUM, postscale=0.5, out=x) is x
    assert x.tolist() == [comm.size] * 3
    assert comm.allreduce(x > 0, op=cc.LOGICAL_AND).tolist() == [True] * 3


def test_ranks_with_other_scales_are_told_apart(comm):
    if comm.size > 1:
        for call in (comm.allreduce, comm.reduce, comm.reduce_scatter):
            with pytest.raises(cc.MismatchError, match=r"prescale is .*2\.0 on rank 1"):
                call(np.ones(4), prescale=2 if comm.rank == 1 else 3)
        with pytest.raises(cc.MismatchError, match="postscale is"):
            comm.grouped_allreduce([np.ones(4)], postscale=2 if comm.rank == 1 else 1)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


X = np.ones(4)
N = np.arange(4)


def located(pairs, op):
    """The best values of all ranks, and where they are; a NaN is better than every number."""
    values, where = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    wide = values.astype(np.float64)
    order = np.where(np.isnan(wide), -np.inf, wide if op is cc.MINLOC else -wide)
    best = order.min(axis=0)
    taken = np.where(order == best, where, np.iinfo(where.dtype).max).min(axis=0)
    row = np.argmin(np.where((order == best) & (where == taken), 0, 1), axis=0)
    return np.take_along_axis(values, row[None], 0)[0], taken


@pytest.mark.algorithms("allreduce")
@pytest.mark.parametrize("op", [cc.MINLOC, cc.MAXLOC], ids=lambda op: op.value)
def test_the_best_number_of_all_ranks_and_where_it_is(comm, algorithm, op):
    for dtype in [*oracle.FLOATS, np.dtype(np.int8), np.dtype(np.uint64), oracle.BOOL]:
        for index in (np.int32, np.uint8, np.int64):
            pairs = []
            for rank in range(comm.size):
                values = oracle.data(rank, (50, 3), dtype)
                values[:10] = oracle.data(0, (10, 3), dtype)  # all bring the same
                if dtype in oracle.FLOATS and algorithm != "native":  # MPI says nothing of NaN
                    values[rank] = values[20] = np.nan
                where = (comm.size - rank + np.arange(150).reshape(50, 3)).astype(index)
                pairs.append((values, where))
            best, where = located(pairs, op)
            result = comm.allreduce(pairs[comm.rank], op=op, algorithm=algorithm)
            assert isinstance(result, tuple)
            assert [a.dtype for a in result] == [dtype, index]
            np.testing.assert_array_equal(result[0].astype(float), best.astype(float))
            np.testing.assert_array_equal(result[1], where)


def test_pairs_in_all_reductions(comm):
    pairs = [
        (oracle.data(r, (7, 2), F32), np.arange(14).reshape(7, 2) + r) for r in range(comm.size)
    ]
    x = pairs[comm.rank]
    best, where = located(pairs, cc.MINLOC)
    out = np.empty((7, 2), F32), np.empty((7, 2), int)
    result = comm.allreduce(x, op=cc.MINLOC, out=out)
    assert result[0] is out[0]
    assert result[1] is out[1]
    np.testing.assert_array_equal(out[1], where)
    root = comm.size - 1
    reduced = comm.reduce(x, root, op=cc.MINLOC, out=out)
    assert (reduced is None) == (comm.rank != root)
    np.testing.assert_array_equal(out[0], best)
    counts = [0] * root + [7]
    for numbers in (None, counts):
        values, own = comm.reduce_scatter(x, op=cc.MINLOC, counts=numbers)
        bounds = np.cumsum(numbers or [len(a) for a in np.array_split(best, comm.size)])
        rows = slice(bounds[comm.rank] - len(values), bounds[comm.rank])
        np.testing.assert_array_equal(values, best[rows])
        np.testing.assert_array_equal(own, where[rows])
    to = np.empty_like(values), np.empty_like(own)
    assert comm.reduce_scatter(x, op=cc.MINLOC, counts=counts, out=to)[1] is to[1]
    np.testing.assert_array_equal(to[1], own)
    loss, rank = comm.allreduce((10.0 - comm.rank, comm.rank), op=cc.MINLOC)
    assert (loss.item(), rank.item()) == (10.0 - root, root)
    request = comm.allreduce_async((comm.rank % 2, comm.rank), op=cc.MAXLOC)
    assert [n.item() for n in request.wait()] == ([1, 1] if comm.size > 1 else [0, 0])


@pytest.mark.several
def test_pairs_that_differ_are_one_error_on_all(comm):
    odd = comm.rank == 1
    with pytest.raises(cc.MismatchError, match="indices is"):
        comm.allreduce((X, N.astype("i2" if odd else "i4")), op=cc.MINLOC)
    with pytest.raises(cc.MismatchError, match="op is"):
        comm.allreduce((X, N), op=cc.MINLOC if odd else cc.MAXLOC)
    with pytest.raises(cc.MismatchError, match="op is"):
        comm.allreduce(*[(X, N)] if odd else [X], op=cc.MINLOC if odd else cc.MIN)
    assert comm.allreduce(1, op=cc.SUM) == comm.size
