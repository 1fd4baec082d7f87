"""Write plan: which rank writes which slice, as pure integers.

::

    rank 0 holds   w (all)   a rows 0-1   b        writes   w rows 0-4   a rows 0-1
    rank 1 holds   w (all)   a rows 2-3            writes   w rows 5-9   a rows 2-3   (b: rank 0)

What one rank alone holds it writes. What several hold is written once: arrays that are worth it are
cut among them, others go to the one that has least to do. So all write about as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from strategies import errors
from strategies.checkpoint.boxes import Box, check_tiles, split

__all__ = ["HeldPart", "least_loaded", "assign_writers"]

# Bytes that a part of an array has at least: smaller ones cost more in the manifest, and in calls
# when they are read, than other ranks gain by writing them.
_WORTH = 1 << 20


class HeldPart(NamedTuple):
    """What a rank holds of an array.

    Attributes:
        dtype: by name.
        itemsize: bytes of an element.
        shape: of the whole array.
        box: the elements that the rank has.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    box: Box


def assign_writers(held: Sequence[Mapping[str, HeldPart]]) -> list[list[tuple[str, Box]]]:
    """Return for each rank the names and boxes that it writes.

    Every element of every array is written exactly once, by a rank that holds it; the answer
    depends on the arguments alone.

    Args:
        held: of each rank: name -> what it has.

    Raises:
        InvalidArgumentError: ranks disagree about an array, or what they hold overlaps or leaves a
            part out.

    Example:
        >>> w = HeldPart("float32", 4, (1 << 20,), Box((0,), (1 << 20,)))
        >>> assign_writers([{"w": w}, {"w": w}])
        [[('w', Box(start=(0,), shape=(524288,)))], [('w', Box(start=(524288,), shape=(524288,)))]]
    """
    names = dict.fromkeys(name for one in held for name in one)
    result: list[list[tuple[str, Box]]] = [[] for _ in held]
    load = [0] * len(held)
    shared = []
    for name in names:
        holders: dict[Box, list[int]] = {}
        facts = None
        for rank, one in enumerate(held):
            if name not in one:
                continue
            holding = one[name]
            if facts is not None and holding[:3] != facts[:3]:
                raise errors.InvalidArgumentError(
                    f"save: ranks differ, expected {facts.dtype} of {facts.shape} as before, got "
                    f"{holding.dtype} of {holding.shape} on rank {rank} (tensor: {name})"
                )
            facts = holding
            holders.setdefault(holding.box, []).append(rank)
        assert facts is not None
        try:
            check_tiles(facts.shape, list(holders))
        except ValueError as error:
            raise errors.InvalidArgumentError(f"save: {error} (tensor: {name})") from error
        for box, ranks in holders.items():
            if len(ranks) > 1:
                shared.append((box.size * facts.itemsize, name, box, ranks))
            else:
                result[ranks[0]].append((name, box))
                load[ranks[0]] += box.size * facts.itemsize
    for nbytes, name, box, ranks in sorted(shared, key=lambda item: -item[0]):  # stable
        count = min(len(ranks), math.ceil(nbytes / _WORTH))
        parts = split(box, count)
        for part, rank in zip(parts, sorted(ranks, key=lambda rank: load[rank]), strict=False):
            result[rank].append((name, part))
            load[rank] += nbytes * part.size // max(1, box.size)
    return result


def least_loaded(weights: Iterable[int], count: int) -> list[int]:
    """Return who takes each of some pieces so that all have about as much to do.

    Example:
        >>> least_loaded([5, 1, 4, 1], 2)
        [0, 1, 1, 0]
    """
    listed = list(weights)
    load, result = [0] * count, [0] * len(listed)
    for index in sorted(range(len(listed)), key=lambda index: -listed[index]):
        result[index] = min(range(count), key=load.__getitem__)
        load[result[index]] += listed[index]
    return result
