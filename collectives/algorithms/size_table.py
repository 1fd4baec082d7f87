"""Fastest algorithm by message size, computed once per layout."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from collectives.algorithms.cost_model import RankLayout

__all__ = ["lookup", "switch_points"]

# Sizes beyond which the pick stays what it is there.
_MOST_BYTES = 1 << 40

Table = tuple[Sequence[int], Sequence[str]]


def lookup(
    question: str, nbytes: int, layout: RankLayout, find: Callable[[str, RankLayout], Table]
) -> str:
    """Return the name that holds for so many bytes.

    Args:
        question: what is asked for; the layout keeps the answer under this name.
        nbytes: S.
        layout: the ranks and their links.
        find: makes the table of `switch_points` for them.
    """
    table = layout.picks.get(question)
    if table is None:
        table = layout.picks[question] = find(question, layout)
    sizes, names = table
    return names[bisect_right(sizes, nbytes)]


def switch_points(fastest: Callable[[int], str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return at which sizes the fastest one changes, and which it is between them.

    Args:
        fastest: says for a size in bytes which one is the fastest there.

    Returns:
        Sizes in bytes, ascending, and one name more: `names[i]` holds from `sizes[i - 1]` on and
        below `sizes[i]`. Where a pick holds for less than an octave it may be missed.
    """
    sizes: list[int] = []
    names = [fastest(0)]
    low = 0
    high = 1
    while high <= _MOST_BYTES:
        while fastest(high) != names[-1]:
            below, above = low, high
            while above - below > 1:
                middle = (below + above) // 2
                if fastest(middle) == names[-1]:
                    below = middle
                else:
                    above = middle
            sizes.append(above)
            names.append(fastest(above))
            low = above
        low, high = high, 2 * high
    return tuple(sizes), tuple(names)
