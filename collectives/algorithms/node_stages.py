"""Intra-node stages of hierarchical algorithms, run by the node engine.

Private arrays go through the engine's slots. Arrays from `shared_empty`, if all ranks of the node
bring the same one, stay where they are. 2 ranks on the node, chunk a belongs to rank 0, b to 1:

    stage             rank 0                          rank 1
    reduce-scatter    meet                            meet
                      a of rank 1 is added to a       b is added to b of rank 0, and copied back
    network           a                               b
    all-gather        meet                            meet
                      a is written to rank 1's array  b is written to rank 0's array
                      meet                            meet

Chunk a of all arrays is rank 0's from the first meeting to the last, so that nobody needs a copy.

Cost per rank, S bytes, P ranks on the node: as the pipelined reduction of the node engine; shared
arrays read S and write 2 S/P, then read S/P and write S (P - 1)/P.

Order: local rank 0, 1, 2, ... for every element, whatever memory it lies in.
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

# Bits of a place for the bytes before it; the number of the shared array stands above them.
_OFFSET_BITS = 48


def in_shared_memory(levels: Levels, engine: Engine) -> Levels:
    """Return levels whose stages inside this rank's node go through its engine.

    Args:
        levels: by messages; those of other nodes may stay so.
        engine: of the ranks of `levels.node`.
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
    """Reduce so that this rank's chunk of a prepared buffer is complete."""
    kind = SUM if op is MEAN else op  # what is prepared has been divided
    digest = _digest("reduce-scatter", buffer, bounds, kind.value)
    arrays = _shared_arrays(engine, buffer, digest, deadline)
    begin, end = bounds[engine.rank], bounds[engine.rank + 1]
    if arrays is None:
        work = engine.plan_reduce_scatter(buffer, buffer, bounds, kind, digest)
        _check(engine.run(work, deadline), deadline)
        return
    total, *others = (array[begin:end] for array in arrays)
    combine = reduction.combine(kind)
    for other in others:
        combine(total, other)
    if engine.rank != 0:
        buffer[begin:end] = total


def _allgather(engine: Engine, buffer: Array, bounds: Sequence[int], deadline: Deadline) -> None:
    """Fill a buffer with every rank's own chunk."""
    digest = _digest("all-gather", buffer, bounds)
    arrays = _shared_arrays(engine, buffer, digest, deadline)
    begin, end = bounds[engine.rank], bounds[engine.rank + 1]
    if arrays is None:
        chunks = [buffer[start:stop] for start, stop in pairwise(bounds)]
        wanted = [(rank, 0, chunk) for rank, chunk in enumerate(chunks) if rank != engine.rank]
        longest = max(chunk.nbytes for chunk in chunks)
        _check(engine.publish(buffer[begin:end], wanted, digest, deadline, longest), deadline)
        return
    for rank, array in enumerate(arrays):
        if rank != engine.rank:
            array[begin:end] = buffer[begin:end]
    _check(engine.agree(digest, deadline), deadline)


def _broadcast(engine: Engine, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace a buffer by the root's."""
    digest = _digest("broadcast", buffer, [root])
    own = engine.rank == root
    stream, wanted = (buffer, []) if own else (None, [(root, 0, buffer)])
    _check(engine.publish(stream, wanted, digest, deadline, buffer.nbytes), deadline)


def _barrier(engine: Engine, deadline: Deadline) -> None:
    """Wait for the ranks of the node."""
    _check(engine.agree(zlib.crc32(b"barrier"), deadline), deadline)


def _shared_arrays(
    engine: Engine, buffer: Array, digest: int, deadline: Deadline
) -> list[Array] | None:
    """Wait for all ranks, and return their arrays if all bring the same shared one."""
    # Both are equal on all ranks, so that all meet or none does.
    if buffer.nbytes <= ONE_RAIL_BYTES or not engine.shared:
        return None
    place = engine.shared.location_of_pair(buffer)
    number = -1 if place is None else (place.number << _OFFSET_BITS) + place.offset
    numbers = engine.exchange(number, digest, deadline)
    _check(numbers is not None, deadline)
    if place is None or numbers != [number] * engine.size:
        return None
    return engine.shared.views_of_all_ranks(place, buffer)


def _digest(stage: str, buffer: Array, places: Sequence[int], op: str = "") -> int:
    """Return bits by which ranks see that they are in the same stage of the same call."""
    return zlib.crc32(f"{stage} {op} {buffer.dtype} {buffer.size} {list(places)}".encode())


def _check(alike: bool, deadline: Deadline) -> None:
    # Only where the comparison of calls is off: otherwise they have been found to be alike.
    if not alike:
        raise CollectiveError(
            f"{deadline.operation}: the ranks of a node do not mean the same call; "
            "UNISONO_CHECK=always says in what they differ"
        )
