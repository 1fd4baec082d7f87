"""Write plan: which rank writes which slice, as a pure function of integers.

::

    rank 0 holds   w (all)   a rows 0-1   b        writes   w rows 0-4   a rows 0-1
    rank 1 holds   w (all)   a rows 2-3            writes   w rows 5-9   a rows 2-3   (b: rank 0)

A rank writes the parts that it alone holds. A part of several ranks is written once: large arrays
are split among them, small ones go to the least loaded rank. So all ranks write about as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from strategies import errors
from strategies.checkpoint.boxes import Box, check_tiles, split

__all__ = ["HeldPart", "least_loaded", "assign_writers"]

# Minimum bytes per part of an array. Smaller parts cost more, in the manifest and in read calls,
# than parallel writing gains.
_WORTH = 1 << 20


class HeldPart(NamedTuple):
    """The part of an array that a rank holds.

    Attributes:
        dtype: name of the dtype.
        itemsize: bytes per element.
        shape: shape of the whole array.
        box: box of the rank's elements.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    box: Box


def assign_writers(held: Sequence[Mapping[str, HeldPart]]) -> list[list[tuple[str, Box]]]:
    """Return for each rank the names and boxes that it writes.

    Every element of every array is written exactly once, by a rank that holds it. The result
    depends only on the arguments, so all ranks compute the same.

    Args:
        held: for each rank, name -> the part that it holds.

    Raises:
        InvalidArgumentError: ranks disagree about an array, or their parts overlap or leave
            elements out.

    Example:
        >>> w = HeldPart("float32", 4, (1 << 20,), Box((0,), (1 << 20,)))
        >>> assign_writers([{"w": w}, {"w": w}])
        [[('w', Box(start=(0,), shape=(524288,)))], [('w', Box(start=(524288,), shape=(524288,)))]]
    """
    # A dict instead of a set: sets of texts have another order in each process, the plan must not.
    names = dict.fromkeys(name for one in held for name in one)
    result: list[list[tuple[str, Box]]] = [[] for _ in held]
    load = [0] * len(held)
    shared = []
    for name in names:
        # Ranks with the same box hold equal elements, so that any of them may write it.
        holders: dict[Box, list[int]] = {}
        facts = None
        for rank, one in enumerate(held):
            if name not in one:
                continue
            holding = one[name]
            # dtype, item size and shape; only the box may differ.
            if facts is not None and holding[:3] != facts[:3]:
                raise errors.InvalidArgumentError(
                    f"save: ranks differ, expected {facts.dtype} of {facts.shape}, got "
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
                # Only parts without a choice are counted here; the shared ones fill the gaps.
                load[ranks[0]] += box.size * facts.itemsize
    # Largest first (LPT scheduling) keeps the loads close. The sort must be stable, so that all
    # ranks get the same plan.
    for nbytes, name, box, ranks in sorted(shared, key=lambda item: -item[0]):
        count = min(len(ranks), math.ceil(nbytes / _WORTH))
        parts = split(box, count)
        for part, rank in zip(parts, sorted(ranks, key=lambda rank: load[rank]), strict=False):
            result[rank].append((name, part))
            # An empty box has no bytes; the divisor 1 avoids 0 / 0.
            load[rank] += nbytes * part.size // max(1, box.size)
    return result


def least_loaded(weights: Iterable[int], count: int) -> list[int]:
    """Assign pieces to `count` takers so that their total weights are about equal.

    Example:
        >>> least_loaded([5, 1, 4, 1], 2)
        [0, 1, 1, 0]
    """
    listed = list(weights)
    load, result = [0] * count, [0] * len(listed)
    for index in sorted(range(len(listed)), key=lambda index: -listed[index]):
        # `min` takes the first of equal loads, so the result is the same on all ranks.
        result[index] = min(range(count), key=load.__getitem__)
        load[result[index]] += listed[index]
    return result
