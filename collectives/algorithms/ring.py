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

Cost per rank: 2 (P - 1) messages and 2 (P - 1)/P S bytes for the all-reduce, the least possible;
half of both for either part. Scratch: one chunk. A chunk goes as *slices*: a slice is sent on as
soon as it has arrived and been added, while the next is still under way, so that both directions
of a link stay busy.

Order: chunk `c` is summed as `c + 1, c + 2, ..., c` (mod P) on one way around, then copied; all
ranks get the same bits, in every run.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from collectives import reduction, topology
from collectives.arrays import Array
from collectives.topology import RingStep
from collectives.transport import Deadline, Transport

__all__ = ["allgather", "allreduce", "reduce_scatter"]

# Bytes of one slice. Small enough that the sum of a slice hides behind the transfer of the next,
# large enough that the messages' own cost (about 3 us each) stays below 5 %.
SLICE_BYTES = 1 << 18


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer` by the reduction over all ranks, in place.

    Args:
        transport: the ranks.
        buffer: shape (n,), contiguous, prepared by `reduction.prepare`; the same n on all ranks.
        op: how to combine.
        deadline: the limit of every wait.
    """
    bounds = topology.chunk_bounds(buffer.size, transport.size)
    reduce_scatter(transport, buffer, bounds, op, deadline)
    allgather(transport, buffer, bounds, deadline)


def reduce_scatter(
    transport: Transport,
    buffer: Array,
    bounds: Sequence[int],
    op: reduction.Op,
    deadline: Deadline,
) -> None:
    """Reduce so that this rank's chunk of `buffer` is complete; the others hold partial results.

    Args:
        transport: the ranks.
        buffer: shape (n,), contiguous; the same n on all ranks.
        bounds: P + 1 offsets; chunk `c` is `buffer[bounds[c]:bounds[c + 1]]`.
        op: how to combine.
        deadline: the limit of every wait.
    """
    steps = list(topology.ring_reduce_scatter(transport.rank, transport.size))
    _circulate(transport, buffer, bounds, steps, deadline, reduction.combine(op))


def allgather(
    transport: Transport, buffer: Array, bounds: Sequence[int], deadline: Deadline
) -> None:
    """Fill `buffer` with every rank's own chunk, in place; arguments as `reduce_scatter`."""
    steps = list(topology.ring_allgather(transport.rank, transport.size))
    _circulate(transport, buffer, bounds, steps, deadline, None)


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
        scratch = np.empty(max(np.diff(bounds)), buffer.dtype)
    sends = [transport.start_send(s, right) for s in _slices(buffer, bounds, steps[0].send)]
    for step in steps:
        ours = _slices(buffer, bounds, step.receive)
        theirs = ours if scratch is None else _landing(scratch, ours)
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


def _slices(buffer: Array, bounds: Sequence[int], chunk: int) -> list[Array]:
    length = max(1, SLICE_BYTES // buffer.itemsize)
    end = bounds[chunk + 1]
    return [buffer[at : min(at + length, end)] for at in range(bounds[chunk], end, length)]


def _landing(scratch: Array, slices: Sequence[Array]) -> list[Array]:
    """Cut the scratch memory like the slices that will be received."""
    ends = np.cumsum([s.size for s in slices]).tolist()
    return [scratch[end - s.size : end] for end, s in zip(ends, slices, strict=True)]
