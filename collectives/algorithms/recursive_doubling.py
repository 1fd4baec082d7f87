"""Recursive doubling: ranks exchange whole buffers at a distance that doubles every round.

For 5 ranks, of which the first pair has one guest; a number stands for a rank's contribution:

    round      rank 0       rank 1     rank 2       rank 3       rank 4
    guest      0 <- 1       1 -> 0
    distance 1 01 <-> 2                2 <-> 01     3 <-> 4      4 <-> 3
    distance 2 012 <-> 34              012 <-> 34   34 <-> 012   34 <-> 012
    result     -> 1         <- 0

With P a power of two there are log2 P rounds and no guests; otherwise the odd ones among the first
ranks hand their part to their left neighbour before and get the result after, which makes two
rounds more. No schedule has fewer rounds, and none sends more bytes: this is for tiny arrays.

Cost per rank:

    operation  messages sent       bytes sent            scratch
    allreduce  up to ceil(log2 P)  up to ceil(log2 P) S  S

A buffer goes in slices, since MPI over TCP sends a long message one direction after the other
(`ring.exchange`).

Order: both partners compute the lower rank's part op the higher one's, so all ranks get the same
bits, in every run. In host memory every NaN of the result has the bits of `numpy.nan`, because the
processor and the compiler choose which of two NaNs an operation keeps.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), section 4.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from collectives.algorithms import ring
from collectives.algorithms.cost_model import RankLayout
from collectives.arrays import device, reduction
from collectives.arrays.host_arrays import Array
from collectives.core import topology
from collectives.transport.transport import Deadline, Transport

__all__ = ["allreduce", "allreduce_seconds", "allgather_combine"]


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer` by the reduction over all ranks, in place."""
    allgather_combine(transport, buffer, reduction.combine(op), deadline)
    device.canonical_nans(buffer)


def allreduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `allreduce` of so many bytes should take.

    On one node: log P (alpha + S (beta + gamma)).
    Between nodes: up to k messages per node and round.
    """
    levels = layout.size.bit_length() - 1
    messages = math.ceil(nbytes / ring.SLICE_BYTES) or 1
    times = [
        _pairs(1 << n, layout).round(
            nbytes, messages=messages, at_once=min(1 << n, layout.per_node)
        )
        for n in range(levels)
    ]
    if layout.size != 1 << levels:  # the others hand their part over before, and get it after
        times += 2 * [layout.round(nbytes, messages=messages)]
    return sum(times) + len(times) * layout.combined(nbytes)


def _pairs(distance: int, layout: RankLayout) -> RankLayout:
    """Return among whom ranks pair up at a distance: on their nodes where pairs are together."""
    together = layout.per_node % (2 * distance) == 0 and not layout.size & (layout.size - 1)
    return replace(layout, size=layout.per_node, num_nodes=1) if together else layout


def allgather_combine(
    transport: Transport, buffer: Array, combine: Callable[[Array, Array], None], deadline: Deadline
) -> None:
    """Combine the buffers of all ranks in a way that may be more than an op describes.

    `combine` changes its first argument, a buffer, by another rank's.
    """
    part = topology.doubling(transport.rank, transport.size)
    own = ring.slices(buffer)
    if part.proxy is not None:
        ring.exchange(transport, own, part.proxy, [], part.proxy, deadline)
        ring.exchange(transport, [], part.proxy, own, part.proxy, deadline)
        return
    ours, theirs = buffer, device.empty(buffer.size, buffer)
    if part.guest is not None:
        ring.exchange(transport, [], part.guest, ring.slices(theirs), part.guest, deadline)
        combine(ours, theirs)
    for partner in part.partners:
        away, into = ring.slices(ours), ring.slices(theirs)
        ring.exchange(transport, away, partner, into, partner, deadline)
        if partner < transport.rank:  # both compute the lower rank's part op the higher one's
            ours, theirs = theirs, ours
        combine(ours, theirs)
    if ours is not buffer:
        device.copy(buffer, ours)
    if part.guest is not None:
        ring.exchange(transport, own, part.guest, [], part.guest, deadline)
