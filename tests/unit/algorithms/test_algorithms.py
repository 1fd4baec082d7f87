"""Algorithms over ranks that are threads, below the communicator."""

from types import SimpleNamespace

import numpy as np
import pytest

import collectives as cc
import inprocess
import oracle
from collectives.algorithms import (
    double_tree,
    halving_doubling,
    hierarchical,
    pairwise,
    recursive_doubling,
    ring,
    selection,
    tree,
)
from collectives.arrays import reduction
from collectives.communicator import group_of
from collectives.core import topology
from collectives.transport.transport import Deadline, Transport

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 13]

OPS = [cc.SUM, cc.MEAN, cc.MIN, cc.MAX, cc.PRODUCT]

# None, one, fewer than ranks, odd, more than one slice.
COUNTS = [0, 1, 3, 1001, 150_001]


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    """Let buffers of a few hundred KiB go as several slices, and through every branch."""
    monkeypatch.setattr(ring, "SLICE_BYTES", 1 << 14)


def deadline():
    return Deadline("test", 20.0)


def on_ranks(size, function, mode="synchronous"):
    """Call `function(transport)` on every rank; returns the results in rank order."""
    return inprocess.run_ranks(size, lambda comm: function(group_of(comm).transport), mode)


def prepared(rank, count, op, size, dtype=np.float32):
    """What a rank contributes to a reduction."""
    buffer = oracle.data(rank, (count,), np.dtype(dtype))
    reduction.prescale(buffer, op, size)
    return buffer


def everyones(count, size, dtype=np.float32):
    return [oracle.data(rank, (count,), np.dtype(dtype)) for rank in range(size)]


def uneven(count, size):
    """Bounds of chunks of which some are empty and one is large."""
    return [0, *sorted((7 * c * c) % (count + 1) for c in range(size - 1)), count]


class Flat:
    def __init__(self, algorithm):
        self.algorithm = algorithm

    @staticmethod
    def setup(transport):
        return transport


class Hierarchical:
    """Nodes of 1, 2, 3, ... ranks; with `dealt` neighbours are on different nodes."""

    algorithm = hierarchical

    def __init__(self, leaders):
        self.leaders = leaders

    def setup(self, transport):
        return hierarchical.levels(transport, self.leaders(transport.size))


LEADERS = {
    "one node": lambda size: [0] * size,
    "a node each": lambda size: list(range(size)),
    "pairs": lambda size: [r // 2 for r in range(size)],
    "dealt out": lambda size: [r % 3 for r in range(size)],
    "one large node": lambda size: [min(r, 2) for r in range(size)],
}

ROWS = {
    name: Flat(SimpleNamespace(allreduce=algorithm.run))
    for name, algorithm in selection.ALGORITHMS["allreduce"].items()
    if name not in ("hierarchical", "native")
} | {f"hierarchical, {name}": Hierarchical(leaders) for name, leaders in LEADERS.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_allreduce_is_the_reduction_with_the_same_bits_on_all_ranks(row, size):
    def run(transport):
        own = row.setup(transport)
        results = []
        for op in OPS:
            for count in COUNTS if op is cc.SUM else [1001, 20_003]:
                buffer = prepared(transport.rank, count, op, size)
                row.algorithm.allreduce(own, buffer, op, deadline())
                results.append((op, count, buffer))
        return results

    ranks = on_ranks(size, run)
    for results in zip(*ranks, strict=True):
        op, count, first = results[0]
        oracle.assert_close(first, everyones(count, size), op)
        for _, _, other in results:
            np.testing.assert_array_equal(other.view(np.uint32), first.view(np.uint32))


@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_doubling_gives_the_same_bits_where_the_order_of_the_two_shows(size):
    # Which of two NaNs a sum is depends on the processor; the smaller of two zeros is either.
    def run(transport):
        bits = np.full(64, 0xFFC00000 + transport.rank, np.uint32)
        nans = bits.view(np.float32)
        zeros = np.full(64, -0.0 if transport.rank % 2 else 0.0, np.float32)
        recursive_doubling.allreduce(transport, nans, cc.SUM, deadline())
        recursive_doubling.allreduce(transport, zeros, cc.MIN, deadline())
        return np.concatenate([nans, zeros]).view(np.uint32)

    results = on_ranks(size, run)
    np.testing.assert_array_equal(results[0][:64], np.float32(np.nan).view(np.uint32))
    for other in results:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("mode", inprocess.MODES)
@pytest.mark.parametrize("size", SIZES)
def test_halving_reduce_scatter_and_allgather_take_chunks_of_any_length(size, mode):
    def run(transport):
        results = []
        for count in COUNTS:
            bounds = uneven(count, size)
            buffer = prepared(transport.rank, count, cc.SUM, size)
            halving_doubling.reduce_scatter(transport, buffer, bounds, cc.SUM, deadline())
            own = slice(bounds[transport.rank], bounds[transport.rank + 1])
            oracle.assert_close(buffer[own], [a[own] for a in everyones(count, size)], cc.SUM)
            others = np.ones(count, bool)
            others[own] = False
            buffer[others] = np.nan  # nothing of these may be used
            halving_doubling.allgather(transport, buffer, bounds, deadline())
            results.append(buffer)
        return results

    for count, results in zip(COUNTS, zip(*on_ranks(size, run, mode), strict=True), strict=True):
        oracle.assert_close(results[0], everyones(count, size), cc.SUM)
        for other in results:
            np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("mode", inprocess.MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", [tree, double_tree])
def test_a_reduce_gives_the_reduction_to_any_root(algorithm, size, mode):
    def run(transport):
        for root in range(size):
            for count in COUNTS:
                buffer = prepared(transport.rank, count, cc.SUM, size)
                algorithm.reduce(transport, buffer, cc.SUM, root, deadline())
                if transport.rank == root:
                    oracle.assert_close(buffer, everyones(count, size), cc.SUM)

    on_ranks(size, run, mode)


BROADCASTS = {
    "tree": (Flat(tree), 1 << 40),
    "scatter and all-gather": (Flat(tree), 0),
    "ring": (Flat(ring), 0),
    "double tree": (Flat(double_tree), 0),
} | {f"hierarchical, {name}": (Hierarchical(leaders), 0) for name, leaders in LEADERS.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("row", "scatter_bytes"), BROADCASTS.values(), ids=BROADCASTS.keys())
def test_a_broadcast_copies_the_roots_bits(row, scatter_bytes, size, monkeypatch):
    monkeypatch.setattr(tree, "SCATTER_BYTES", scatter_bytes)

    def run(transport):
        own = row.setup(transport)
        for root in range(size):
            for count in COUNTS:
                buffer = oracle.data(transport.rank, (count,), np.dtype(np.float32))
                row.algorithm.broadcast(own, buffer, root, deadline())
                expected = oracle.data(root, (count,), np.dtype(np.float32))
                np.testing.assert_array_equal(buffer, expected)

    on_ranks(size, run)


@pytest.mark.parametrize("mode", inprocess.MODES)
@pytest.mark.parametrize("size", SIZES)
def test_scatter_gives_each_rank_a_new_array_of_its_part(size, mode):
    lengths = [lambda r: 3, lambda r: r, lambda r: 40_000 if r == 1 else 0, lambda r: 0]

    def run(transport):
        for root in range(size):
            for length in lengths:
                counts = [length(rank) for rank in range(size)]
                whole = np.arange(sum(counts), dtype=np.int32)
                buffer = whole.copy() if transport.rank == root else None
                own = tree.scatter(transport, buffer, counts, root, whole.dtype, deadline())
                begin = sum(counts[: transport.rank])
                np.testing.assert_array_equal(own, whole[begin:][: counts[transport.rank]])
                assert own.dtype == whole.dtype
                assert buffer is None or not np.shares_memory(own, buffer)
                assert own.base is None or own.base.size == own.size, "holds others' elements"

    on_ranks(size, run, mode)


@pytest.mark.parametrize("mode", inprocess.MODES)
@pytest.mark.parametrize("size", SIZES)
def test_alltoall_exchanges_parts_of_any_length(size, mode):
    lengths = [lambda a, b: 2, lambda a, b: (a + 2 * b) % 5, lambda a, b: a * b * 500,
               lambda a, b: 1 if a == 0 else 0, lambda a, b: 0]  # fmt: skip

    def run(transport):
        me = transport.rank
        for length in lengths:

            def part(source, dest, length=length):
                return np.full(length(source, dest), 100 * source + dest, np.int16)

            outgoing = [part(me, other) for other in range(size)]
            expected = [part(other, me) for other in range(size)]
            result = pairwise.alltoall(
                transport, np.concatenate(outgoing), [p.size for p in outgoing],
                [p.size for p in expected], deadline(),
            )  # fmt: skip
            assert result.dtype == np.int16
            np.testing.assert_array_equal(result, np.concatenate(expected))

    on_ranks(size, run, mode)


@pytest.mark.parametrize("leaders", LEADERS.values(), ids=LEADERS.keys())
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_nobody_leaves_a_hierarchical_barrier_before_the_last_has_entered(size, leaders):
    entered = [[] for _ in range(20)]

    def run(transport):
        levels = hierarchical.levels(transport, leaders(size))
        for marks in entered:
            marks.append(transport.rank)
            hierarchical.barrier(levels, deadline())
            assert len(marks) == size

    on_ranks(size, run)


def test_small_buffers_cross_the_network_on_one_rail_and_large_ones_on_all():
    leaders = [0, 0, 1, 1, 1]
    for count, chunks in [(10, {0, 2}), (50_000, {0, 1, 2, 3})]:

        def run(transport, count=count):
            levels = hierarchical.levels(transport, leaders)
            used = []

            def allreduce(network, own, op, limit):
                used.append(transport.rank)
                halving_doubling.allreduce(network, own, op, limit)

            buffer = np.ones(count, np.float32)
            levels = levels._replace(allreduce=allreduce)
            hierarchical.allreduce(levels, buffer, cc.SUM, deadline())
            np.testing.assert_array_equal(buffer, 5)
            return used

        assert {rank for used in on_ranks(5, run) for rank in used} == chunks


def test_a_hierarchical_timeout_names_the_ranks_of_the_whole_group():
    leaders = [0, 0, 1, 1]

    def run(transport):
        levels = hierarchical.levels(transport, leaders)
        if transport.rank != 3:
            limit = Deadline("allreduce", 0.5)
            try:
                hierarchical.allreduce(levels, np.ones(50_000), cc.SUM, limit)
            except cc.CollectiveTimeout as error:
                return str(error)
        return None

    texts = on_ranks(4, run)
    assert "waiting for rank 3 to" in texts[2]  # on the same node
    assert "waiting for rank 3 to" in texts[1]  # on the same rail, where it is number 1 of 2
    assert "(rank 1 of 4)" in texts[1]


class Ledger(Transport):
    """Moves nothing: writes down how many bytes would be sent to and received from whom."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size
        self.bytes = {"sent": 0, "received": 0}

    def _start_send(self, data, dest):
        assert dest != self.rank
        self.bytes["sent"] += data.nbytes
        return self

    def _start_receive(self, into, source):
        assert source != self.rank
        self.bytes["received"] += into.nbytes
        return self

    def done(self):
        return True

    def describe(self):
        return "nothing"

    def split(self, color, key):
        raise NotImplementedError

    def close(self):
        pass


class Crossing(Ledger):
    """Writes down only what would be sent to other nodes."""

    def __init__(self, rank, size, inside):
        super().__init__(rank, size)
        self.inside = inside

    def _start_send(self, data, dest):
        self.bytes["sent"] += data.nbytes * (dest not in self.inside)
        return self


HUGE = 2**31 + 11  # elements of one byte: no count of a C int; the memory is never touched


def untouched(count=HUGE):
    return np.empty(count, np.uint8)


def no_sum(monkeypatch):
    monkeypatch.setattr(reduction, "combine", lambda op: lambda accumulator, contribution: None)


MOVES = {
    "ring": lambda t: ring.allreduce(t, untouched(), cc.SUM, deadline()),
    "halving": lambda t: halving_doubling.allreduce(t, untouched(), cc.SUM, deadline()),
    "double tree": lambda t: double_tree.allreduce(t, untouched(), cc.SUM, deadline()),
    "ring broadcast": lambda t: ring.broadcast(t, untouched(), 0, deadline()),
    "tree broadcast": lambda t: tree.broadcast(t, untouched(), 0, deadline()),
    "scatter": lambda t: tree.scatter(
        t, untouched() if t.rank == 0 else None, [0, HUGE - 1, 1], 0, np.dtype(np.uint8), deadline()
    ),
    "alltoall": lambda t: pairwise.alltoall(
        t, untouched(HUGE - 1), *ALLTOALL_COUNTS[t.rank], deadline()
    ),
}
ALLTOALL_COUNTS = [
    ([0, HUGE - 2, 1], [0, 1, HUGE - 2]),
    ([1, 0, HUGE - 2], [HUGE - 2, 0, 1]),
    ([HUGE - 2, 1, 0], [1, HUGE - 2, 0]),
]
EXPECTED_BYTES = {  # sent by all ranks together
    "ring": 4 * HUGE,
    "halving": 4 * HUGE,
    "double tree": 4 * HUGE,
    "ring broadcast": 2 * HUGE,
    "tree broadcast": 2 * HUGE,
    "scatter": HUGE,
    "alltoall": 3 * (HUGE - 1),
}


@pytest.mark.parametrize("name", MOVES)
def test_more_elements_than_an_int_counts(name, monkeypatch):
    no_sum(monkeypatch)
    monkeypatch.setattr(ring, "SLICE_BYTES", 1 << 28)
    ranks = [Ledger(rank, 3) for rank in range(3)]
    for transport in ranks:
        MOVES[name](transport)
    sent = sum(transport.bytes["sent"] for transport in ranks)
    assert sent == sum(transport.bytes["received"] for transport in ranks)
    assert abs(sent - EXPECTED_BYTES[name]) <= 12  # a byte says that a rank is ready


@pytest.mark.parametrize("size", [2, 3, 5, 7, 16, 33])
@pytest.mark.parametrize("algorithm", [ring, halving_doubling])
def test_an_allreduce_sends_no_more_than_it_must(algorithm, size, monkeypatch):
    no_sum(monkeypatch)
    count = 100 * size
    for rank in range(size):
        transport = Ledger(rank, size)
        algorithm.allreduce(transport, np.zeros(count * 100), cc.SUM, deadline())
        least = 2 * 100 * 100 * (size - 1) * 8
        ready = sum(algorithm is halving_doubling for _ in range(2 * (size - 1).bit_length()))
        for total in transport.bytes.values():
            assert least <= total <= least + ready


def test_a_hierarchical_allreduce_crosses_the_network_once(monkeypatch):
    no_sum(monkeypatch)
    leaders = [r // 2 for r in range(8)]
    nbytes = 8 * 10_000 * 8
    for node in range(4):
        crossing = 0
        for rank in (2 * node, 2 * node + 1):
            transport = Crossing(rank, 8, topology.rails(leaders, rank).node)
            levels = hierarchical.levels(transport, leaders)
            hierarchical.allreduce(levels, np.zeros(nbytes // 8), cc.SUM, deadline())
            crossing += transport.bytes["sent"]
        assert 0 <= crossing - 2 * 3 * nbytes // 4 <= 8, "more than bytes that say ready"
