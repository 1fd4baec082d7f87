"""Intra-node stages of hierarchical algorithms, run by the node engine.

Private arrays go through the engine's slots. Arrays from `shared_empty` are reduced in place, if
all ranks of the node pass the same shared array. 2 ranks on the node; chunk a belongs to rank 0, b
to 1:

    stage             rank 0                          rank 1
    reduce-scatter    synchronize                     synchronize
                      a of rank 1 is added to a       b is added to b of rank 0, and copied back
    network           a                               b
    all-gather        synchronize                     synchronize
                      a is written to rank 1's array  b is written to rank 0's array
                      synchronize                     synchronize

Chunk a of all arrays belongs to rank 0 from the first synchronization to the last, so no rank needs
a copy.

Cost per rank, S bytes, P ranks on the node: private arrays as the pipelined reduction of the node
engine; shared arrays read S and write 2 S/P, then read S/P and write S (P - 1)/P.

Order: local rank 0, 1, 2, ... for every element, for private and shared arrays.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from collectives.algorithms.hierarchical import ONE_RAIL_BYTES, Levels
from collectives.arrays import reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MEAN, SUM, Op
from collectives.core.errors import CollectiveError
from collectives.node.engine import Engine
from collectives.transport.transport import Deadline

__all__ = ["in_shared_memory"]

# Bits of a shared place's offset; the number of the shared array is above them.
# 2^48 bytes are more than a node's memory; 15 bits are left for the number.
_OFFSET_BITS = 48


def in_shared_memory(levels: Levels, engine: Engine) -> Levels:
    """Return levels whose stages inside this rank's node use its engine.

    Args:
        levels: levels by messages; other nodes may keep theirs.
        engine: engine of the ranks of `levels.node`.
    """
    return levels._replace(
        reduce_scatter=partial(_reduce_scatter, engine),
        allgather=partial(_allgather, engine),
        broadcast=partial(_broadcast, engine),
        barrier=partial(_barrier, engine),
    )


def _reduce_scatter(
    engine: Engine, buffer: Array, bounds: Sequence[int], op: Op, deadline: Deadline
) -> None:
    """Reduce this rank's chunk of a prepared buffer, in place."""
    # `by_messages` has divided the buffer, and the engine would divide once more.
    kind = SUM if op is MEAN else op  # a prepared buffer has been divided
    digest = _digest("reduce-scatter", buffer, bounds, kind.value)
    arrays = _shared_arrays(engine, buffer, digest, deadline)
    begin, end = bounds[engine.rank], bounds[engine.rank + 1]
    if arrays is None:
        # In place: the buffer is private to the call, and only this rank's chunk is written.
        work = engine.plan_reduce_scatter(buffer, buffer, bounds, kind, digest)
        _check(engine.run(work, deadline), deadline)
        return
    # Rank 0's array holds the sum, so that the order is rank 0, 1, 2, and so on.
    total, *others = (array[begin:end] for array in arrays)
    combine = reduction.combine(kind)
    for other in others:
        combine(total, other)
    # The later stages use this rank's own array.
    if engine.rank != 0:
        buffer[begin:end] = total


def _allgather(engine: Engine, buffer: Array, bounds: Sequence[int], deadline: Deadline) -> None:
    """Fill a buffer with every rank's own chunk."""
    digest = _digest("all-gather", buffer, bounds)
    arrays = _shared_arrays(engine, buffer, digest, deadline)
    begin, end = bounds[engine.rank], bounds[engine.rank + 1]
    if arrays is None:
        chunks = [buffer[start:stop] for start, stop in pairwise(bounds)]
        # The own chunk is in the buffer already.
        wanted = [(rank, 0, chunk) for rank, chunk in enumerate(chunks) if rank != engine.rank]
        longest = max(chunk.nbytes for chunk in chunks)
        _check(engine.publish(buffer[begin:end], wanted, digest, deadline, longest), deadline)
        return
    for rank, array in enumerate(arrays):
        if rank != engine.rank:
            array[begin:end] = buffer[begin:end]
    # The last synchronization: until then other ranks write into this rank's array.
    _check(engine.agree(digest, deadline), deadline)


def _broadcast(engine: Engine, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace a buffer by the root's, in place."""
    digest = _digest("broadcast", buffer, [root])
    own = engine.rank == root
    # Other ranks publish nothing, and copy the root's stream.
    stream, wanted = (buffer, []) if own else (None, [(root, 0, buffer)])
    _check(engine.publish(stream, wanted, digest, deadline, buffer.nbytes), deadline)


def _barrier(engine: Engine, deadline: Deadline) -> None:
    """Wait until all ranks of the node have entered."""
    # A hash that no other stage has.
    _check(engine.agree(zlib.crc32(b"barrier"), deadline), deadline)


def _shared_arrays(
    engine: Engine, buffer: Array, digest: int, deadline: Deadline
) -> list[Array] | None:
    """Wait for all ranks; return their arrays if all pass the same shared array, else None."""
    # Both values are equal on all ranks, so that either all ranks exchange numbers or none.
    if buffer.nbytes <= ONE_RAIL_BYTES or not engine.shared:
        return None
    place = engine.shared.location_of_pair(buffer)
    # A private array has the number -1.
    number = -1 if place is None else (place.number << _OFFSET_BITS) + place.offset
    # Also the synchronization before shared arrays are read.
    numbers = engine.exchange(number, digest, deadline)
    _check(numbers is not None, deadline)
    # Other numbers, or other places of one array, cannot be reduced in place.
    if place is None or numbers != [number] * engine.size:
        return None
    return engine.shared.views_of_all_ranks(place, buffer)


def _digest(stage: str, buffer: Array, places: Sequence[int], op: str = "") -> int:
    """Return a hash of a stage and its arguments, which must be equal on all ranks."""
    # The engine compares a hash in each stage.
    return zlib.crc32(f"{stage} {op} {buffer.dtype} {buffer.size} {list(places)}".encode())


def _check(alike: bool, deadline: Deadline) -> None:
    # Fails only if the comparison of calls is disabled, because that would have found the
    # difference.
    if not alike:
        raise CollectiveError(
            f"{deadline.operation}: calls differ between the ranks of a node; "
            "UNISONO_CHECK=always shows the difference"
        )
