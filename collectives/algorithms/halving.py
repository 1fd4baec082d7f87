"""Halving and doubling: ceil(log2 P) rounds, for any number of ranks.

A *reduce-scatter by halving*: at first a rank is in charge of all P chunks, its own and those to
the right, around the end of the buffer. In every round it hands the farther half of them to the
rank for whom they are the first ones, and takes in as many for its own front ones, until only its
own chunk is left. An *all-gather by doubling* is the same backwards. For 5 ranks (rank r, chunks
counted from r, all modulo 5; every rank does the same):

    round    sends chunks    to rank    takes in chunks    from rank    then in charge of
      0      r+3, r+4        r+3        r, r+1             r-3          r, r+1, r+2
      1      r+2             r+2        r                  r-2          r, r+1
      2      r+1             r+1        r                  r-1          r

With P a power of two these are the distances P/2, P/4, ..., 1 of the well-known exchange. Usually
other P are reduced to a power of two, at the price of two more rounds and 2 S more bytes, or split
into blocks of different powers, at the price of waiting for one another. This schedule needs
neither: ceil(log2 P) rounds and (P - 1)/P S bytes sent and received are the least possible for any
P. It needs a commutative op, which all of ours are, and ranks that can send to one and receive from
another at once.

An *all-reduce by doubling* exchanges whole buffers in floor(log2 P) rounds; when P is no power of
two, the odd ones among the first ranks hand their part to their left neighbour before and get the
result after, which makes two rounds more.

Cost per rank: all-reduce of S bytes <= `DOUBLING_BYTES` up to log2 P + 2 messages of S bytes,
scratch S; above, 2 ceil(log2 P) rounds and 2 (P - 1)/P S bytes, scratch S/2.

Order: chunk `c` is summed over a tree of ranks that depends on P alone, on one rank. In a doubling
both partners compute the lower rank's part op the higher one's. All ranks get the same bits, in
every run.

Source: halving for any P: J. L. Traff, "Optimal, non-pipelined reduce-scatter and allreduce
algorithms", arXiv:2410.14234 (2024), section 2. Doubling: R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of collective communication operations in MPICH", Int. J. High Perform. Comput. Appl.
19 (2005), section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from collectives import topology
from collectives.algorithms import ring
from collectives.algorithms.layout import Layout
from collectives.arrays import device, reduction
from collectives.arrays.host import Array
from collectives.transport.transport import Deadline, Message, Transport

__all__ = [
    "allgather",
    "allgather_seconds",
    "allreduce",
    "allreduce_seconds",
    "double",
    "double_seconds",
    "reduce_scatter",
    "reduce_scatter_seconds",
]

# Bytes up to which an all-reduce exchanges whole buffers. Doubling / halving, in ms: 4 nodes at
# 1 Gbit/s 16 KiB 1.0 / 2.5, 64 KiB 1.8 / 3.0, 128 KiB 2.3 / 2.8; 4 ranks of a node 64 KiB
# 0.4 / 0.7. With more ranks there is less to gain, so it stays below the largest size measured.
DOUBLING_BYTES = 1 << 16

# A ring combines a slice while the next one travels; where a message of a halving is more than a
# slice, the next round waits for the last of them. Between 4 nodes at 1 Gbit/s an all-reduce of
# 4 MiB takes 61 ms by halving, 54 ms around the ring; of 1 MiB, with one such round, 14.3 and 13.4.
_WAITING = 1.13


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer` by the reduction over all ranks, in place."""
    if buffer.nbytes <= DOUBLING_BYTES:
        double(transport, buffer, reduction.combine(op), deadline)
        return
    bounds = topology.chunk_bounds(buffer.size, transport.size)
    reduce_scatter(transport, buffer, bounds, op, deadline)
    allgather(transport, buffer, bounds, deadline)


def allreduce_seconds(nbytes: float, layout: Layout) -> float:
    """Return how long `allreduce` of so many bytes should take."""
    if nbytes > DOUBLING_BYTES:
        return 2 * allgather_seconds(nbytes, layout) + layout.shared_work(nbytes)
    return double_seconds(nbytes, layout)


def double_seconds(nbytes: float, layout: Layout) -> float:
    """Return how long `double` should take, the combining included."""
    levels = layout.size.bit_length() - 1
    times = [
        _pairs(1 << n, layout).step(nbytes, at_once=min(1 << n, layout.per_node))
        for n in range(levels)
    ]
    if layout.size != 1 << levels:  # the others hand their part over before, and get it after
        times += 2 * [layout.step(nbytes)]
    return sum(times) + len(times) * layout.combined(nbytes)


def _pairs(distance: int, layout: Layout) -> Layout:
    """Return among whom ranks pair up at a distance: on their nodes where pairs are together."""
    together = layout.per_node % (2 * distance) == 0 and not layout.size & (layout.size - 1)
    return replace(layout, size=layout.per_node, num_nodes=1) if together else layout


def reduce_scatter(
    transport: Transport,
    buffer: Array,
    bounds: Sequence[int],
    op: reduction.Op,
    deadline: Deadline,
) -> None:
    """Reduce so that this rank's chunk of `buffer` is complete; the others hold partial results."""
    combine = reduction.combine(op)
    steps = list(topology.halving_reduce_scatter(transport.rank, transport.size))
    largest = max(
        (sum(p.size for p in _run(buffer, bounds, s.receive, s.chunks)) for s in steps), default=0
    )
    scratch = device.empty(largest, buffer)
    sends: list[Message] = []
    for step in steps:
        ours = _run(buffer, bounds, step.receive, step.chunks)
        theirs = ring.landing(scratch, ours)
        receives = [transport.start_receive(s, step.source) for s in theirs]
        away = _run(buffer, bounds, step.send, step.chunks)
        sends += [transport.start_send(s, step.dest) for s in away]
        for own, landed, receive in zip(ours, theirs, receives, strict=True):
            transport.wait([receive], deadline)
            combine(own, landed)
    transport.wait(sends, deadline)  # nobody has touched their memory meanwhile


def reduce_scatter_seconds(nbytes: float, layout: Layout) -> float:
    """Return how long `reduce_scatter` should take."""
    return allgather_seconds(nbytes, layout) + layout.shared_work(nbytes)


def allgather(
    transport: Transport, buffer: Array, bounds: Sequence[int], deadline: Deadline
) -> None:
    """Fill `buffer` with every rank's own chunk, in place."""
    sends: list[Message] = []
    for step in topology.doubling_allgather(transport.rank, transport.size):
        into = _run(buffer, bounds, step.receive, step.chunks)
        receives = [transport.start_receive(s, step.source) for s in into]
        have = _run(buffer, bounds, step.send, step.chunks)
        sends += [transport.start_send(s, step.dest) for s in have]
        for receive in receives:
            transport.wait((receive,), deadline)
    transport.wait(sends, deadline)


def allgather_seconds(nbytes: float, layout: Layout) -> float:
    """Return how long `allgather` should take."""
    seconds = 0.0
    for step in topology.halving_reduce_scatter(0, layout.size):
        message = nbytes * step.chunks / layout.size
        at_once = min(step.dest, step.source, layout.per_node)
        time = layout.step(message, at_once=at_once, messages=min(step.chunks, 2))
        seconds += time * (_WAITING if message > ring.SLICE_BYTES else 1.0)
    return seconds


def _run(buffer: Array, bounds: Sequence[int], first: int, count: int) -> list[Array]:
    """Cut the slices of a run of chunks out of a buffer."""
    parts = topology.unwrapped(first, count, len(bounds) - 1)
    return [s for p in parts for s in ring.slices(buffer[bounds[p.start] : bounds[p.stop]])]


def double(
    transport: Transport, buffer: Array, combine: Callable[[Array, Array], None], deadline: Deadline
) -> None:
    """Exchange whole buffers with a partner at twice the distance in every round.

    `combine` changes its first argument, a buffer, by another rank's.
    """
    part = topology.doubling(transport.rank, transport.size)
    if part.proxy is not None:
        transport.send(buffer, part.proxy, deadline)
        transport.receive(buffer, part.proxy, deadline)
        return
    ours, theirs = buffer, device.empty(buffer.size, buffer)
    if part.guest is not None:
        transport.receive(theirs, part.guest, deadline)
        combine(ours, theirs)
    for partner in part.partners:
        transport.exchange(ours, partner, theirs, partner, deadline)
        if partner < transport.rank:  # both compute the lower rank's part op the higher one's
            ours, theirs = theirs, ours
        combine(ours, theirs)
    if ours is not buffer:
        device.copy(buffer, ours)
    if part.guest is not None:
        transport.send(buffer, part.guest, deadline)
