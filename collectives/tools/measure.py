"""Measurement of link costs and of algorithms, for `tune`.

A *step* is what a ring makes of a message: every rank sends to its right neighbour and receives
from its left one, with all that the programs do for it. A link's alpha and beta follow from steps
of the smallest and the largest size:

    node       the ranks of a node around a ring of their own, on all nodes at once
    network    one rank of every node around a ring; the link of a node is that rank's alone
    letter     the ranks of either exchange 8 bytes by messages of compiled code
    program    many messages around the same ring, one after the other: nobody waits for a way
    call       a call by messages, without its comparison and its algorithm: Python's part
    shared     a planned all-reduce in the node engine, fitted to its closed form; whether a byte is
               moved or combined makes no difference there, both are bound by the memory
    gamma      the sum of two float32 arrays in place, on all ranks at once

Cases take turns, so that a disturbance meets all of them. A time is the slowest rank's, and what
counts is the first quartile: other work on a machine only ever adds time, and the median follows
it as soon as it is there half of the time. Every wait has the communicator's deadline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.algorithms import eager, recursive_doubling, ring, selection, tree
from collectives.arrays import reduction
from collectives.arrays.host_arrays import address
from collectives.arrays.reduction import MAX
from collectives.communicator import Communicator, group_of
from collectives.core import topology
from collectives.core.links import LinkCost
from collectives.node import kernel_selection
from collectives.transport.mpi import MpiTransport
from collectives.transport.transport import Deadline, Transport

__all__ = ["Case", "MeasuringClock", "algorithms", "fitted", "measure"]

# Bytes of a message, or an array. The smallest gives alpha; the largest, many slices, beta. Those
# between tell where a network is so slow that the next one would take too long.
SIZES = (8, 1 << 15, 1 << 18, 1 << 22)
_COMBINED = (1 << 14, 1 << 20)

# Messages that are under way at once where only their programs count.
_STREAM = 64

# A batch of calls is timed as a whole, so that the clock and the unequal leaving of the barrier
# before it weigh little.
_BATCH_SECONDS = 5e-4
_TURNS = 5
_MOST_BATCHES = 60

Call = Callable[[Deadline], object]


class Case(NamedTuple):
    """Something to be timed."""

    call: Call
    steps: int = 1  # among which the time of a call is shared; equal on all ranks


class MeasuringClock:
    """Times calls on all ranks of a communicator; its methods are *collective*."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.group = group_of(comm)
        self.transport = self.group.transport
        self.noise: list[float] = []  # median over first quartile of every case so far

    def times(self, cases: Mapping[str, Case], seconds: float) -> dict[str, float]:
        """Return the seconds of a step of every case, of the slowest rank.

        Args:
            cases: what to time, in turns.
            seconds: to spend on all of them; each is timed once at least.
        """
        share = seconds / len(cases)
        counts: dict[str, tuple[int, int]] = {}
        times: dict[str, list[float]] = {}
        for name, case in cases.items():
            self._time(case, 1)  # connects the ranks and touches the memory
            firsts = [self._time(case, 1)]
            while len(firsts) < 3 and sum(firsts) * case.steps < share / 2:
                firsts.append(self._time(case, 1))
            times[name] = [min(firsts)]
            whole = max(min(firsts) * case.steps, 1e-7)
            batch = max(1, round(_BATCH_SECONDS / whole))
            batches = int(share / _TURNS / (batch * whole))
            counts[name] = batch, min(_MOST_BATCHES // _TURNS, batches)
        for _ in range(_TURNS):
            for name, case in cases.items():
                batch, batches = counts[name]
                times[name] += [self._time(case, batch) for _ in range(batches)]
        return {name: self._typical(own) for name, own in times.items()}

    def _typical(self, own: list[float]) -> float:
        times = sorted(own[1:] or own)  # the first is of a few calls, not of a batch
        quartile = times[len(times) // 4]
        self.noise.append(statistics.median(times) / quartile)
        return quartile

    def _time(self, case: Case, batch: int) -> float:
        """Return the seconds of a step, the same on all ranks: those of the slowest."""
        deadline = self.group.deadline("tune")
        tree.barrier(self.transport, deadline)
        began = time.perf_counter()
        for _ in range(batch):
            case.call(deadline)
        spent = np.array([(time.perf_counter() - began) / batch / case.steps])
        recursive_doubling.allreduce(self.transport, spent, reduction.MAX, deadline)
        return float(spent[0])


def measure(clock: MeasuringClock, seconds: float) -> dict[str, LinkCost]:
    """Measure every link that there is between the ranks.

    Args:
        clock: of the ranks.
        seconds: to spend, roughly.

    Returns:
        Name of a link -> its numbers, the same on all ranks.
    """
    comm = clock.comm
    levels = clock.group.levels_by_messages
    share = seconds / 6
    gamma = _gamma(clock, share)
    found = {}
    with_company = bool(comm.allreduce(comm.local_size > 1, op=MAX))
    if with_company:
        found["node"] = _messages(clock, levels.node, clock.group.layout.per_node, share, gamma)
        shared = _measure_shared(clock, share)
        if shared is not None:
            found["shared"] = shared
    if comm.num_nodes > 1:
        leader = levels.network if comm.local_rank == 0 else None
        found["network"] = _messages(clock, leader, comm.num_nodes, share, gamma)
    python = _call(clock, share)
    for name in found.keys() & {"node", "network"}:
        found[name] = found[name]._replace(call=python)
    return comm.broadcast_object(found)  # processors may differ in the last bits of a fit


def _gamma(clock: MeasuringClock, seconds: float) -> float:
    times = clock.times({str(nbytes): _sum(nbytes) for nbytes in _COMBINED}, seconds)
    return fitted([[1.0, nbytes] for nbytes in _COMBINED], list(times.values()))[1]


def _sum(nbytes: int) -> Case:
    ours, theirs = np.zeros((2, nbytes // 4), np.float32)
    combine = reduction.combine(reduction.SUM)
    return Case(lambda deadline: combine(ours, theirs))


def _messages(
    clock: MeasuringClock, ranks: Transport | None, most: int, seconds: float, gamma: float
) -> LinkCost:
    """Return what messages cost.

    Args:
        clock: of all ranks.
        ranks: those that exchange them; None on a rank that takes no part.
        most: how many these are at most, on any rank.
        seconds: to spend, roughly.
        gamma: of the link.
    """
    measured: list[tuple[int, float]] = []
    for nbytes in SIZES:
        case = Case(_around(ranks, nbytes), steps=most - 1)
        times = clock.times({"step": case}, seconds / len(SIZES))
        measured.append((nbytes, times["step"]))
        if times["step"] > seconds / 4:  # the next size would take too long
            break
    alpha, beta = fitted([[1.0, nbytes] for nbytes, _ in measured], [t for _, t in measured])
    steps = max(len(topology.doubling(rank, most).partners) for rank in range(most))
    case = Case(_exchange(ranks), steps=steps + 2 * (most != 1 << steps))
    cases = {"letter": case, "program": Case(_stream(ranks), steps=2 * _STREAM)}
    small = clock.times(cases, 2 * seconds / len(SIZES))
    return LinkCost(alpha, beta, gamma, small["letter"], small["program"])


def _call(clock: MeasuringClock, seconds: float) -> float:
    """Return what Python takes for a call by messages besides its messages."""
    comm, transport = clock.comm, clock.transport
    data = np.zeros(2, np.float32)
    how: dict[str, Any] = {"op": reduction.MAX, "out": data, "algorithm": "doubling"}
    cases = {
        "whole": Case(lambda deadline: comm.allreduce(data, **how)),
        "comparison": Case(_exchange(transport)),
        "algorithm": Case(
            lambda deadline: recursive_doubling.allreduce(transport, data, MAX, deadline)
        ),
    }
    whole, *parts = clock.times(cases, seconds).values()
    return max(0.0, whole - sum(parts))


def _stream(ranks: Transport | None) -> Call:
    """Return a call in which every rank sends many small messages to its neighbour at once."""
    if ranks is None or ranks.size == 1:
        return _nothing
    right, left = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    ours, theirs = np.zeros((2, _STREAM, 8), np.uint8)

    def stream(deadline: Deadline) -> None:
        receives = [ranks.start_receive(into, left) for into in theirs]
        sends = [ranks.start_send(data, right) for data in ours]
        ranks.wait([*receives, *sends], deadline)

    return stream


def _around(ranks: Transport | None, nbytes: int) -> Call:
    """Return a call in which every rank sends so many bytes to its neighbour, again and again."""
    if ranks is None or ranks.size == 1:
        return _nothing
    buffer = np.zeros(ranks.size * nbytes, np.uint8)
    bounds = [nbytes * rank for rank in range(ranks.size + 1)]
    return lambda deadline: ring.allgather(ranks, buffer, bounds, deadline)


def _exchange(ranks: Transport | None) -> Call:
    """Return a call that sums 8 bytes by small messages, of compiled code where that can."""
    if ranks is None or ranks.size == 1:
        return _nothing
    data = np.zeros(1)
    if ranks.native_mpi is None:
        return lambda deadline: recursive_doubling.allreduce(ranks, data, reduction.MAX, deadline)
    small = eager.EagerExchange(ranks, data.nbytes)
    block = eager.EagerBlock(small, data.dtype, data.size, reduction.MAX, fill=True)

    def exchange(deadline: Deadline) -> None:
        block.fields.hash, block.fields.inverse_hash = 0, ~0
        block.fields.send = block.fields.out = address(data)
        small.exchange(block, deadline)

    return exchange


def _nothing(deadline: Deadline) -> None:
    pass


def _measure_shared(clock: MeasuringClock, seconds: float) -> LinkCost | None:
    """Return the node engine's link; None on all ranks where no node has an engine."""
    comm = clock.comm
    node = comm.split(comm.node_rank)
    assert node is not None
    with node:
        node.barrier()  # makes the engine
        meets = group_of(node).node_engine is not None
        if not comm.allreduce(meets, op=MAX):
            return None
        cases = {str(nbytes): _meeting(node if meets else None, nbytes) for nbytes in SIZES}
        times = list(clock.times(cases, seconds).values())
    ranks = int(comm.allreduce(comm.local_size, op=MAX))
    per_call, per_byte = LinkCost(1.0, 0.0, 0.0), LinkCost(0.0, 1.0, 1.0)
    factors = [
        [kernel_selection.reduce_seconds(nbytes, ranks, unit) for unit in (per_call, per_byte)]
        for nbytes in SIZES
    ]
    alpha, beta = fitted(factors, times)
    return LinkCost(alpha, beta, beta)


def _meeting(node: Communicator | None, nbytes: int) -> Case:
    if node is None:
        return Case(lambda deadline: None)
    plan = node.plan_allreduce(np.zeros(nbytes // 4, np.float32), op=reduction.MAX)
    return Case(lambda deadline: plan())


def fitted(shape: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[float, float]:
    """Return the two numbers > 0 with which `shape @ numbers` is the first and the last time.

    What is between them does not decide: a burst that a network swallows whole, or another way in
    which MPI sends it, would make large arrays look cheaper than they are. Of ten measurements of a
    line of 1 Gbit/s least squares over all sizes found 3.3 to 7.0 ns for a byte, this 8.2.

    Args:
        shape: for every time, the factors of both numbers, > 0.
        times: seconds > 0, of a growing number of bytes.
    """
    factors = np.array([shape[0], shape[-1]])
    ends = np.array([times[0], times[-1]])
    numbers = np.linalg.solve(factors, ends) if len(times) > 1 else np.zeros(2)
    if numbers.min() <= 0:  # the times contradict each other: each decides about one number
        numbers = ends / np.diag(factors)
    first, second = numbers.tolist()
    return first, second


def algorithms(clock: MeasuringClock, operation: str, nbytes: int) -> dict[str, Case]:
    """Return all algorithms of an operation, ready to be timed without what a call adds to them.

    Args:
        clock: of the ranks.
        operation: a key of `selection.ALGORITHMS`.
        nbytes: of the whole array.

    Returns:
        Name -> case; "hierarchical" and "native" only where they make sense.
    """
    transport = clock.transport
    cases = {}
    for name, way in selection.ALGORITHMS[operation].items():
        if name == "hierarchical" and not clock.group.layout.is_hierarchical:
            continue
        if name == "native" and not isinstance(transport, MpiTransport):
            continue
        ranks = clock.group.levels if name == "hierarchical" else transport
        # Roots at both ends in turns: from one alone, the next call would begin before the last
        # rank has got anything of this one.
        calls = [
            partial(way.run, ranks, *_arguments(operation, nbytes, transport, root))
            for root in (0, transport.size - 1)
        ]
        cases[name] = Case(partial(_one_by_one, calls), steps=len(calls))
    return cases


def _one_by_one(calls: Sequence[Callable[[Deadline], object]], deadline: Deadline) -> None:
    for call in calls:
        call(deadline)


def _arguments(operation: str, nbytes: int, transport: Transport, root: int) -> tuple[object, ...]:
    """Return what an algorithm takes between the ranks and the deadline; MAX keeps zeros zero."""
    rank, size = transport.rank, transport.size
    array = np.zeros(max(1, nbytes // 4), np.float32)
    bounds = topology.chunk_bounds(array.size, size)
    counts = np.diff(bounds).tolist()
    own = array[bounds[rank] : bounds[rank + 1]]
    arguments: dict[str, tuple[object, ...]] = {
        "allreduce": (array, reduction.MAX),
        "reduce": (array, reduction.MAX, root),
        "reduce_scatter": (array, bounds, reduction.MAX),
        "broadcast": (array, root),
        "gather": (own, counts, root),
        "allgather": (array, bounds),
        "scatter": (array if rank == root else None, counts, root, array.dtype),
        "alltoall": (array, counts, [counts[rank]] * size),
        "barrier": (),
    }
    return arguments[operation]
