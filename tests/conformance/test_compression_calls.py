"""Compressed all-reduces through the communicator."""

import numpy as np
import pytest

import collectives as cc
import oracle


@pytest.mark.parametrize("compression", [cc.FP16, cc.BF16, cc.INT8], ids=str)
@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.MIN, cc.MAX], ids=lambda op: op.value)
def test_a_compressed_allreduce_rounds_twice_whatever_the_size(comm, compression, op):
    for shape in [(), (0,), (1,), (7, 3), (70_001,)]:
        arrays = [oracle.data(r, shape, np.dtype(np.float32)) for r in range(comm.size)]
        x = arrays[comm.rank]
        before = x.copy()
        result = comm.allreduce(x, op=op, compression=compression)
        exact, _ = oracle.reduced(arrays, op)
        eps = {cc.FP16: 2.0**-10, cc.BF16: 2.0**-7, cc.INT8: 2.0**-7}[compression]
        magnitude = np.sum(np.abs(arrays), axis=0) / (comm.size if op is cc.MEAN else 1)
        if compression is cc.INT8:  # relative to the largest of a block, or of the array
            magnitude, exact_size = (np.max(magnitude, initial=0), np.max(np.abs(exact), initial=0))
        else:
            exact_size = np.abs(exact)
        assert (np.abs(result - exact) <= eps * (magnitude + exact_size)).all()
        assert result.dtype == np.float32
        np.testing.assert_array_equal(x, before)
        everyones = comm.allgather(result.reshape(1, -1))
        np.testing.assert_array_equal(
            everyones, np.broadcast_to(result.reshape(-1), everyones.shape)
        )


def test_other_dtypes_travel_as_they_are(comm):
    for dtype in (np.int32, np.complex64, np.float16):
        arrays = [oracle.data(r, (40,), np.dtype(dtype)) for r in range(comm.size)]
        result = comm.allreduce(arrays[comm.rank], op=cc.SUM, compression=cc.FP16)
        oracle.assert_close(result, arrays, cc.SUM)


def test_none_is_no_compression_and_anything_else_is_refused(comm):
    x = np.array([1 + 2.0**-20, -3.0], np.float32)
    for _ in range(3):  # the second and third time as a repeated call
        np.testing.assert_array_equal(comm.allreduce(x, compression=None), x)
    np.testing.assert_array_equal(comm.allreduce_async(x, compression=None).wait(), x)
    (one,) = comm.grouped_allreduce([x], compression=None)
    np.testing.assert_array_equal(one, x)
    with comm.plan_buckets([x], compression=None) as buckets:
        np.testing.assert_array_equal(buckets.allreduce([x])[0], x)
    # It agrees with the ranks that say so in the other way.
    compression = None if comm.rank == 1 else cc.NONE
    np.testing.assert_array_equal(comm.allreduce(x, compression=compression), x)
    words = r"not a compression, expected NONE, FP16, BF16, INT8, TOPK\(...\) .*, got 'fp16'"
    for call in (
        lambda: comm.allreduce(x, compression="fp16"),
        lambda: comm.grouped_allreduce([x], compression="fp16"),
        lambda: comm.plan_buckets([x], compression="fp16"),
    ):
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.several
def test_another_compression_on_one_rank_is_an_error_on_all(comm):
    compression = cc.BF16 if comm.rank == 1 else cc.FP16
    with pytest.raises(cc.MismatchError, match="compression is "):
        comm.allreduce(np.ones(3, np.float32), compression=compression)
    with pytest.raises(ValueError, match="name"):
        comm.allreduce(np.ones(3, np.float32), compression=cc.FP16.with_feedback())


def test_feedback_makes_up_for_the_roundings(comm):
    for scheme, eps in ((cc.FP16, 2.0**-11), (cc.INT8, 2.0**-7)):
        compression = scheme.with_feedback()
        x = np.full(5, 1 / 3 + comm.rank, np.float32)
        total = np.zeros(5)
        for _ in range(100):
            total += comm.allreduce(x, op=cc.MEAN, compression=compression, name="x")
        exact = np.mean([1 / 3 + r for r in range(comm.size)])
        # What is left is the last step's rounding of contributions and of the result.
        np.testing.assert_allclose(total, 100 * exact, rtol=0, atol=4 * comm.size * eps)


@pytest.mark.parametrize("compression", [cc.FP16, cc.BF16, cc.INT8, cc.TOPK(0.1)], ids=str)
def test_on_the_network_nothing_is_rounded_where_there_is_one_node(comm, compression):
    x = oracle.data(comm.rank, (70_001,), np.dtype(np.float32))
    plain = comm.allreduce(x, op=cc.SUM, algorithm="ring")
    result = comm.allreduce(x, op=cc.SUM, algorithm="ring", compression=compression.on("network"))
    np.testing.assert_array_equal(result, plain)


def test_a_name_that_stands_for_another_array_is_refused_and_the_next_call_works(comm):
    compression = cc.BF16.with_feedback()
    comm.allreduce(np.ones(40, np.float32), compression=compression, name="w")
    with pytest.raises(ValueError, match=r"expected 40 elements of float32, got 40 of float64"):
        comm.allreduce(np.ones(40), compression=compression, name="w")
    with pytest.raises(ValueError, match=r"got 41 of float32 \(name: w\)"):
        comm.allreduce(np.ones(41, np.float32), compression=compression, name="w")
    compression.residuals.clear()
    np.testing.assert_array_equal(
        comm.allreduce(np.ones(41, np.float32), compression=compression, name="w"), 1
    )
