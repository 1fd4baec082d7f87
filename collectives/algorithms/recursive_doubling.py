"""Recursive doubling: ranks exchange whole buffers at a distance that doubles every round.

For 5 ranks, with one guest in the first pair; a number is a rank's contribution:

    round      rank 0       rank 1     rank 2       rank 3       rank 4
    guest      0 <- 1       1 -> 0
    distance 1 01 <-> 2                2 <-> 01     3 <-> 4      4 <-> 3
    distance 2 012 <-> 34              012 <-> 34   34 <-> 012   34 <-> 012
    result     -> 1         <- 0

If P is a power of two there are log2 P rounds and no guests. Otherwise the odd ranks among the
first ones send their part to their left neighbour before, and receive the result after, which takes
two more rounds. No schedule has fewer rounds, and none sends more bytes: this is for tiny arrays.

Cost per rank:

    operation  messages sent       bytes sent            scratch
    allreduce  up to ceil(log2 P)  up to ceil(log2 P) S  S

A buffer is sent in slices, because MPI over TCP uses one direction after the other for long
messages (`ring.exchange`).

Order: both partners compute the lower rank's part op the higher one's, so all ranks get the same
bits, in every run. In host memory every NaN of the result has the bits of `numpy.nan`, because
processor and compiler choose which of two NaNs an operation returns.

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
    """Return the modelled seconds of `allreduce`.

    On one node: log P (alpha + S (beta + gamma)).
    Between nodes: up to k messages per node and round.
    """
    # Rounds among the largest power of two of ranks.
    levels = layout.size.bit_length() - 1
    messages = math.ceil(nbytes / ring.SLICE_BYTES) or 1
    times = [
        # Short distances pair ranks of one node, if nodes are numbered in order.
        _pairs(1 << n, layout).round(
            nbytes, messages=messages, at_once=min(1 << n, layout.per_node)
        )
        for n in range(levels)
    ]
    if layout.size != 1 << levels:  # guests send their part before, and receive the result after
        times += 2 * [layout.round(nbytes, messages=messages)]
    return sum(times) + len(times) * layout.combined(nbytes)


def _pairs(distance: int, layout: RankLayout) -> RankLayout:
    """Return the layout of pairs at a distance: one node if all pairs are inside nodes."""
    # For other numbers of ranks the guests shift the pairs.
    together = layout.per_node % (2 * distance) == 0 and not layout.size & (layout.size - 1)
    return replace(layout, size=layout.per_node, num_nodes=1) if together else layout


def allgather_combine(
    transport: Transport, buffer: Array, combine: Callable[[Array, Array], None], deadline: Deadline
) -> None:
    """Combine the buffers of all ranks by a custom function; all ranks get the result in place.

    `combine` updates its first argument by another rank's buffer.
    """
    part = topology.doubling(transport.rank, transport.size)
    own = ring.slices(buffer)
    # A guest waits for its proxy, which does the rounds for both.
    if part.proxy is not None:
        ring.exchange(transport, own, part.proxy, [], part.proxy, deadline)
        ring.exchange(transport, [], part.proxy, own, part.proxy, deadline)
        return
    # Two buffers, exchanged by name, so that no round copies.
    ours, theirs = buffer, device.empty(buffer.size, buffer)
    if part.guest is not None:
        ring.exchange(transport, [], part.guest, ring.slices(theirs), part.guest, deadline)
        # The guest is the right neighbour, so its part is the right operand.
        combine(ours, theirs)
    for partner in part.partners:
        away, into = ring.slices(ours), ring.slices(theirs)
        ring.exchange(transport, away, partner, into, partner, deadline)
        if partner < transport.rank:  # both compute the lower rank's part op the higher one's
            ours, theirs = theirs, ours
        combine(ours, theirs)
    # After an odd number of exchanges the result is in the scratch memory.
    if ours is not buffer:
        device.copy(buffer, ours)
    if part.guest is not None:
        ring.exchange(transport, own, part.guest, [], part.guest, deadline)
