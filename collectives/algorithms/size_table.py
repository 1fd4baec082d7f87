"""Fastest algorithm by message size, computed once per layout."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from collectives.algorithms.cost_model import RankLayout

__all__ = ["lookup", "switch_points"]

# The last pick holds for all larger sizes.
_MOST_BYTES = 1 << 40

Table = tuple[Sequence[int], Sequence[str]]


def lookup(
    question: str, nbytes: int, layout: RankLayout, find: Callable[[str, RankLayout], Table]
) -> str:
    """Return the name of the fastest algorithm for `nbytes`.

    Args:
        question: key of the table in the layout's cache, such as an operation.
        nbytes: S.
        layout: the ranks and their links.
        find: computes the table of `switch_points` if the cache has none.
    """
    # Kept in the layout, because a call finds it there without a hash of the layout.
    table = layout.picks.get(question)
    if table is None:
        table = layout.picks[question] = find(question, layout)
    sizes, names = table
    return names[bisect_right(sizes, nbytes)]


def switch_points(fastest: Callable[[int], str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the sizes at which the fastest algorithm changes, and the algorithms between them.

    Args:
        fastest: returns the fastest algorithm for a size in bytes.

    Returns:
        sizes in bytes, ascending, and one more name: `names[i]` holds from `sizes[i - 1]` to below
        `sizes[i]`. A pick that holds for less than an octave may be missed.
    """
    sizes: list[int] = []
    names = [fastest(0)]
    low = 0
    high = 1
    # Octaves first, because a pick rarely changes within one.
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
            # Again from the switch: another pick may follow within the octave.
            low = above
        low, high = high, 2 * high
    return tuple(sizes), tuple(names)
