"""All-reduce with 16-bit floats or 8-bit blocks on the wire and float32 sums.

A ring rounds a sum at every rank that it passes. Here the parts of a chunk travel as they are to
the chunk's owner, who adds them up in float32 and rounds once; then the chunks go around a ring.

The first half, for 4 ranks (`b0` is rank 0's part of chunk b, whose owner is rank 1):

    step   rank 0     rank 1     rank 2     rank 3
    1      b0 -> 1    c1 -> 2    d2 -> 3    a3 -> 0
    2      c0 -> 2    d1 -> 3    a2 -> 0    b3 -> 1
    3      d0 -> 3    a1 -> 0    b2 -> 1    c3 -> 2

In a step every rank sends to one rank and receives from one, so that none is flooded. A chunk goes
as slices: all steps with the first slice, then all with the second, a few steps at a time. A slice
is packed when it is its turn, while others are on their way: 16 MiB as 8 bits with feedback between
two machines at 1 Gbit/s take 38.7 ms, and 43.3 where all is packed first.

Cost per rank: 2 (P - 1) messages, in slices, and 2 (P - 1)/P S bytes, where S are the bytes of the
packed array: a half or a 3.88th of what a ring sends for float32. Scratch: at most 8 MiB of slices,
and the packed array where the caller's is wider.

Between nodes of several ranks only what the network carries is packed (`between_nodes`): the ranks
of a node add up in the type of the array, their sum is the contribution that is rounded. So a
number is rounded twice here, too, whatever the number of nodes and ranks.

Order: elements are summed in rank order, wherever they stand; all ranks get the same bits.

Source: the first half is a direct reduce-scatter, as in R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of collective communication operations in MPICH", Int. J. High Perform. Comput. Appl.
19 (2005), section 4.3 ("pairwise exchange").
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from collectives.algorithms import ring
from collectives.algorithms.hierarchical import Levels
from collectives.algorithms.pairwise import IN_FLIGHT
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import Op
from collectives.core import topology
from collectives.kernels.compression import Codec, elements_per_item, kernels_for
from collectives.transport.transport import Deadline, PendingMessage, Transport

__all__ = ["PairStep", "allreduce", "allreduce_packed", "between_nodes", "schedule"]

# Of one slice: as on a ring, and less where many ranks would need much scratch.
SLICE_BYTES = 1 << 18
SCRATCH_BYTES = 1 << 23


def allreduce(
    transport: Transport,
    buffer: Array,
    op: Op,
    deadline: Deadline,
    *,
    codec: Codec,
    contribution: Array | None = None,
    divisor: int = 1,
) -> None:
    """Fill `buffer` with the reduction of all ranks' contributions, sent as 16 or 8 bits.

    Args:
        transport: the ranks.
        buffer: shape (n,), float32 or float64, contiguous; the same n on all ranks.
        op: how to combine; MEAN sums, since the division is the caller's or `divisor`.
        deadline: the limit of every wait.
        codec: how to round, with or without feedback.
        contribution: shape (n,), dtype of `buffer`, contiguous, not changed; `buffer` itself if
            None.
        divisor: what every contribution is divided by before it is rounded, so that MEAN needs no
            pass of its own.
    """
    packed, pack = codec.packing(buffer if contribution is None else contribution, divisor)
    _allreduce(transport, packed, op, deadline, codec=codec, pack=pack)
    codec.unpack(packed, buffer)


def allreduce_packed(
    transport: Transport,
    buffer: Array,
    op: Op,
    deadline: Deadline,
    *,
    divisor: int = 1,
    codec: Codec | None = None,
) -> None:
    """Replace `buffer` by the reduction over all ranks, in place, rounded once.

    Args:
        transport: the ranks.
        buffer: shape (n,), float16, bfloat16 or blocks of 8 bits, contiguous; the same n on all
            ranks.
        op: how to combine; MEAN sums.
        deadline: the limit of every wait.
        divisor: what every contribution of 16-bit floats is divided by, in float32.
        codec: by which the contributions have been packed, and whose residuals of results are kept.
    """
    _allreduce(transport, buffer, op, deadline, divisor=divisor, codec=codec)


def _allreduce(
    transport: Transport,
    buffer: Array,
    op: Op,
    deadline: Deadline,
    *,
    divisor: int = 1,
    codec: Codec | None = None,
    pack: Callable[[int, int], None] | None = None,
) -> None:
    """As `allreduce_packed`; `pack` fills each part of the buffer before it is needed."""
    rank, size = transport.rank, transport.size
    bounds = topology.chunk_bounds(buffer.size, size)
    count = bounds[rank + 1] - bounds[rank]
    residual = None if codec is None else codec.result_residual(count, rank, size)
    _reduce_scatter(transport, buffer, bounds, op, divisor, residual, pack, deadline)
    ring.allgather(transport, buffer, bounds, deadline)


def between_nodes(levels: Levels, codec: Codec) -> Levels:
    """Return levels of which the one over the network sends 16 or 8 bits.

    Args:
        levels: of `hierarchical`.
        codec: how to round the nodes' sums, with or without feedback. Residuals are those of a
            rank's chunk, apart from those of a call that packs the whole array.
    """
    of_chunk = dataclasses.replace(codec, name=f"{codec.name}, between nodes")
    return levels._replace(allreduce=partial(allreduce, codec=of_chunk))


class PairStep(NamedTuple):
    """One message out and one in: slice `slice` of a chunk of the other rank, and of our own."""

    slice: int
    step: int
    dest: int
    source: int


def schedule(rank: int, size: int, slices: int) -> Iterator[PairStep]:
    """Yield what a rank does, in order, until it has every rank's part of its own chunk."""
    for number in range(slices):
        for step in range(1, size):
            source, dest = topology.ring_neighbours(rank, size, step)
            yield PairStep(number, step, dest, source)


def _reduce_scatter(
    transport: Transport,
    buffer: Array,
    bounds: Sequence[int],
    op: Op,
    divisor: int,
    residual: Array | None,
    pack: Callable[[int, int], None] | None,
    deadline: Deadline,
) -> None:
    """Reduce so that this rank's chunk of a packed buffer is complete; the others stay."""
    reduce, each = kernels_for(buffer.dtype).reduce, elements_per_item(buffer.dtype)
    if divisor != 1:
        reduce = partial(reduce, divisor=divisor)
    rank, size = transport.rank, transport.size
    longest = bounds[1] - bounds[0]
    depth = _slices_in_flight(size)
    most = min(SLICE_BYTES, SCRATCH_BYTES // (depth * size)) // buffer.itemsize
    length = max(1, min(longest, most))
    landing = np.empty((depth, size - 1, length), buffer.dtype)
    under_way: deque[tuple[PairStep, list[PendingMessage]]] = deque()

    def part(chunk: int, number: int) -> slice:
        start = bounds[chunk] + number * length
        return slice(min(start, bounds[chunk + 1]), min(start + length, bounds[chunk + 1]))

    def packed(chunk: int, number: int) -> slice:
        at = part(chunk, number)
        if pack is not None:
            pack(at.start, at.stop)
        return at

    def combine(number: int) -> None:
        at = packed(rank, number)
        start = at.start - bounds[rank]
        stop = start + at.stop - at.start
        left = None if residual is None else residual[each * start : each * stop]
        reduce(landing[number % depth], buffer[at], rank=rank, op=op, residual=left)

    def finish() -> None:
        exchange, messages = under_way.popleft()
        transport.wait(messages, deadline)
        if exchange.step == size - 1:
            combine(exchange.slice)

    slices = math.ceil(longest / length)
    if size == 1:
        for number in range(slices):
            combine(number)
    for exchange in schedule(rank, size, slices):
        if len(under_way) == IN_FLIGHT:
            finish()
        own = part(rank, exchange.slice)
        row = landing[exchange.slice % depth, exchange.source - (exchange.source > rank)]
        receive = transport.start_receive(row[: own.stop - own.start], exchange.source)
        theirs = buffer[packed(exchange.dest, exchange.slice)]
        under_way.append((exchange, [receive, transport.start_send(theirs, exchange.dest)]))
    while under_way:
        finish()


def _slices_in_flight(size: int) -> int:
    """Return how many slices need scratch memory at a time.

    When exchange i begins, i - IN_FLIGHT and all before it are complete. With p exchanges per
    slice, the first of slice k is k p, and the last of slice k - depth, whose memory it takes over,
    is (k - depth + 1) p - 1. So (depth - 1) p >= IN_FLIGHT - 1.
    """
    return math.ceil((IN_FLIGHT - 1) / max(1, size - 1)) + 1
