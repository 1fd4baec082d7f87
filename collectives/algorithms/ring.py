"""Ring algorithms: every rank sends to its right neighbour and receives from its left one.

A buffer is cut into P chunks, chunk `c` owned by rank `c`. In a *reduce-scatter* each chunk starts
one rank behind its owner, travels once around and gains a contribution at each rank; in an
*all-gather* each owner's chunk travels once around unchanged. Both together are an all-reduce.

For 3 ranks (`a0` is rank 0's part of chunk a; a chunk in capitals is complete):

    step            rank 0            rank 1            rank 2
    reduce-scatter
    0  send/recv    c0 -> / <- b2     a1 -> / <- c0     b2 -> / <- a1
    1  send/recv    b20 -> / <- a12   c01 -> / <- b20   a12 -> / <- c01
       has          A                 B                 C
    all-gather
    0  send/recv    A -> / <- C       B -> / <- A       C -> / <- B
    1  send/recv    C -> / <- B       A -> / <- C       B -> / <- A

Cost per rank:

    operation       messages sent  bytes sent     scratch
    allreduce       2 (P - 1)      2 (P - 1)/P S  S/P
    reduce_scatter  P - 1          (P - 1)/P S    S/P
    allgather       P - 1          (P - 1)/P S    none
    broadcast       1              S              none

The bytes are the least possible. A chunk goes as *slices*: a slice is sent on as soon as it has
arrived and been added, while the next is still under way, so that both directions of a link stay
busy. A *broadcast* sends the slices of the whole buffer from the root once around, in P - 2 rounds
more than it has slices.

Order: chunk `c` is summed as `c + 1, c + 2, ..., c` (mod P) on one way around, then copied; all
ranks get the same bits, in every run.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from collectives.algorithms.cost_model import RankLayout
from collectives.arrays import device, reduction
from collectives.arrays.host_arrays import Array
from collectives.core import topology
from collectives.core.topology import RingStep
from collectives.transport.transport import Deadline, PendingMessage, Transport

__all__ = [
    "allgather",
    "allgather_seconds",
    "allreduce",
    "allreduce_seconds",
    "broadcast",
    "broadcast_seconds",
    "exchange",
    "scratch_views",
    "relay",
    "reduce_scatter",
    "reduce_scatter_seconds",
    "slices",
]

# Bytes of one slice. All-reduce in ms (Open MPI 5.0.11 on 2 cores; "limit" is the setting
# btl_tcp_eager_limit, below which a slice is sent without asking the receiver first):
#
#     slice                                          60 KiB   128 KiB   256 KiB   1 MiB
#     2 ranks of a node, 16 MiB                        13.8      10.7       7.1     7.0
#     2 nodes, 1 Gbit/s, 16 MiB (line 134)              146       153       151     145
#     4 nodes, 1 Gbit/s,  8 MiB (line 101)              116       131       130     154
#     2 nodes, 1 Gbit/s, 16 MiB, limit 264 KiB          143       144       143       -
#     4 nodes, 1 Gbit/s,  8 MiB, limit 264 KiB          110       112       113       -
#
# Larger ones wait longer for their sum; smaller ones cost about 10 us each.
SLICE_BYTES = 1 << 18

# Slices that an exchange has under way in either direction. More of them fill the sockets and the
# queues of the switch, where answers then stand behind data; a whole array as one message goes one
# direction after the other. All-reduce in ms, Open MPI 5.0.11 over TCP, 2 cores, all at once / 4 at
# once / as a single message:
#
#     halving, 2 nodes, 1 Gbit/s, 16 MiB (line 134)      167 /   153 /     -
#     halving, 4 nodes, 1 Gbit/s, 16 MiB (line 201)      298 /   252 /     -
#     halving, 4 nodes, 100 Mbit/s, 8 MiB (line 1,007) 1,302 / 1,173 /     -
#     doubling, 2 nodes, 1 Gbit/s, 16 MiB (line 134)       - /   145 /   289
#     doubling, 4 nodes, 100 Mbit/s, 8 MiB (line 1,342)    - / 1,715 / 2,949
#
# 2 at once are as fast as 4 (1,170 in the third row).
_AT_ONCE = 4


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer` by the reduction over all ranks, in place."""
    bounds = topology.chunk_bounds(buffer.size, transport.size)
    reduce_scatter(transport, buffer, bounds, op, deadline)
    allgather(transport, buffer, bounds, deadline)


def allreduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `allreduce` of so many bytes should take.

    On one node: 2 (P - 1) alpha + S (P - 1)/P (2 beta + gamma).
    Between nodes: one message per node in a step.
    """
    return reduce_scatter_seconds(nbytes, layout) + allgather_seconds(nbytes, layout)


def reduce_scatter(
    transport: Transport,
    buffer: Array,
    bounds: Sequence[int],
    op: reduction.Op,
    deadline: Deadline,
) -> None:
    """Reduce so that this rank's chunk of `buffer` is complete; the others hold partial results."""
    steps = list(topology.ring_reduce_scatter(transport.rank, transport.size))
    _circulate(transport, buffer, bounds, steps, deadline, reduction.combine(op))


def reduce_scatter_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `reduce_scatter` should take."""
    return _ring_seconds(nbytes, layout, layout.combined(1.0))


def allgather(
    transport: Transport, buffer: Array, bounds: Sequence[int], deadline: Deadline
) -> None:
    """Fill `buffer` with every rank's own chunk, in place."""
    steps = list(topology.ring_allgather(transport.rank, transport.size))
    _circulate(transport, buffer, bounds, steps, deadline, None)


def allgather_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `allgather` should take."""
    return _ring_seconds(nbytes, layout, 0.0)


def _ring_seconds(nbytes: float, layout: RankLayout, gamma: float) -> float:
    """Return the time of P - 1 steps, in each of which a chunk goes on in slices.

    All of it takes as long as its slowest part: the line, the programs with what they combine, or
    the way of one slice, behind which the others follow.
    """
    steps, chunk = layout.size - 1, nbytes / layout.size
    own = min(chunk, SLICE_BYTES)
    messages = math.ceil(chunk / SLICE_BYTES) or 1
    times = [0.0]
    for link, programs, _ in layout.links():
        way = link.alpha + own * (link.beta + gamma)
        times.append(steps * way + (chunk - own) * link.beta)
        times.append((steps * chunk - own) * link.beta + way)
        times.append(steps * (2 * messages * programs + chunk * gamma))
    return max(times) if steps else 0.0


def broadcast(transport: Transport, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place: slices go once around the ring."""
    left, right = topology.ring_neighbours(transport.rank, transport.size)
    source = None if transport.rank == root else left
    relay(transport, buffer, source, [] if right == root else [right], deadline)


def broadcast_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `broadcast` should take: P - 1 steps of the first slice, others follow."""
    if layout.size == 1:
        return 0.0
    first = min(nbytes, SLICE_BYTES)
    more = math.ceil(nbytes / SLICE_BYTES) - 1
    ways, follows = [], [0.0]
    for link, programs, _ in layout.links():
        ways.append(link.alpha + first * link.beta)
        follows.append(max((nbytes - first) * link.beta, 2 * more * programs))
    return (layout.size - 1) * max(ways) + max(follows)


def relay(
    transport: Transport,
    buffer: Array,
    source: int | None,
    dests: Sequence[int],
    deadline: Deadline,
) -> None:
    """Receive a buffer, unless it is here, and send each slice on as soon as it has arrived."""
    parts = slices(buffer)
    receives: list[PendingMessage] = []
    if source is not None:
        receives = [transport.start_receive(part, source) for part in parts]
    sends: list[PendingMessage] = []
    for number, part in enumerate(parts):
        transport.wait(receives[number : number + 1], deadline)
        sends += [transport.start_send(part, dest) for dest in dests]
    transport.wait(sends, deadline)


def exchange(
    transport: Transport,
    away: Sequence[Array],
    dest: int,
    into: Sequence[Array],
    source: int,
    deadline: Deadline,
    take: Callable[[int], None] | None = None,
) -> None:
    """Send slices to one rank and receive others from one, some of them at once, until all are.

    Args:
        transport: of the ranks.
        away: to be sent; must not change meanwhile.
        dest: to whom.
        into: where what comes is put.
        source: from whom.
        deadline: of all waits.
        take: told the number of each slice that has come, in order.
    """
    receives = [transport.start_receive(part, source) for part in into[:_AT_ONCE]]
    sends = [transport.start_send(part, dest) for part in away[:_AT_ONCE]]
    for number in range(max(len(into), len(away))):
        following = number + _AT_ONCE
        if number < len(into):
            transport.wait((receives[number],), deadline)
            if following < len(into):
                receives.append(transport.start_receive(into[following], source))
            if take is not None:
                take(number)
        if following < len(away):
            transport.wait((sends[number],), deadline)
            sends.append(transport.start_send(away[following], dest))
    transport.wait(sends[-_AT_ONCE:], deadline)


def _circulate(
    transport: Transport,
    buffer: Array,
    bounds: Sequence[int],
    steps: Sequence[RingStep],
    deadline: Deadline,
    combine: Callable[[Array, Array], None] | None,
) -> None:
    """Pass chunks to the right; what arrives is combined with our part, or replaces it."""
    if not steps:
        return
    left, right = topology.ring_neighbours(transport.rank, transport.size)
    scratch = None
    if combine is not None:
        scratch = device.empty(max(end - begin for begin, end in pairwise(bounds)), buffer)
    chunks = [buffer[begin:end] for begin, end in pairwise(bounds)]
    sends = [transport.start_send(s, right) for s in slices(chunks[steps[0].send])]
    for step in steps:
        ours = slices(chunks[step.receive])
        theirs = ours if scratch is None else scratch_views(scratch, ours)
        receives = [transport.start_receive(s, left) for s in theirs]
        onward = []
        for own, landed, receive in zip(ours, theirs, receives, strict=True):
            transport.wait([receive], deadline)
            if combine is not None:
                combine(own, landed)
            if step is not steps[-1]:  # the chunk of this receive is the chunk of the next send
                onward.append(transport.start_send(own, right))
        transport.wait(sends, deadline)
        sends = onward


def slices(part: Array) -> list[Array]:
    """Cut part of a buffer into the slices that travel as one message each."""
    length = max(1, SLICE_BYTES // part.itemsize)
    return [part[at : at + length] for at in range(0, part.size, length)]


def scratch_views(scratch: Array, parts: Sequence[Array]) -> list[Array]:
    """Cut scratch memory like the parts that will be received into it."""
    ends = accumulate(part.size for part in parts)
    return [scratch[end - part.size : end] for end, part in zip(ends, parts, strict=True)]
