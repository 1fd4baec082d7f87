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

The bytes are the least possible. A chunk is sent in *slices*. A rank forwards a slice as soon as it
has arrived and been added, while the next slice is in flight, so both directions of a link stay
busy. A *broadcast* sends the slices of the whole buffer from the root once around, in P - 2 rounds
more than the number of slices.

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
# btl_tcp_eager_limit, up to which a slice is sent without a rendezvous):
#
#     slice                                          60 KiB   128 KiB   256 KiB   1 MiB
#     2 ranks of a node, 16 MiB                        13.8      10.7       7.1     7.0
#     2 nodes, 1 Gbit/s, 16 MiB (line 134)              146       153       151     145
#     4 nodes, 1 Gbit/s,  8 MiB (line 101)              116       131       130     154
#     2 nodes, 1 Gbit/s, 16 MiB, limit 264 KiB          143       144       143       -
#     4 nodes, 1 Gbit/s,  8 MiB, limit 264 KiB          110       112       113       -
#
# Larger slices wait longer for their sum; smaller ones cost about 10 us each.
SLICE_BYTES = 1 << 18

# Slices that an exchange has in flight in each direction. More of them fill the sockets and the
# queues of the switch, so acknowledgements wait behind data. A whole array as one message uses one
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
    """Return the modelled seconds of `allreduce`.

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
    """Reduce this rank's chunk of `buffer`, in place; other chunks hold partial results."""
    steps = list(topology.ring_reduce_scatter(transport.rank, transport.size))
    _circulate(transport, buffer, bounds, steps, deadline, reduction.combine(op))


def reduce_scatter_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `reduce_scatter`."""
    return _ring_seconds(nbytes, layout, layout.combined(1.0))


def allgather(
    transport: Transport, buffer: Array, bounds: Sequence[int], deadline: Deadline
) -> None:
    """Fill `buffer` with every rank's own chunk, in place."""
    steps = list(topology.ring_allgather(transport.rank, transport.size))
    _circulate(transport, buffer, bounds, steps, deadline, None)


def allgather_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `allgather`."""
    return _ring_seconds(nbytes, layout, 0.0)


def _ring_seconds(nbytes: float, layout: RankLayout, gamma: float) -> float:
    """Return the time of P - 1 steps, each of which forwards a chunk in slices.

    The slowest part decides: the line, the CPU time of messages and combining, or the latency of
    one slice, behind which the other slices follow.
    """
    steps, chunk = layout.size - 1, nbytes / layout.size
    own = min(chunk, SLICE_BYTES)
    messages = math.ceil(chunk / SLICE_BYTES) or 1
    times = [0.0]
    for link, programs, _ in layout.links():
        way = link.alpha + own * (link.beta + gamma)
        # The first slice passes all ranks; the rest follows at the rate of the line.
        times.append(steps * way + (chunk - own) * link.beta)
        times.append((steps * chunk - own) * link.beta + way)
        # Two programs take part in each message of each step.
        times.append(steps * (2 * messages * programs + chunk * gamma))
    return max(times) if steps else 0.0


def broadcast(transport: Transport, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place."""
    # The root receives nothing, and its left neighbour sends nothing.
    left, right = topology.ring_neighbours(transport.rank, transport.size)
    source = None if transport.rank == root else left
    relay(transport, buffer, source, [] if right == root else [right], deadline)


def broadcast_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `broadcast`: P - 1 hops of a slice, other slices follow."""
    if layout.size == 1:
        return 0.0
    first = min(nbytes, SLICE_BYTES)
    # The first slice waits at each hop, the others follow behind it.
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
    """Receive a buffer, unless `source` is None, and forward each slice when it arrives."""
    parts = slices(buffer)
    receives: list[PendingMessage] = []
    if source is not None:
        # All receives at once: slices land while this rank forwards earlier ones.
        receives = [transport.start_receive(part, source) for part in parts]
    sends: list[PendingMessage] = []
    for number, part in enumerate(parts):
        # An empty list at the root, whose slices are complete.
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
    """Send slices to one rank while receiving slices from one, `_AT_ONCE` in flight each way.

    Args:
        transport: the ranks.
        away: slices to send; must not change meanwhile.
        dest: rank that receives them.
        into: memory for the slices of `source`.
        source: rank that sends them.
        deadline: limit of every wait.
        take: called with the number of each received slice, in order.
    """
    # Receives are posted first, so that data lands without a copy.
    receives = [transport.start_receive(part, source) for part in into[:_AT_ONCE]]
    sends = [transport.start_send(part, dest) for part in away[:_AT_ONCE]]
    # The lists may have different lengths, if chunks at the end are shorter.
    for number in range(max(len(into), len(away))):
        following = number + _AT_ONCE
        if number < len(into):
            transport.wait((receives[number],), deadline)
            # The next receive before `take`, so that data arrives while this slice is combined.
            if following < len(into):
                receives.append(transport.start_receive(into[following], source))
            if take is not None:
                take(number)
        if following < len(away):
            # The oldest send makes room for the next one.
            transport.wait((sends[number],), deadline)
            sends.append(transport.start_send(away[following], dest))
    # Older sends were waited for above.
    transport.wait(sends[-_AT_ONCE:], deadline)


def _circulate(
    transport: Transport,
    buffer: Array,
    bounds: Sequence[int],
    steps: Sequence[RingStep],
    deadline: Deadline,
    combine: Callable[[Array, Array], None] | None,
) -> None:
    """Pass chunks to the right; received data is combined with the own part, or replaces it."""
    if not steps:
        return
    left, right = topology.ring_neighbours(transport.rank, transport.size)
    scratch = None
    if combine is not None:
        # Of the longest chunk, reused in every step.
        scratch = device.empty(max(end - begin for begin, end in pairwise(bounds)), buffer)
    chunks = [buffer[begin:end] for begin, end in pairwise(bounds)]
    # The first send has no receive before it.
    sends = [transport.start_send(s, right) for s in slices(chunks[steps[0].send])]
    for step in steps:
        ours = slices(chunks[step.receive])
        # In an all-gather the received chunk replaces the own part.
        theirs = ours if scratch is None else scratch_views(scratch, ours)
        # Posted for the whole chunk, so that no slice waits for a receive.
        receives = [transport.start_receive(s, left) for s in theirs]
        onward = []
        for own, landed, receive in zip(ours, theirs, receives, strict=True):
            transport.wait([receive], deadline)
            if combine is not None:
                # Into `own`, which is then sent onward.
                combine(own, landed)
            if step is not steps[-1]:  # the chunk of this receive is the chunk of the next send
                onward.append(transport.start_send(own, right))
        # After the receives: a send waits for the right neighbour, which may be late.
        transport.wait(sends, deadline)
        sends = onward


def slices(part: Array) -> list[Array]:
    """Cut part of a buffer into slices, each sent as one message."""
    # At least one element, whatever its size.
    length = max(1, SLICE_BYTES // part.itemsize)
    return [part[at : at + length] for at in range(0, part.size, length)]


def scratch_views(scratch: Array, parts: Sequence[Array]) -> list[Array]:
    """Cut scratch memory into views with the sizes of `parts`."""
    ends = accumulate(part.size for part in parts)
    return [scratch[end - part.size : end] for end, part in zip(ends, parts, strict=True)]
