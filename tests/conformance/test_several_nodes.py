"""Groups that span nodes: ranks of a node meet in shared memory, messages go between nodes.

All ranks are on this machine; which of them count as one node is made up.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import inprocess
import moving
import oracle
from collectives.algorithms import hierarchical
from collectives.calls import signature_check
from collectives.calls.group import Group
from collectives.communicator import Communicator, group_of
from collectives.core.settings import Settings, Stores
from collectives.kernels import int8
from collectives.node import control_block, peer_watch, segment
from collectives.node import engine as node
from collectives.transport.transport import Deadline

OPS = [cc.SUM, cc.MEAN, cc.MIN, cc.MAX, cc.PRODUCT, cc.BITWISE_XOR, cc.INTEGER_MEAN]
UNDER_MPI = os.environ.get("UNISONO_TEST_WORLD") == "mpi"
SETTINGS = Settings(timeout=20)

# For tests of both worlds: ranks that are threads, and MPI processes.
everywhere = pytest.mark.mpi if UNDER_MPI else lambda test: test

# Around one rail, all rails, several slots of the engine; fewer elements than ranks.
COUNTS = [0, 1, 3, 1000, 20_001, 300_007]


class Nodes(NamedTuple):
    """A layout: for every rank the lowest one of its node."""

    leaders: list[int]
    stores: Stores = "auto"

    def run(self, check, settings=SETTINGS):
        """Call `check(comm)` on all ranks: threads, or the processes of a world of this size."""
        settings = dataclasses.replace(settings, stores=self.stores)
        if not UNDER_MPI:
            inprocess.run_ranks(
                len(self.leaders), check, "synchronous", leaders=self.leaders, settings=settings
            )
            return
        from mpi4py import MPI

        from collectives.transport.mpi import MpiTransport

        if MPI.COMM_WORLD.Get_size() != len(self.leaders):
            pytest.skip(f"needs {len(self.leaders)} ranks")
        group = Group(MpiTransport(MPI.COMM_WORLD), self.leaders, settings)
        with Communicator(group) as comm:
            check(comm)


@pytest.fixture(
    params=[[0, 0, 2, 2], [0, 0, 0, 3], [0, 1, 1], [0, 1, 0, 1]],
    ids=["2 and 2", "3 and 1", "1 and 2", "2 and 2 dealt out"],
)
def nodes(request, stores):
    """Some ranks on two nodes."""
    return Nodes(request.param, stores)


@pytest.fixture
def comm(nodes):
    """In a test that takes it: the communicator, on every rank of both nodes."""
    return nodes


def everyones(comm, count, dtype=np.float32):
    return [oracle.data(rank, (count,), np.dtype(dtype)) for rank in range(comm.size)]


def assert_equal_everywhere(comm, array):
    """The same bits on all ranks."""
    bits = np.ascontiguousarray(array).view(np.uint8)
    all_of_them = comm.allgather(bits.reshape(1, -1))
    np.testing.assert_array_equal(all_of_them, np.broadcast_to(bits, all_of_them.shape))


@everywhere
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
def test_private_and_shared_arrays_have_the_same_sums(comm, op):
    for dtype in oracle.DTYPES:
        if not oracle.is_defined(op, dtype):
            continue
        for count in COUNTS if dtype == np.float32 else [1, 20_001]:
            arrays = everyones(comm, count, dtype)
            private = arrays[comm.rank].copy()
            private.flags.writeable = False
            result = comm.allreduce(private, op=op, algorithm="hierarchical")
            oracle.assert_close(result, arrays, op)
            np.testing.assert_array_equal(private, arrays[comm.rank])
            shared = comm.shared_empty(count, dtype)
            shared[...] = arrays[comm.rank]
            assert comm.allreduce(shared, op=op, out=shared, algorithm="hierarchical") is shared
            oracle.assert_close(shared, arrays, op)
            if op is not cc.PRODUCT:  # complex ones may be contracted in another way
                np.testing.assert_array_equal(shared, result)
    assert_equal_everywhere(comm, result)


@everywhere
def test_one_rank_of_each_node_may_speak_for_all(nodes, monkeypatch):
    monkeypatch.setattr(signature_check, "MAX_SPEAKERS", 1)  # as with many ranks on a node

    def check(comm):
        for _ in range(2):
            arrays = everyones(comm, 7)
            for op in OPS[:5]:
                result = comm.allreduce(arrays[comm.rank], op=op)
                oracle.assert_close(result, arrays, op)
                assert_equal_everywhere(comm, result)
            np.testing.assert_array_equal(comm.broadcast(arrays[comm.rank], root=1), arrays[1])
            comm.barrier()
            for odd in range(comm.size):
                with pytest.raises(cc.MismatchError, match=f"op is .*MAX on rank {odd}"):
                    comm.allreduce(arrays[0], op=cc.MAX if comm.rank == odd else cc.SUM)

    nodes.run(check)


@everywhere
def test_a_node_with_company_has_an_engine_and_the_others_need_none(comm):
    comm.barrier()
    assert (group_of(comm).node_engine is not None) == (comm.local_size > 1)
    with pytest.raises(ValueError, match="'node' needs two or more ranks, all on one node"):
        comm.barrier(algorithm="node")


@everywhere
def test_shared_arrays_are_reduced_in_whole_or_in_part_and_beside_private_ones(comm):
    shared = comm.shared_empty((300, 100), np.float64)
    shared[...] = comm.rank + 1
    total = comm.size * (comm.size + 1) / 2
    part = shared[50:250]
    comm.allreduce(part, op=cc.SUM, out=part, algorithm="hierarchical")
    np.testing.assert_array_equal(part, total)
    np.testing.assert_array_equal(shared[:50], comm.rank + 1)
    np.testing.assert_array_equal(shared[250:], comm.rank + 1)
    # One rank brings private memory, another one a different place.
    own = [shared[:200], shared[100:], np.zeros((200, 100)), shared[:200]][comm.rank]
    own[...] = comm.rank
    result = comm.allreduce(own, op=cc.MAX, algorithm="hierarchical")
    np.testing.assert_array_equal(result, comm.size - 1)
    comm.allreduce(own, op=cc.MAX, out=own, algorithm="hierarchical")
    np.testing.assert_array_equal(own, comm.size - 1)


@everywhere
def test_calls_of_many_kinds_follow_each_other_without_a_trace(comm):
    random = np.random.default_rng(7)  # the same on all ranks
    own = np.random.default_rng(comm.rank)
    shared = comm.shared_empty(200_000, np.float32)
    for _ in range(60):
        count = int(random.choice([1, 5000, 40_000, 200_000]))
        root = int(random.integers(comm.size))
        busy = own.standard_normal(own.integers(1, 20_000))  # ranks come at different times
        busy.sort()
        arrays = everyones(comm, count)
        kind = random.integers(4)
        if kind == 0:
            y = shared[:count]
            y[...] = arrays[comm.rank]
            comm.allreduce(y, op=cc.SUM, out=y, algorithm="hierarchical")
            oracle.assert_close(y, arrays, cc.SUM)
            y[...] = -1  # at once: no other rank may still read it
        elif kind == 1:
            result = comm.broadcast(arrays[comm.rank], root, algorithm="hierarchical")
            np.testing.assert_array_equal(result, arrays[root])
        elif kind == 2:
            result = comm.allreduce(arrays[comm.rank], op=cc.MEAN, algorithm="hierarchical")
            oracle.assert_close(result, arrays, cc.MEAN)
        else:
            comm.barrier(algorithm="hierarchical")
            np.testing.assert_array_equal(comm.allgather(arrays[comm.rank][:1]).size, comm.size)


@everywhere
@pytest.mark.parametrize("name", ["float8", "text", "structured"])
def test_arrays_of_other_dtypes_move_between_nodes(comm, name):
    for shape in [(5, 3), (20_001, 1)]:
        moving.assert_moved(comm, shape, moving.DTYPES[name])


@everywhere
@pytest.mark.parametrize("scheme", [cc.FP16, cc.BF16, cc.FP16.on("network")], ids=str)
@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.MAX], ids=lambda op: op.value)
def test_between_nodes_a_sum_is_rounded_twice_whatever_the_number_of_ranks(comm, scheme, op):
    # The node's sum is rounded, then the result; in between float32 adds up, as it does before.
    u = float(ml_dtypes.finfo(scheme.dtype).eps) / 2
    for count in (0, 3, 70_001):
        arrays = everyones(comm, count)
        result = comm.allreduce(arrays[comm.rank], op=op, compression=scheme)
        if op is cc.MAX:
            expected = np.maximum.reduce([a.astype(scheme.dtype) for a in arrays])
            np.testing.assert_array_equal(result, expected.astype(np.float32))
        else:
            by = comm.size if op is cc.MEAN else 1
            stack = np.stack(arrays).astype(np.float64) / by
            exact, magnitude = stack.sum(axis=0), np.abs(stack).sum(axis=0)
            before = (u + 2 * comm.size * float(np.finfo(np.float32).eps)) * magnitude
            assert (np.abs(result - exact) <= before + u * (np.abs(exact) + before)).all()
        assert_equal_everywhere(comm, result)


def largest_of_blocks(array):
    """For every number the largest magnitude of its block of 64."""
    starts = np.arange(0, array.size, int8.NUMBERS)
    if not starts.size:
        return np.abs(array)
    largest = np.maximum.reduceat(np.abs(array), starts)
    return np.repeat(largest, int8.NUMBERS)[: array.size]


@everywhere
@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN], ids=lambda op: op.value)
@pytest.mark.parametrize("scheme", [cc.INT8, cc.INT8.on("network")], ids=str)
def test_between_nodes_a_sum_is_rounded_twice_to_8_bits(comm, nodes, scheme, op):
    # Half a step of the block, which has been rounded up to a bfloat16; of each node's sum, then of
    # the result. In between float32 adds up.
    u = 0.5 / int8.MOST * (1 + 2.0**-7)
    leaders = np.array(nodes.leaders)
    single = 2 * comm.size * float(np.finfo(np.float32).eps)
    # Where it is not one rank's, a block begins with every chunk, of two equal ones.
    for count in (0, 3, 1000, 2 * int8.NUMBERS * 600):
        arrays = everyones(comm, count)
        result = comm.allreduce(arrays[comm.rank], op=op, compression=scheme)
        by = comm.size if op is cc.MEAN else 1
        stack = np.stack(arrays).astype(np.float64) / by
        sums = [stack[leaders == node].sum(axis=0) for node in np.unique(leaders)]
        exact, magnitude = stack.sum(axis=0), np.abs(stack).sum(axis=0)
        before = single * magnitude + sum(u * largest_of_blocks(s) for s in sums)
        after = u * largest_of_blocks(np.abs(exact) + before)
        assert (np.abs(result - exact) <= before + after).all()
        assert_equal_everywhere(comm, result)


@everywhere
def test_what_cancels_inside_a_node_is_not_rounded(comm):
    if comm.local_size % 2 == 0:
        # Too large for float16, and gone before anything is rounded.
        x = np.full(50_001, 1e6 if comm.local_rank % 2 else -1e6, np.float32)
    else:
        x = np.zeros(50_001, np.float32)
    result = comm.allreduce(x, op=cc.SUM, compression=cc.FP16.on("network"))
    np.testing.assert_array_equal(result, 0)


@everywhere
def test_feedback_makes_up_for_the_roundings_between_nodes(comm):
    compression = cc.BF16.on("network").with_feedback()
    x = np.full(20_001, 1 / 3 + comm.rank, np.float32)
    total = np.zeros(x.size)
    for _ in range(100):
        total += comm.allreduce(x, op=cc.MEAN, compression=compression, name="x")
    exact = np.mean([1 / 3 + r for r in range(comm.size)])
    # What is left is the last step's: of each node's sum, at most `exact`, and of the result.
    assert np.abs(total - 100 * exact).max() <= 4 * exact * 2.0**-8 + 100 * exact * 2.0**-20
    # Without feedback the same error comes back in every step.
    plain = comm.allreduce(x, op=cc.MEAN, compression=cc.BF16.on("network"))
    assert np.abs(100 * plain.astype(np.float64) - 100 * exact).max() > 4 * exact * 2.0**-8


@everywhere
def test_a_name_that_stands_for_another_array_is_refused_on_all_ranks(comm):
    compression = cc.FP16.on("network").with_feedback()
    comm.allreduce(np.ones(70_001, np.float32), compression=compression, name="w")
    with pytest.raises(ValueError, match="expected 70001 elements of float32, got 3"):
        comm.allreduce(np.ones(3, np.float32), compression=compression, name="w")
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@everywhere
@pytest.mark.parametrize("scheme", [cc.TOPK(0.25), cc.TOPK(0.25).on("network")], ids=str)
def test_between_nodes_an_element_waits_until_it_is_among_the_largest(comm, scheme):
    compression = scheme.with_feedback()
    total, sent = np.zeros(20_001), 0
    for step in range(8):
        x = np.full(total.size, 1 + comm.rank, np.float32)
        result = comm.allreduce(x, op=cc.SUM, compression=compression, name="x")
        assert_equal_everywhere(comm, result)
        total += result
        waiting = (step + 1) * sum(range(1, comm.size + 1)) - total
        # Equal elements of each rank's chunk take turns.
        assert 0 <= waiting.min() <= waiting.max() <= 3 * sum(range(1, comm.size + 1))
        sent += np.count_nonzero(result)
    assert sent <= 8 * (total.size / 4 + comm.size)


@everywhere
def test_between_nodes_8_bits_with_feedback_lose_nothing_over_the_steps(comm):
    compression = cc.INT8.with_feedback()
    arrays = [a.astype(np.float64) for a in everyones(comm, 20_001)]
    total = np.zeros(20_001)
    for _ in range(50):
        result = comm.allreduce(
            arrays[comm.rank].astype(np.float32), op=cc.MEAN, compression=compression, name="x"
        )
        assert_equal_everywhere(comm, result)
        total += result
    # What is left is the last step's: half a step of each node's sum, and of the result.
    largest = 1.1 * np.abs(arrays).sum(axis=0).max() / comm.size
    lost = np.abs(total - 50 * np.mean(arrays, axis=0)).max()
    assert lost <= 2 * largest / 126 + 50 * largest * 2.0**-20


@everywhere
@pytest.mark.parametrize("other", ["broadcast", "allgather", "gather", "barrier"])
def test_another_operation_on_one_rank_is_the_same_error_on_all(comm, other):
    call = comm.allreduce if comm.rank != 1 else getattr(comm, other)
    arguments = [] if call == comm.barrier else [np.ones(5000)]
    with pytest.raises(cc.MismatchError, match=rf"{other} at \S+ on rank 1") as caught:
        call(*arguments)
    assert len(set(comm.allgather_object(str(caught.value)))) == 1
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize("part", [False, True], ids=["world", "group"])
@pytest.mark.parametrize("leaders", [[0, 0], [0, 1], [0, 0, 2]], ids=str)
@pytest.mark.parametrize("shared", ["/dev/shm", None])
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, limit: comm.barrier(timeout=limit),
        lambda comm, limit: comm.allreduce(np.ones(3), timeout=limit),
        lambda comm, limit: comm.plan_allreduce(np.ones(3), timeout=limit),
        lambda comm, limit: comm.grouped_allreduce([np.ones(3)], timeout=limit),
        lambda comm, limit: comm.broadcast_object(1, root=1, timeout=limit),
    ],
    ids=["barrier", "allreduce", "plan", "grouped", "object"],
)
def test_a_rank_that_has_called_nothing_is_named(caplog, call, shared, leaders, part):
    def check(comm):
        comm = comm.split(0) if part else comm
        if comm.rank == 0:
            return ""
        with pytest.raises(cc.CollectiveTimeout) as caught:
            call(comm, 0.3)
        return str(caught.value)

    settings = Settings(timeout=20, stall_warning=0.1, shared_memory=shared)
    texts = inprocess.run_ranks(len(leaders), check, leaders=leaders, settings=settings)
    # Ranks that are threads cannot ask each other for whom they wait, as MPI processes do.
    meets = shared is not None and leaders == [0, 0]
    words = "rank 0 to enter the call; rank 0 has called nothing yet" if meets else "nothing yet"
    limit = "; the limit is 0.3 s, by UNISONO_TIMEOUT or timeout="
    for text in texts[1:]:
        assert words in text
        assert limit in text
    assert limit in caplog.text


@everywhere
def test_a_rank_that_does_not_come_is_named_by_its_number_in_the_group():
    def check(comm):
        part = comm.split(0)
        part.barrier()
        comm.barrier()
        if comm.rank != 3:
            # Ranks 2 and 3 are a node; 2 waits for 3 there, where that is number 1 of 2.
            with pytest.raises(cc.CollectiveTimeout) as caught:
                part.allreduce(np.ones(50_000), op=cc.SUM, algorithm="hierarchical", timeout=2)
            if comm.rank == 2:
                text = str(caught.value)
                assert "still waiting for rank 3 to enter the call" in text
                assert "rank 3 left barrier #1" in text
                assert "(rank 2 of 4)" in text
        comm.barrier()

    Nodes([0, 0, 2, 2]).run(check, Settings(timeout=20, check="off"))


@everywhere
def test_without_the_comparison_of_calls_different_stages_are_an_error_and_no_memory_is_touched():
    def check(comm):
        part = comm.split(0)
        count = 5000 if comm.rank == 3 else 50_000
        x = np.ones(count)
        if comm.rank > 1:
            words = "calls differ between the ranks of a node"
            with pytest.raises(cc.CollectiveError, match=words):
                part.allreduce(x, op=cc.SUM, algorithm="hierarchical", timeout=5)
            np.testing.assert_array_equal(x, 1)
        comm.barrier()

    Nodes([0, 0, 2, 2]).run(check, Settings(timeout=20, check="off"))


def test_a_node_without_shared_memory_sends_messages_and_says_so_once(caplog, monkeypatch):
    # Rank 2 and 3 find no room; ranks 0 and 1 do.
    create = segment.create

    def full_on_one_node(transport, common, each, directory, deadline):
        there = directory if transport.parent_rank(0) == 0 else "/nowhere"
        return create(transport, common, each, there, deadline)

    monkeypatch.setattr(segment, "create", full_on_one_node)

    def check(comm):
        for count in (3, 50_001):
            arrays = everyones(comm, count)
            for x in (arrays[comm.rank].copy(), comm.shared_empty(count, np.float32)):
                x[...] = arrays[comm.rank]
                comm.allreduce(x, op=cc.SUM, out=x, algorithm="hierarchical")
                oracle.assert_close(x, arrays, cc.SUM)
        return group_of(comm).node_engine is not None

    with caplog.at_level(logging.WARNING):
        engines = inprocess.run_ranks(4, check, leaders=[0, 0, 2, 2], settings=SETTINGS)
    assert engines == [True, True, False, False]
    told = [r.getMessage() for r in caplog.records if "no shared memory" in r.getMessage()]
    assert len(told) == 1
    assert "/nowhere" in told[0]


@inprocess.on_ranks(2, settings=SETTINGS)
def test_a_rank_that_has_waited_long_for_one_round_does_not_doze_in_the_next(comm, monkeypatch):
    # The network stage may take a second; the rounds after it take microseconds each.
    def pauses(engine, standing):
        """How often each of the waits of a call has paused."""
        block = control_block.Block()
        stands = iter(standing)
        counts = []

        class FastBackoff:
            def __init__(self, first_nap):
                self.mine = threading.current_thread() is rank_0
                counts.append(0) if self.mine else None

            def pause(self):
                if self.mine:
                    counts[-1] += 1
                return False

        def kernel(address):
            block.done_rounds = next(stands, -1)
            return control_block.DONE if block.done_rounds < 0 else control_block.WAITING

        rank_0 = threading.current_thread()
        with monkeypatch.context() as patch:
            patch.setattr(peer_watch, "Backoff", FastBackoff)
            assert engine.run(node.KernelCall(kernel, block, ()), Deadline("allreduce", 20))
        return counts

    comm.barrier()
    if comm.rank == 0:
        engine = group_of(comm).node_engine
        assert pauses(engine, range(50)) == [1] * 50
        assert pauses(engine, [1] * 50) == [50]
    comm.barrier()


def test_shared_arrays_go_through_no_slot(monkeypatch):
    # With them the engine only lets the ranks meet: nothing but numbers is published.
    published = []

    def check(comm):
        x = comm.shared_empty(100_000, np.float64)
        comm.barrier()
        engine = group_of(comm).node_engine
        publish = engine.publish
        monkeypatch.setattr(
            engine, "publish",
            lambda stream, *rest: published.append(0 if stream is None else stream.nbytes)
            or publish(stream, *rest),
        )  # fmt: skip
        monkeypatch.setattr(engine, "plan_reduce_scatter", None)
        levels = group_of(comm).levels
        x[...] = 1
        limit = group_of(comm).deadline("allreduce", 20)
        hierarchical.allreduce(levels, x, cc.SUM, limit)
        np.testing.assert_array_equal(x, 4)

    inprocess.run_ranks(4, check, leaders=[0, 0, 2, 2], settings=SETTINGS)
    assert published
    assert max(published) <= 8
