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


def in_messages(comm, world):
    """Whether arrays are compressed; one rank alone also compresses."""
    return comm.size == 1 or not world.shared


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


def test_the_optimizer_keeps_what_is_not_sent(comm, world):
    w = np.zeros(40, np.float32)
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, compression=cc.TOPK(0.25).with_feedback()
    )
    gradient, mean = np.full_like(w, 1 + comm.rank), 1 + (comm.size - 1) / 2
    for step in range(20):
        optimizer.apply_gradients([(gradient, w)])
        waiting = (step + 1) * mean + w
        # An element waits for at most three steps, or none in shared memory.
        assert (waiting >= 0).all()
        assert waiting.max() <= (3 * mean if in_messages(comm, world) else 0)
        if step == 0:
            assert waiting.any() == in_messages(comm, world)
    everyones = comm.allgather(w[np.newaxis])
    np.testing.assert_array_equal(everyones, np.broadcast_to(w, everyones.shape))


@pytest.mark.parametrize("feedback", [False, True])
def test_calls_of_several_arrays_send_the_largest_of_each_buffer(comm, world, feedback):
    scheme = cc.TOPK(0.125).with_feedback() if feedback else cc.TOPK(0.125)
    x = np.arange(1024, dtype=np.float32)  # a bucket of fewer is padded
    sent = np.where(in_messages(comm, world) & (x < 896), 0, x * comm.size)
    with comm.plan_buckets([x], op=cc.SUM, compression=scheme) as buckets:
        results = [x.copy() for x in buckets.allreduce([x])]
    if not feedback:  # which needs names
        results += comm.grouped_allreduce([x], op=cc.SUM, compression=scheme)
        results += [comm.allreduce(x, op=cc.SUM, compression=scheme) for _ in range(3)]
        results += [comm.allreduce_async(x, op=cc.SUM, compression=scheme).wait()]
    for result in results:
        np.testing.assert_array_equal(result, sent)


TOP = cc.TOPK(0.5)
FLOATS, LIMITED = np.ones(3, np.float32), "expected SUM or MEAN of float32 or float64, got "
REFUSED = {
    "maximum": (lambda c: c.allreduce(FLOATS, op=cc.MAX, compression=TOP), f"{LIMITED}MAX of"),
    "integers": (
        lambda c: c.allreduce(np.ones(3, int), op=cc.SUM, compression=TOP),
        f"{LIMITED}SUM of int64; use NONE, or FP16, BF16 or INT8, which send other dtypes",
    ),
    "integer mean": (
        lambda c: c.allreduce(np.ones(3, int), op=cc.INTEGER_MEAN, compression=TOP), LIMITED,
    ),
    "float16": (
        lambda c: c.allreduce(np.ones(3, np.float16), compression=TOP), f"{LIMITED}MEAN of float16",
    ),
    "grouped integers": (
        lambda c: c.grouped_allreduce([FLOATS, np.ones(3, int)], op=cc.SUM, compression=TOP),
        f"{LIMITED}SUM of int64",
    ),
    "grouped feedback": (
        lambda c: c.grouped_allreduce([FLOATS], compression=TOP.with_feedback()), "expected name=",
    ),
    "buckets of integers": (
        lambda c: c.plan_buckets([np.ones(3, int)], op=cc.SUM, compression=TOP),
        f"{LIMITED}SUM of int64",
    ),
    "sharded state": (
        lambda c: strategies.DistributedOptimizer(
            strategies.SGD(1.0), comm=c, shard_state=True, compression=TOP
        ),
        "shard_state excludes compression",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED)
def test_what_it_cannot_send_is_refused_and_the_next_call_works(comm, call):
    make, words = REFUSED[call]
    with pytest.raises(ValueError, match=words):
        make(comm)
    result = comm.allreduce(np.ones(1, "f4"), op=cc.SUM, compression=TOP)
    np.testing.assert_array_equal(result, comm.size)


def test_an_array_of_more_elements_than_indices_is_refused():
    codec = cc.TOPK(1e-9).codec(np.dtype("f4"), cc.SUM, network=False)
    codec.acquire(2**32, np.dtype("f4"))
    with pytest.raises(ValueError, match="expected at most 4294967296 elements, got 4294967297"):
        codec.acquire(2**32 + 1, np.dtype("f4"))


@pytest.mark.parametrize("fraction", [0, -1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match="expected a fraction > 0 and <= 1"):
        cc.TOPK(fraction)


@pytest.mark.several
def test_another_fraction_on_one_rank_is_an_error_on_all(comm):
    compression = cc.TOPK(0.02 if comm.rank == 1 else 0.01)
    with pytest.raises(cc.MismatchError, match=r"compression is top-k 0.0"):
        comm.allreduce(np.ones(3, np.float32), compression=compression)
