"""All-reduce with 16-bit floats or 8-bit blocks on the wire and float32 sums.

A ring would round a sum at every rank it passes. Here each chunk's owner receives all ranks' parts,
adds them in float32 and rounds once; then the chunks travel around a ring.

The first half, for 4 ranks (`b0` is rank 0's part of chunk b, whose owner is rank 1):

    step   rank 0     rank 1     rank 2     rank 3
    1      b0 -> 1    c1 -> 2    d2 -> 3    a3 -> 0
    2      c0 -> 2    d1 -> 3    a2 -> 0    b3 -> 1
    3      d0 -> 3    a1 -> 0    b2 -> 1    c3 -> 2

In each step every rank sends to one rank and receives from one, so no rank is flooded. A chunk is
sent in slices: all steps for the first slice, then all for the second, a few steps at a time. A
    slice is packed in its turn, while others are in flight: 16 MiB as 8 bits with error feedback
    between two machines at 1 Gbit/s take 38.7 ms, and 43.3 if everything is packed first.

Cost per rank: 2 (P - 1) messages, in slices, and 2 (P - 1)/P S bytes, where S are the bytes of the
packed array: a half or a 3.88th of a ring's for float32. Scratch: at most 8 MiB of slices, and the
packed array if the caller's array is wider.

With several ranks per node only the network traffic is packed (`between_nodes`): the ranks of a
node sum in the dtype of the array, and their sum is the contribution that is rounded. So a number
is rounded twice in both cases, for any number of nodes and ranks.

Order: elements are summed in rank order; all ranks get the same bits.

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

from collectives.algorithms import ring, top_k
from collectives.algorithms.hierarchical import Levels
from collectives.algorithms.pairwise import IN_FLIGHT
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import Op
from collectives.core import topology
from collectives.kernels.compression import Codec, elements_per_item, kernels_for
from collectives.transport.transport import Deadline, PendingMessage, Transport

__all__ = ["PairStep", "allreduce", "allreduce_packed", "between_nodes", "schedule"]

# Bytes of a slice: as on a ring, and less if many ranks would need too much scratch.
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
    """Fill `buffer` with the reduction of all contributions, in 16 or 8 bits or by top-k.

    Args:
        transport: the ranks.
        buffer: shape (n,), float32 or float64, contiguous; the same n on all ranks.
        op: the reduction, SUM or MEAN for top-k; MEAN sums, because the caller or `divisor`
            divides.
        deadline: limit of every wait.
        codec: rounding or top-k, with or without error feedback.
        contribution: shape (n,), dtype of `buffer`, contiguous, not changed; None for `buffer`.
        divisor: divides every contribution before it is rounded, so that MEAN needs no extra pass.
    """
    if codec.fraction is not None:
        top_k.allreduce(
            transport, buffer, deadline, codec=codec, contribution=contribution, divisor=divisor
        )
        return
    # Not packed yet: `_allreduce` packs each slice in its turn.
    packed, pack = codec.packing(buffer if contribution is None else contribution, divisor)
    _allreduce(transport, packed, op, deadline, codec=codec, pack=pack)
    # Every element was rounded by one rank, so all ranks unpack the same bits.
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
        op: the reduction; MEAN sums.
        deadline: limit of every wait.
        divisor: divides every contribution of 16-bit floats, in float32.
        codec: the codec that packed the contributions; keeps the residuals of results.
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
    """Run `allreduce_packed`; `pack` fills each part of the buffer before it is needed."""
    rank, size = transport.rank, transport.size
    # Whole blocks of 8 bits are elements here, so a block belongs to one chunk.
    bounds = topology.chunk_bounds(buffer.size, size)
    count = bounds[rank + 1] - bounds[rank]
    # Only the owner of a chunk rounds its sum, so only it has an error to keep.
    residual = None if codec is None else codec.result_residual(count, rank, size)
    _reduce_scatter(transport, buffer, bounds, op, divisor, residual, pack, deadline)
    # The rounded sums travel unchanged, so all ranks get the same bits.
    ring.allgather(transport, buffer, bounds, deadline)


def between_nodes(levels: Levels, codec: Codec) -> Levels:
    """Return levels whose network stage sends 16 or 8 bits, or the largest elements.

    Args:
        levels: levels of `hierarchical`.
        codec: rounding or top-k of the nodes' sums, with or without error feedback. Residuals of a
            rank's chunk are kept apart from those of calls that pack the whole array.
    """
    # The residual of a chunk has another length than one of the whole array.
    of_chunk = dataclasses.replace(codec, name=f"{codec.name}, between nodes")
    return levels._replace(allreduce=partial(allreduce, codec=of_chunk))


class PairStep(NamedTuple):
    """One message out and one in: slice `slice` of the peer's chunk, and of the own chunk."""

    slice: int
    step: int
    dest: int
    source: int


def schedule(rank: int, size: int, slices: int) -> Iterator[PairStep]:
    """Yield a rank's messages, in order, until it has every rank's part of its own chunk."""
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
    """Reduce this rank's chunk of a packed buffer, in place; other chunks are unchanged."""
    # Elements of the array per element of the packed one: 64 for blocks.
    reduce, each = kernels_for(buffer.dtype).reduce, elements_per_item(buffer.dtype)
    if divisor != 1:
        reduce = partial(reduce, divisor=divisor)
    rank, size = transport.rank, transport.size
    # The first chunk is one of the longest.
    longest = bounds[1] - bounds[0]
    depth = _slices_in_flight(size)
    # The scratch holds `depth` slices of all other ranks.
    most = min(SLICE_BYTES, SCRATCH_BYTES // (depth * size)) // buffer.itemsize
    length = max(1, min(longest, most))
    # One row per other rank, in rank order, as `reduce` takes them.
    landing = np.empty((depth, size - 1, length), buffer.dtype)
    under_way: deque[tuple[PairStep, list[PendingMessage]]] = deque()

    def part(chunk: int, number: int) -> slice:
        start = bounds[chunk] + number * length
        # Both ends are bounded, because shorter chunks have no last slice.
        return slice(min(start, bounds[chunk + 1]), min(start + length, bounds[chunk + 1]))

    def packed(chunk: int, number: int) -> slice:
        at = part(chunk, number)
        if pack is not None:
            pack(at.start, at.stop)
        return at

    def combine(number: int) -> None:
        # The own part is packed at its first use.
        at = packed(rank, number)
        start = at.start - bounds[rank]
        stop = start + at.stop - at.start
        left = None if residual is None else residual[each * start : each * stop]
        # Ring of `depth` slices: slice k reuses the memory of slice k - depth.
        reduce(landing[number % depth], buffer[at], rank=rank, op=op, residual=left)

    def finish() -> None:
        exchange, messages = under_way.popleft()
        # Receive and send together: a slice is complete after its last step.
        transport.wait(messages, deadline)
        if exchange.step == size - 1:
            combine(exchange.slice)

    slices = math.ceil(longest / length)
    # One rank rounds its array as several would.
    if size == 1:
        for number in range(slices):
            combine(number)
    # Packing, waiting and combining alternate with messages that are in flight.
    for exchange in schedule(rank, size, slices):
        # Before the next messages, so that at most `IN_FLIGHT` exchanges are open.
        if len(under_way) == IN_FLIGHT:
            finish()
        own = part(rank, exchange.slice)
        # The rows skip this rank, which sends nothing to itself.
        row = landing[exchange.slice % depth, exchange.source - (exchange.source > rank)]
        # Posted before the send, so that the peer's message lands without a copy.
        receive = transport.start_receive(row[: own.stop - own.start], exchange.source)
        theirs = buffer[packed(exchange.dest, exchange.slice)]
        under_way.append((exchange, [receive, transport.start_send(theirs, exchange.dest)]))
    while under_way:
        finish()


def _slices_in_flight(size: int) -> int:
    """Return the number of slices that need scratch memory at a time.

    When exchange i begins, all up to i - IN_FLIGHT are complete. With p exchanges per slice, the
    first of slice k is k p. Slice k reuses the memory of slice k - depth, whose last exchange is
    (k - depth + 1) p - 1. So (depth - 1) p >= IN_FLIGHT - 1.
    """
    return math.ceil((IN_FLIGHT - 1) / max(1, size - 1)) + 1
