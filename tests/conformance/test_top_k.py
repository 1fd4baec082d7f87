"""All-reduces that send the largest elements only, against a NumPy reference."""

import numpy as np
import pytest

import collectives as cc
import oracle
import strategies
from collectives.algorithms import compressed
from collectives.communicator import group_of
from collectives.transport.transport import Deadline


def by_messages(comm, scheme, x, op, name=None):
    codec = scheme.codec(x.dtype, op, network=False, name=name)
    result = np.empty_like(x)
    compressed.allreduce(
        group_of(comm).transport, result, op, Deadline("allreduce", 20.0), codec=codec,
        contribution=x, divisor=comm.size if op is cc.MEAN else 1,
    )  # fmt: skip
    return result


def reference(left, fraction):
    """The elements sent of float32 numbers; the stable order chooses lower indices of ties."""
    count = int(np.ceil(fraction * left.size))
    chosen = np.argsort(-np.abs(left), kind="stable")[:count]
    sent = np.zeros_like(left)
    sent[chosen] = left[chosen]
    return sent


@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN], ids=lambda op: op.value)
@pytest.mark.parametrize("fraction", [0.01, 0.3, 1])
def test_steps_equal_a_reference_with_the_same_bits_on_all_ranks(comm, op, fraction):
    for count in (0, 1, 2, 101, 5003):
        arrays = [oracle.data(r, (count,), np.dtype("f4")) for r in range(comm.size)]
        arrays = [np.round(4 * a) / 4 for a in arrays]  # with ties
        scheme = cc.TOPK(fraction).with_feedback()
        lefts = [np.zeros(count, np.float32) for _ in arrays]
        for _ in range(4):
            expected = np.zeros(count, np.float32)
            for r, a in enumerate(arrays):
                lefts[r] += a / np.float32(comm.size if op is cc.MEAN else 1)
                sent = reference(lefts[r], fraction)
                lefts[r] -= sent
                expected += sent
            result = by_messages(comm, scheme, arrays[comm.rank], op, "x")
            np.testing.assert_array_equal(result, expected)
            bits = comm.allgather(result.view(np.uint32).reshape(1, -1))
            np.testing.assert_array_equal(bits, np.broadcast_to(bits[0], bits.shape))


def test_infinities_and_nans_reach_every_rank_and_leave_no_residual(comm):
    for value in (np.nan, np.inf, -np.inf):
        scheme = cc.TOPK(0.2).with_feedback()
        x = np.ones(5, np.float32)
        x[comm.rank % 5] = value
        result = by_messages(comm, scheme, x, cc.SUM, "x")
        np.testing.assert_array_equal(result[: comm.size], np.full(min(5, comm.size), value))
        assert np.isfinite(by_messages(comm, scheme, np.ones(5, np.float32), cc.SUM, "x")).all()


def test_float64_loses_no_rounding_error(comm):
    scheme, x = cc.TOPK(1).with_feedback(), np.full(3, 1 / 3)
    total = sum(by_messages(comm, scheme, x, cc.MEAN, "x") for _ in range(20))
    np.testing.assert_allclose(total, 20 / 3, rtol=0, atol=2.0**-24)


def test_the_optimizer_keeps_what_is_not_sent(comm):
    w = np.zeros(40, np.float32)
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, compression=cc.TOPK(0.25).with_feedback()
    )
    gradient = np.full_like(w, 1 + comm.rank)
    for _ in range(20):
        optimizer.apply_gradients([(gradient, w)])
    exact = -20 * (1 + (comm.size - 1) / 2)
    # An element waits for at most three steps, or none in shared memory.
    assert (np.abs(w - exact) <= 3 * (comm.size + 1) / 2 + 1e-4).all()


@pytest.mark.parametrize(
    ("op", "dtype"), [(cc.MAX, "f4"), (cc.SUM, "i4"), (cc.INTEGER_MEAN, "i4"), (cc.SUM, "f2")],
    ids=str,
)  # fmt: skip
def test_what_it_cannot_add_is_refused_and_the_next_call_works(comm, op, dtype):
    with pytest.raises(ValueError, match="top-k adds floats, expected SUM or MEAN"):
        comm.allreduce(np.ones(3, dtype), op=op, compression=cc.TOPK(0.5))
    result = comm.allreduce(np.ones(1, "f4"), op=cc.SUM, compression=cc.TOPK(0.5))
    np.testing.assert_array_equal(result, comm.size)


@pytest.mark.parametrize("fraction", [0, -1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match="expected a fraction > 0 and <= 1"):
        cc.TOPK(fraction)


@pytest.mark.several
def test_another_fraction_on_one_rank_is_an_error_on_all(comm):
    compression = cc.TOPK(0.02 if comm.rank == 1 else 0.01)
    with pytest.raises(cc.MismatchError, match=r"compression is top-k 0.0"):
        comm.allreduce(np.ones(3, np.float32), compression=compression)
