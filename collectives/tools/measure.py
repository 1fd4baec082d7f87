"""Measurement of link costs and of algorithms, for `tune`.

A *step* is a message in a ring: every rank sends to its right neighbour and receives from its left
one, including the programs' work. A link's alpha and beta follow from steps of the smallest and the
largest size:

    node       the ranks of each node in a ring, on all nodes at once
    network    one rank per node in a ring; no other rank uses the node's link
    eager     the ranks of either ring exchange 8 bytes by messages of compiled code
    program    many messages in the same ring, back to back, which hides the latency
    call       a call by messages, without its signature check and algorithm: the time of Python
    shared     a planned all-reduce in the node engine, fitted to the cost model; a byte costs the
               same moved or combined, because both are bound by the memory
    gamma      the sum of two float32 arrays in place, on all ranks at once

Cases take turns, so that a disturbance affects all of them. A time is the slowest rank's. The first
quartile of the times counts: other work on a machine only adds time, and the median includes it if
it runs half of the time. Every wait has the communicator's deadline.
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

# Bytes of a message or array. The smallest size gives alpha, the largest, many slices, beta. The
# sizes in between detect a network so slow that the next size would take too long.
SIZES = (8, 1 << 15, 1 << 18, 1 << 22)
_COMBINED = (1 << 14, 1 << 20)

# Messages in flight at once, so that only the programs' time counts.
_STREAM = 64

# A batch of calls is timed as a whole, which reduces the weight of the clock and of uneven exits
# from the barrier before it.
_BATCH_SECONDS = 5e-4
_TURNS = 5
_MOST_BATCHES = 60

Call = Callable[[Deadline], object]


class Case(NamedTuple):
    """Something to time."""

    call: Call
    steps: int = 1  # number of steps that share the time of a call; equal on all ranks


class MeasuringClock:
    """Times calls on all ranks of a communicator; its methods are *collective*."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.group = group_of(comm)
        self.transport = self.group.transport
        self.noise: list[float] = []  # median over first quartile of every case so far

    def times(self, cases: Mapping[str, Case], seconds: float) -> dict[str, float]:
        """Return the seconds per step of every case, on the slowest rank.

        Args:
            cases: calls to time, in turns.
            seconds: time budget for all of them; each is timed at least once.
        """
        share = seconds / len(cases)
        counts: dict[str, tuple[int, int]] = {}
        times: dict[str, list[float]] = {}
        for name, case in cases.items():
            self._time(case, 1)  # connects the ranks and touches the memory
            firsts = [self._time(case, 1)]
            # Up to three calls, while they leave half of the share.
            while len(firsts) < 3 and sum(firsts) * case.steps < share / 2:
                firsts.append(self._time(case, 1))
            times[name] = [min(firsts)]
            # Above 0, because the clock may show no difference.
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
        times = sorted(own[1:] or own)  # the first time is of a few calls, not of a batch
        quartile = times[len(times) // 4]
        self.noise.append(statistics.median(times) / quartile)
        return quartile

    def _time(self, case: Case, batch: int) -> float:
        """Return the seconds per step of the slowest rank, equal on all ranks."""
        deadline = self.group.deadline("tune")
        tree.barrier(self.transport, deadline)
        began = time.perf_counter()
        for _ in range(batch):
            case.call(deadline)
        spent = np.array([(time.perf_counter() - began) / batch / case.steps])
        # Equal on all ranks, which decide by it how often to call.
        recursive_doubling.allreduce(self.transport, spent, reduction.MAX, deadline)
        return float(spent[0])


def measure(clock: MeasuringClock, seconds: float) -> dict[str, LinkCost]:
    """Measure every link between the ranks.

    Args:
        clock: clock of the ranks.
        seconds: approximate time budget.

    Returns:
        name of a link -> its cost, equal on all ranks.
    """
    comm = clock.comm
    levels = clock.group.levels_by_messages
    share = seconds / 6
    gamma = _gamma(clock, share)
    found = {}
    # If any node has several ranks, all ranks take part in the measurement.
    with_company = bool(comm.allreduce(comm.local_size > 1, op=MAX))
    if with_company:
        found["node"] = _messages(clock, levels.node, clock.group.layout.per_node, share, gamma)
        shared = _measure_shared(clock, share)
        if shared is not None:
            found["shared"] = shared
    if comm.num_nodes > 1:
        # One rank per node; the other ranks only wait in the barriers.
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
    """Return the cost of messages.

    Args:
        clock: clock of all ranks.
        ranks: ranks that exchange the messages; None on a rank that takes no part.
        most: largest number of these ranks, on any rank.
        seconds: approximate time budget.
        gamma: gamma of the link.
    """
    measured: list[tuple[int, float]] = []
    for nbytes in SIZES:
        # A ring of n ranks has n - 1 steps.
        case = Case(_around(ranks, nbytes), steps=most - 1)
        times = clock.times({"step": case}, seconds / len(SIZES))
        measured.append((nbytes, times["step"]))
        if times["step"] > seconds / 4:  # the next size would take too long
            break
    alpha, beta = fitted([[1.0, nbytes] for nbytes, _ in measured], [t for _, t in measured])
    # The longest schedule of any rank.
    steps = max(len(topology.doubling(rank, most).partners) for rank in range(most))
    # Guests add two rounds unless the number is a power of two.
    case = Case(_exchange(ranks), steps=steps + 2 * (most != 1 << steps))
    cases = {"eager": case, "program": Case(_stream(ranks), steps=2 * _STREAM)}
    small = clock.times(cases, 2 * seconds / len(SIZES))
    return LinkCost(alpha, beta, gamma, small["eager"], small["program"])


def _call(clock: MeasuringClock, seconds: float) -> float:
    """Return the Python time of a call by messages, without its messages."""
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
    # The rest of the call is Python.
    whole, *parts = clock.times(cases, seconds).values()
    # Noise may make the difference negative.
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
    """Return a call in which every rank repeatedly sends `nbytes` to its neighbour."""
    if ranks is None or ranks.size == 1:
        return _nothing
    buffer = np.zeros(ranks.size * nbytes, np.uint8)
    bounds = [nbytes * rank for rank in range(ranks.size + 1)]
    return lambda deadline: ring.allgather(ranks, buffer, bounds, deadline)


def _exchange(ranks: Transport | None) -> Call:
    """Return a call that sums 8 bytes by small messages, from compiled code if possible."""
    if ranks is None or ranks.size == 1:
        return _nothing
    data = np.zeros(1)
    # Without compiled messages, the same sum in Python.
    if ranks.native_mpi is None:
        return lambda deadline: recursive_doubling.allreduce(ranks, data, reduction.MAX, deadline)
    small = eager.EagerExchange(ranks, data.nbytes)
    block = eager.EagerBlock(small, data.dtype, data.size, reduction.MAX, fill=True)

    def exchange(deadline: Deadline) -> None:
        # Equal on all ranks, as the hash of equal calls.
        block.fields.hash, block.fields.inverse_hash = 0, ~0
        block.fields.send = block.fields.out = address(data)
        small.exchange(block, deadline)

    return exchange


# For ranks without a partner, which still time all cases.
def _nothing(deadline: Deadline) -> None:
    pass


def _measure_shared(clock: MeasuringClock, seconds: float) -> LinkCost | None:
    """Return the node engine's link; None on all ranks without engines."""
    comm = clock.comm
    node = comm.split(comm.node_rank)
    assert node is not None
    with node:
        node.barrier()  # creates the engine
        meets = group_of(node).node_engine is not None
        # One node with an engine is enough, because all ranks take part.
        if not comm.allreduce(meets, op=MAX):
            return None
        cases = {str(nbytes): _meeting(node if meets else None, nbytes) for nbytes in SIZES}
        times = list(clock.times(cases, seconds).values())
    ranks = int(comm.allreduce(comm.local_size, op=MAX))
    # Units: the model is linear in both numbers.
    per_call, per_byte = LinkCost(1.0, 0.0, 0.0), LinkCost(0.0, 1.0, 1.0)
    factors = [
        [kernel_selection.reduce_seconds(nbytes, ranks, unit) for unit in (per_call, per_byte)]
        for nbytes in SIZES
    ]
    alpha, beta = fitted(factors, times)
    # A byte costs the same moved or combined, see the module.
    return LinkCost(alpha, beta, beta)


def _meeting(node: Communicator | None, nbytes: int) -> Case:
    if node is None:
        return Case(lambda deadline: None)
    # MAX of zeros stays zero in any number of calls.
    plan = node.plan_allreduce(np.zeros(nbytes // 4, np.float32), op=reduction.MAX)
    return Case(lambda deadline: plan())


def fitted(shape: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[float, float]:
    """Return two numbers > 0 for which `shape @ numbers` matches the first and the last time.

    Times in between are ignored: a burst that a network absorbs, or another protocol of MPI, would
    make large arrays look cheaper than they are. In ten measurements of a line of 1 Gbit/s, least
    squares over all sizes found 3.3 to 7.0 ns per byte, this fit 8.2.

    Args:
        shape: for every time, the factors of both numbers, > 0.
        times: seconds > 0, in the order of increasing bytes.
    """
    factors = np.array([shape[0], shape[-1]])
    ends = np.array([times[0], times[-1]])
    numbers = np.linalg.solve(factors, ends) if len(times) > 1 else np.zeros(2)
    if numbers.min() <= 0:  # the times contradict each other: each determines one number
        numbers = ends / np.diag(factors)
    first, second = numbers.tolist()
    return first, second


def algorithms(clock: MeasuringClock, operation: str, nbytes: int) -> dict[str, Case]:
    """Return cases for all algorithms of an operation, without the overhead of a call.

    Args:
        clock: clock of the ranks.
        operation: a key of `selection.ALGORITHMS`.
        nbytes: bytes of the whole array.

    Returns:
        name -> case; "hierarchical" and "native" only if applicable.
    """
    transport = clock.transport
    cases = {}
    for name, way in selection.ALGORITHMS[operation].items():
        if name == "hierarchical" and not clock.group.layout.is_hierarchical:
            continue
        if name == "native" and not isinstance(transport, MpiTransport):
            continue
        ranks = clock.group.levels if name == "hierarchical" else transport
        # Alternate between roots at both ends: with a single root, a call would begin before the
        # last rank has received anything of the call before.
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
    """Return an algorithm's arguments between ranks and deadline; MAX keeps zeros zero."""
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
