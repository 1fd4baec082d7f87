"""All-reduces whose arrays travel as 16 bits, on ranks that are threads and on MPI processes."""

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import oracle
from collectives.algorithms import compressed
from collectives.arrays import reduction
from collectives.communicator import group_of
from collectives.kernels import int8
from collectives.kernels.compression import BF16, FP16, INT8
from collectives.transport.transport import Deadline

SCHEMES = [FP16, BF16, INT8]
HALVES = [np.dtype(np.float16), oracle.BFLOAT16]
OPS = [cc.SUM, cc.MEAN, cc.MIN, cc.MAX, cc.PRODUCT]

# None at all, one, fewer than ranks, odd, several slices.
COUNTS = [0, 1, 2, 3, 1023, 200_001]


def allreduce(comm, scheme, x, op=cc.SUM, name=None):
    """The call as a communicator makes it: a new array, the mean divided while it is rounded."""
    codec = scheme.codec(x.dtype, op, network=False, name=name)
    result = np.empty_like(x)
    divisor = comm.size if op is cc.MEAN else 1
    deadline = Deadline("allreduce", 20.0)
    compressed.allreduce(
        group_of(comm).transport, result, op, deadline, codec=codec, contribution=x, divisor=divisor
    )
    return result


def allreduce_packed(comm, x, op=cc.SUM):
    buffer = x.copy()
    divisor = comm.size if op is cc.MEAN else 1
    compressed.allreduce_packed(
        group_of(comm).transport, buffer, op, Deadline("allreduce", 20.0), divisor=divisor
    )
    return buffer


def everyones(comm, count, dtype):
    return [oracle.data(rank, (count,), np.dtype(dtype)) for rank in range(comm.size)]


def two_roundings(arrays, op, half):
    """The exact result, and the largest error that two roundings to 16 bits allow.

    With u half of the type's eps, a contribution of magnitude m is wrong by u m, a result of
    magnitude r by u r; the sum of P numbers in float32 adds P roundings of that type. In a product,
    where errors are relative, there are P + 1 of one kind and P of the other. All numbers here are
    far from the subnormal ones.
    """
    size = len(arrays)
    u = float(ml_dtypes.finfo(half).eps) / 2
    single = size * float(np.finfo(np.float32).eps)
    stack = np.stack(arrays).astype(np.float64)
    if op is cc.PRODUCT:
        exact = stack.prod(axis=0)
        return exact, np.abs(exact) * ((1 + u) ** (size + 1) * (1 + single) - 1)
    by = size if op is cc.MEAN else 1
    magnitude = np.abs(stack).sum(axis=0) / by
    exact = stack.sum(axis=0) / by
    before = (u + single) * magnitude
    return exact, before + u * (np.abs(exact) + before)


def unit(scheme):
    """The largest error of a rounding, relative to the number, of 8 bits to the block's largest."""
    if scheme == INT8:  # half a step, which has been rounded up to a bfloat16
        return 0.5 / int8.MOST * (1 + 2.0**-7)
    return float(ml_dtypes.finfo(scheme.dtype).eps) / 2


def largest_of_block(array):
    blocks = np.zeros((-(-array.size // 64), 64))
    blocks.reshape(-1)[: array.size] = np.abs(array)
    return np.repeat(blocks.max(axis=1), 64)[: array.size]


@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.MIN, cc.MAX], ids=lambda op: op.value)
def test_a_result_of_8_bits_is_rounded_twice(comm, op):
    ufunc = {cc.MIN: np.minimum, cc.MAX: np.maximum}.get(op, np.add)
    for dtype, counts in (("f4", [*COUNTS, 1 << 21]), ("f8", [0, 1030])):
        for count in counts:
            arrays = everyones(comm, count, dtype)
            result = allreduce(comm, INT8, arrays[comm.rank], op)
            assert result.dtype == arrays[0].dtype
            by = comm.size if op is cc.MEAN else 1
            exact = ufunc.reduce(np.stack(arrays).astype(np.float64)) / by
            single = comm.size * float(np.finfo(np.float32).eps)
            before = sum((unit(INT8) + single) * largest_of_block(a) / by for a in arrays)
            after = unit(INT8) * largest_of_block(np.abs(exact) + before)
            assert (np.abs(result - exact) <= before + after).all()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
@pytest.mark.parametrize("scheme", [FP16, BF16], ids=str)
def test_a_result_is_rounded_twice(comm, scheme, op):
    for dtype, counts in (("f4", COUNTS), ("f8", [0, 1030])):
        for count in counts:
            arrays = everyones(comm, count, dtype)
            x = arrays[comm.rank]
            x.flags.writeable = False
            result = allreduce(comm, scheme, x, op)
            assert result.dtype == x.dtype
            if op in (cc.MIN, cc.MAX):  # one of the contributions, rounded; order is kept
                ufunc = np.minimum if op is cc.MIN else np.maximum
                expected = ufunc.reduce([a.astype(scheme.dtype) for a in arrays])
                np.testing.assert_array_equal(result, expected.astype(x.dtype))
            else:
                exact, error = two_roundings(arrays, op, scheme.dtype)
                assert (np.abs(result - exact) <= error).all()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_arrays_of_16_bits_are_rounded_once(comm, half, op):
    for count in COUNTS:
        arrays = everyones(comm, count, half)
        result = allreduce_packed(comm, arrays[comm.rank], op)
        oracle.assert_close(result, arrays, op)
        if op is cc.SUM:  # P float32 additions, and one rounding of the result
            exact = np.sum(arrays, axis=0, dtype=np.float64)
            u = float(ml_dtypes.finfo(half).eps) / 2
            single = comm.size * np.finfo(np.float32).eps * np.abs(arrays).sum(axis=0, dtype="f8")
            error = single + u * (np.abs(exact) + single)
            assert (np.abs(result.astype("f8") - exact) <= error).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_all_ranks_get_the_same_bits_and_get_them_again(comm, scheme):
    x = oracle.data(comm.rank, (50_001,), np.dtype(np.float32))
    x[:3] = np.nan, np.inf, -0.0
    first = allreduce(comm, scheme, x, cc.MEAN).view(np.uint32)
    again = allreduce(comm, scheme, x, cc.MEAN).view(np.uint32)
    np.testing.assert_array_equal(first, again)
    others = comm.allgather(first.reshape(1, -1))
    np.testing.assert_array_equal(others, np.broadcast_to(first, others.shape))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_equal_numbers_have_equal_sums_wherever_they_stand(comm, scheme):
    x = np.full(10_001, oracle.data(comm.rank, (1,), np.dtype(np.float32))[0])
    result = allreduce(comm, scheme, x)
    np.testing.assert_array_equal(result, result[0])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_infinities_and_nans_reach_every_rank(comm, scheme):
    x = np.zeros(5, np.float32)
    if comm.rank == comm.size - 1:
        x[1:4] = np.nan, np.inf, -np.inf
    for op in (cc.SUM, cc.MEAN):
        np.testing.assert_array_equal(
            allreduce(comm, scheme, x, op), [0, np.nan, np.inf, -np.inf, 0]
        )
    for op in (cc.MIN, cc.MAX):
        assert np.isnan(allreduce(comm, scheme, x, op)[1])


def test_what_is_too_large_for_float16_becomes_infinite_on_every_rank(comm):
    one = np.full(3, 70_000.0 if comm.rank == 0 else 0.0, np.float32)
    np.testing.assert_array_equal(allreduce(comm, FP16, one), np.inf)
    # Contributions that fit, and a sum that does not.
    together = allreduce(comm, FP16, np.full(3, 40_000.0, np.float32))
    np.testing.assert_array_equal(together, np.inf if comm.size > 1 else 40_000)
    # A bfloat16 reaches as far as a float32.
    assert np.isfinite(allreduce(comm, BF16, np.full(3, 1e30, np.float32))).all()


def test_a_mean_overflows_only_where_it_does_not_fit(comm):
    fits = np.full(3, 60_000.0, np.float32)
    np.testing.assert_allclose(allreduce(comm, FP16, fits, cc.MEAN), fits, rtol=2 * 2**-11)
    halves = fits.astype(np.float16)
    np.testing.assert_allclose(allreduce_packed(comm, halves, cc.MEAN), halves, rtol=2**-11)
    largest = np.full(3, 3.3e38).astype(oracle.BFLOAT16)
    mean = allreduce_packed(comm, largest, cc.MEAN).astype(np.float64)
    np.testing.assert_allclose(mean, largest.astype(np.float64), rtol=2**-8)


def test_a_buffer_that_is_prepared_is_reduced_in_place(comm):
    arrays = everyones(comm, 1001, "f4")
    buffer = arrays[comm.rank].copy()
    reduction.prescale(buffer, cc.MEAN, comm.size)
    codec = FP16.codec(buffer.dtype, cc.MEAN, network=False)
    deadline = Deadline("allreduce", 20.0)
    compressed.allreduce(group_of(comm).transport, buffer, cc.MEAN, deadline, codec=codec)
    np.testing.assert_array_equal(buffer, allreduce(comm, FP16, arrays[comm.rank], cc.MEAN))


@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN], ids=lambda op: op.value)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_with_feedback_the_errors_of_100_steps_do_not_add_up(comm, scheme, op):
    # What the results of all steps lack together is what the residuals hold: one rounding of each
    # rank's contribution (magnitude at most 2.1, its residual included) and one of the result. The
    # additions in float32 round, too: two per contribution and P + 1 for each result, in each step.
    steps, count = 100, 57
    u = unit(scheme)
    eps = float(np.finfo(np.float32).eps) / 2

    def total_error(comm, feedback):
        own = scheme.with_feedback() if feedback else scheme
        gradients = [a[None] * np.linspace(0.5, 1, steps, dtype="f4")[:, None]
                     for a in everyones(comm, count, "f4")]  # fmt: skip
        total = np.zeros(count)
        for step in range(steps):
            total += allreduce(comm, own, gradients[comm.rank][step], op, name="w")
        exact = np.sum(gradients, axis=(0, 1), dtype=np.float64)
        return np.abs(total - exact / (comm.size if op is cc.MEAN else 1))

    each, result = (2.1 / comm.size, 2.1) if op is cc.MEAN else (2.1, 2.1 * comm.size)
    rounding = u * (comm.size * each + result)
    noise = steps * eps * (2 * comm.size * each + (comm.size + 1) * result)
    assert total_error(comm, feedback=True).max() <= rounding + noise
    assert total_error(comm, feedback=False).max() > rounding + noise


def test_feedback_of_one_name_does_not_reach_another(comm):
    scheme = FP16.with_feedback()
    x = np.full(5, 1 + 2**-12, np.float32)
    y = np.full(7, 2.0, np.float32)
    for _ in range(3):
        allreduce(comm, scheme, x, cc.MEAN, name="x")
        np.testing.assert_array_equal(allreduce(comm, scheme, y, cc.MEAN, name="y"), y)
