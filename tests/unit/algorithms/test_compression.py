"""What travels as 16 bits, what is kept of the errors, and the schedule of the compressed sum."""

import sys

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import inprocess
import launcher
from collectives.algorithms import compressed
from collectives.arrays import reduction
from collectives.communicator import group_of
from collectives.core import topology
from collectives.kernels import compression
from collectives.kernels.compression import BF16, FP16, INT8, NONE, TOPK
from collectives.kernels.int8 import BLOCK
from collectives.transport.transport import Deadline

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FLOAT32 = np.dtype(np.float32)


def codec(scheme, dtype=FLOAT32, op=cc.SUM, network=False, name=None):
    return scheme.codec(np.dtype(dtype), op, network=network, name=name)


def test_floats_of_32_and_64_bits_are_compressed_and_nothing_else():
    for dtype in ("f4", "f8"):
        assert codec(FP16, dtype).dtype == np.float16
        assert codec(BF16, dtype).dtype == ml_dtypes.bfloat16
        assert codec(INT8, dtype).dtype == BLOCK
        assert codec(NONE, dtype) is None
    for dtype in ("?", "i1", "i4", "u8", "c8", "c16", *HALVES):
        assert codec(FP16, dtype) is None
        assert codec(BF16, dtype) is None
        assert codec(INT8, dtype) is None


def test_on_the_network_means_not_within_a_node():
    scheme = FP16.on("network")
    assert codec(scheme, network=False) is None
    assert codec(scheme, network=True).dtype == np.float16
    assert codec(scheme.on("everywhere"), network=False).dtype == np.float16
    assert scheme.on("everywhere") == FP16
    with pytest.raises(ValueError, match="expected one of everywhere network, got 'node'"):
        FP16.on("node")


def test_ranks_tell_compressions_apart_by_their_words():
    words = [NONE, FP16, BF16, INT8, BF16.on("network"), FP16.on("network").with_feedback()]
    words += [TOPK(0.01), TOPK(0.05).on("network").with_feedback()]
    assert [str(scheme) for scheme in words] == [
        "none",
        "float16",
        "bfloat16",
        "int8",
        "bfloat16 on network",
        "float16 on network with feedback",
        "top-k 0.01",
        "top-k 0.05 on network with feedback",
    ]
    assert len({*words, FP16.with_feedback(), FP16.with_feedback()}) == 10


def test_a_compression_is_shown_as_it_is_written():
    feedback = FP16.with_feedback()
    assert repr([NONE, FP16, BF16, INT8]) == "[NONE, FP16, BF16, INT8]"
    assert repr(feedback) == "FP16.with_feedback()"
    assert repr(BF16.on("network")) == "BF16.on('network')"
    assert repr(feedback.on("network")) == "FP16.on('network').with_feedback()"
    assert repr(feedback.on("network").on("everywhere")) == repr(feedback)
    assert repr(TOPK(0.01).on("network").with_feedback()) == (
        "TOPK(0.01).on('network').with_feedback()"
    )
    for scheme in (NONE, FP16, BF16, INT8, TOPK(0.01), NONE.on("network"), BF16.on("network")):
        assert eval(repr(scheme)) == scheme


def test_feedback_needs_something_to_round_a_name_and_a_sum():
    with pytest.raises(ValueError, match="NONE rounds nothing"):
        NONE.with_feedback()
    scheme = FP16.with_feedback()
    with pytest.raises(ValueError, match="expected name=, got None"):
        codec(scheme)
    for op in (cc.MIN, cc.MAX, cc.PRODUCT):
        with pytest.raises(ValueError, match=f"expected SUM or MEAN, got {op.value}"):
            codec(scheme, op=op, name="w")
    # Also where nothing is rounded: the mistake shows before the program runs on several nodes.
    with pytest.raises(ValueError, match="name="):
        codec(scheme.on("network"), network=False)


def test_residuals_are_kept_by_name():
    scheme = FP16.with_feedback()
    x = np.array([1 + 2**-12], np.float32)
    for _ in range(3):
        codec(scheme, name="a").pack(x)
    codec(scheme, name="b").pack(x)
    left = {n: scheme.residuals.array(n, "contribution", 1, FLOAT32)[0] for n in "abc"}
    assert left == {"a": 3 * 2**-12 - 2**-10, "b": 2**-12, "c": 0}
    assert FP16.with_feedback().residuals is not scheme.residuals
    scheme.residuals.clear()
    assert codec(scheme, name="a").pack(x) == 1
    with pytest.raises(ValueError, match=r"expected 1 elements of float32, got 2 .*\(name: a"):
        codec(scheme, name="a").pack(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="got 1 of float64"):
        codec(scheme, np.float64, name="a").pack(np.zeros(1))


def test_packing_leaves_the_source_alone_and_takes_read_only_memory():
    x = np.array([3.0, 6.0], np.float32)
    x.flags.writeable = False
    packed = codec(FP16).pack(x, 3)
    assert packed.dtype == np.float16
    assert packed.tolist() == [1, 2]
    assert x.tolist() == [3, 6]


@pytest.mark.parametrize("size", [*range(1, 10), 32, 33])
def test_in_every_step_each_rank_sends_to_one_and_receives_from_one(size):
    everyones = [list(compressed.schedule(rank, size, 2)) for rank in range(size)]
    assert {len(own) for own in everyones} == {2 * (size - 1)}
    for step in zip(*everyones, strict=True):
        assert sorted(exchange.dest for exchange in step) == list(range(size))
        for rank, exchange in enumerate(step):
            assert step[exchange.dest].source == rank
            assert step[exchange.dest][:2] == exchange[:2]
    for rank, own in enumerate(everyones):
        for number in range(2):
            met = sorted(e.source for e in own if e.slice == number)
            assert met == [r for r in range(size) if r != rank]


def run(size, function, mode="synchronous"):
    """Call `function(transport)` on ranks that are threads."""
    return inprocess.run_ranks(size, lambda comm: function(group_of(comm).transport), mode)


def deadline():
    return Deadline("test", 20.0)


def summed(everyones, mode="synchronous"):
    """The sum of the rows, one for each rank, as each rank gets it."""

    def allreduce(transport):
        buffer = everyones[transport.rank].copy()
        compressed.allreduce_packed(transport, buffer, cc.SUM, deadline())
        return buffer

    return run(len(everyones), allreduce, mode)


@pytest.mark.parametrize("mode", inprocess.MODES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_many_slices_share_little_scratch(monkeypatch, size, mode):
    monkeypatch.setattr(compressed, "SLICE_BYTES", 32)
    count = 16 * 9 * size + 3
    everyones = np.random.default_rng(0).integers(-50, 50, (size, count)).astype(np.float16)

    for result in summed(everyones, mode):
        np.testing.assert_array_equal(result, everyones.sum(axis=0))  # small integers: exact


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_no_memory_is_received_into_that_is_still_needed(monkeypatch, size):
    monkeypatch.setattr(compressed, "SLICE_BYTES", 32)
    count = 16 * 9 * size

    def allreduce(transport):
        start = transport.start_receive

        def scribbled(into, source):  # as a message may do that comes at once
            into.view(np.uint8)[...] = 0xFF
            return start(into, source)

        monkeypatch.setattr(transport, "start_receive", scribbled)
        buffer = np.ones(count, np.float16)
        compressed.allreduce_packed(transport, buffer, cc.SUM, deadline())
        return buffer

    for result in run(size, allreduce):
        np.testing.assert_array_equal(result, size)


@pytest.mark.parametrize("size", [3, 5])
def test_elements_are_summed_in_rank_order_wherever_they_stand(size):
    # 2^26 swallows what is added to it in float32, so that the order shows in the result.
    random = np.random.default_rng(6)
    everyones = random.choice([2.0**26, -(2.0**26), 1, 3], (size, 500)).astype(HALVES[1])
    expected = everyones[0].astype(np.float32)
    for part in everyones[1:]:
        expected += part.astype(np.float32)

    for result in summed(everyones):
        np.testing.assert_array_equal(result, expected.astype(HALVES[1]))


@pytest.mark.parametrize(
    ("scheme", "share"), [(FP16, 1 / 2), (INT8, 66 / 256), (TOPK(0.01), None)], ids=str
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_share_of_the_bytes_of_a_ring_is_sent(monkeypatch, size, scheme, share):
    count = 64 * 1200
    sent = [0] * size

    def allreduce(transport):
        start = transport.start_send

        def counted(data, dest):
            sent[transport.rank] += data.nbytes
            return start(data, dest)

        monkeypatch.setattr(transport, "start_send", counted)
        buffer = np.ones(count, np.float32)
        compressed.allreduce(transport, buffer, cc.SUM, deadline(), codec=codec(scheme))

    run(size, allreduce)
    if share is None:  # an index and a value of each of the largest, to all others
        assert sent == [8 * (size - 1) * count // 100] * size
    else:
        assert sent == [share * 2 * (size - 1) * 4 * count // size] * size


def test_many_ranks_need_no_more_scratch_than_few(monkeypatch):
    allocated = []
    empty = np.empty

    def watched(shape, dtype=float):
        allocated.append(np.prod(shape) * np.dtype(dtype).itemsize)
        return empty(shape, dtype)

    class Nobody(inprocess.ThreadTransport):
        def wait(self, messages, deadline):
            pass

    class Group(inprocess.ThreadGroup):
        def event(self, rank):
            pass

    for size in (64, 1000):
        transport = Nobody(Group(size, "synchronous"), 0)
        buffer = np.zeros(20_000 * size, np.float16)
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", watched)
            compressed.allreduce_packed(transport, buffer, cc.SUM, deadline())
    assert max(allocated) <= 8 << 20


def by_hops(everyones):
    """The sum of a ring that rounds at each rank: chunk c is added as c + 1, c + 2, ..., c."""
    size, count = everyones.shape
    bounds = topology.chunk_bounds(count, size)
    result = np.empty(count, everyones.dtype)
    for c in range(size):
        at = slice(bounds[c], bounds[c + 1])
        total = everyones[(c + 1) % size, at]
        for hop in range(2, size + 1):
            total = total + everyones[(c + hop) % size, at]
        result[at] = total
    return result


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("low", [-1, 0], ids=["signed", "positive"])
def test_the_error_of_8_ranks_is_at_most_half_of_rounding_at_each_hop(half, low):
    everyones = np.random.default_rng(5).uniform(low, 1, (8, 40_000)).astype(half)
    exact = everyones.astype(np.float64).sum(axis=0)

    ours = np.abs(summed(everyones)[3].astype(np.float64) - exact)
    theirs = np.abs(by_hops(everyones).astype(np.float64) - exact)
    assert ours.max() <= 0.5 * theirs.max()
    # One rounding is the best that a 16-bit result can be.
    best = np.abs(exact.astype(np.float32).astype(half).astype(np.float64) - exact)
    assert ours.max() <= best.max() * (1 + 1e-3)


def test_a_rank_that_does_not_come_is_named():
    def allreduce(transport):
        if transport.rank == 0:
            return
        buffer = np.ones(100, np.float32)
        with pytest.raises(cc.CollectiveTimeout, match="rank 0 to"):
            compressed.allreduce(
                transport, buffer, cc.SUM, Deadline("allreduce", 0.3), codec=codec(FP16)
            )

    run(3, allreduce)


def test_importing_loads_no_compiler():
    script = (
        "import sys, collectives.kernels.compression, collectives.algorithms.compressed\n"
        "sys.exit('numba' in sys.modules or 'llvmlite' in sys.modules)"
    )
    assert launcher.run([sys.executable, "-c", script], timeout=60).status == 0


def test_all_ops_are_known_to_the_loops():
    from collectives.kernels import combine, float16

    straight = set(reduction.OPS) - {*reduction.LOWERED, *reduction.LOCATING}
    functions = {rule.function for op, rule in reduction.RULES.items() if op in straight}
    assert {*combine.FUNCTIONS, *combine.BITWISE} == functions
    # Other tests may have added operations of their own.
    named = {op for op, rule in reduction.RULES.items() if rule.own is None}
    assert named == straight | set(reduction.LOWERED)
    assert {FP16.dtype, BF16.dtype} == set(HALVES)
    assert set(float16.CONVERSIONS) == {half.name for half in HALVES}
    assert compression.NONE.dtype is None
