"""Mixing matrices: the weights by which each rank averages the arrays of its neighbours.

Row r of a matrix W has the weights of rank r: its result is the sum of W[r][s] times the array of
rank s. The rows and the columns of W add up to 1 (W is doubly stochastic), so that an average
leaves the mean over all ranks unchanged, and repeated averages converge to it on every rank.

| graph | matrices, which averages take in turn |
| --- | --- |
| "ring" | one: each rank and the ranks beside it, by Metropolis weights |
| "exponential" | ceil(log2 P): in average t, rank r takes half of rank r - 2^t's array |
| rank -> neighbours | one, by Metropolis weights |
| P rows of P weights | one |

The Metropolis weight of two neighbours is 1 / (1 + the larger of their numbers of neighbours): a
third on a ring of three or more ranks.

Sources: L. Xiao, S. Boyd, S. Lall, "Distributed average consensus with time-varying Metropolis
weights" (2006); B. Ying et al., "Exponential graph is provably efficient for decentralized deep
training", arXiv:2110.13363 (the one-peer exponential graph).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

__all__ = ["Graph", "Name", "Row", "matrices"]

Name = Literal["ring", "exponential"]

Graph = Name | Mapping[int, Iterable[int]] | Sequence[Sequence[float]]
"""Which ranks are neighbours: a name, the neighbours of each rank, or a matrix of weights."""

Row = dict[int, float]
"""Rank -> weight of its array, in rank order, without weights of 0."""

# Rounding errors of the sum of a row or column.
_TOLERANCE = 1e-6


def matrices(graph: Graph, size: int) -> list[list[Row]]:
    """Return the mixing matrices of a graph of `size` ranks, which averages take in turn.

    Raises:
        ValueError: the name is unknown, or the graph or matrix is wrong.

    Example:
        >>> matrices({0: [1], 1: [0, 2], 2: [1]}, 3)[0][0]
        {0: 0.6666666666666667, 1: 0.3333333333333333}
        >>> [rows[0] for rows in matrices("exponential", 3)]
        [{0: 0.5, 2: 0.5}, {0: 0.5, 1: 0.5}]
    """
    if graph == "ring":
        return [_metropolis([{(r + 1) % size, (r - 1) % size} - {r} for r in range(size)])]
    if graph == "exponential":
        distances = [1 << level for level in range((size - 1).bit_length())]
        # One rank has no other one to average with.
        return [
            [dict(sorted({r: 0.5, (r - far) % size: 0.5}.items())) for r in range(size)]
            for far in distances
        ] or [[{0: 1.0}]]
    if isinstance(graph, str):
        names = " ".join(get_args(Name))
        raise ValueError(f"neighbours: unknown graph, expected one of {names}, got {graph!r}")
    if isinstance(graph, Mapping):
        rows = _metropolis(_symmetric(graph, size))
    else:
        rows = _checked(graph, size)
    reached = _reachable(rows)
    if len(reached) < size:
        raise ValueError(
            f"neighbours: the graph is not connected, expected a path from rank 0 to all ranks, "
            f"got none to {sorted(set(range(size)) - reached)}"
        )
    return [rows]


def _metropolis(neighbours: Sequence[set[int]]) -> list[Row]:
    rows = []
    for rank, others in enumerate(neighbours):
        row = {n: 1 / (1 + max(len(others), len(neighbours[n]))) for n in others}
        rows.append(dict(sorted({**row, rank: 1 - sum(row.values())}.items())))
    return rows


def _symmetric(graph: Mapping[int, Iterable[int]], size: int) -> list[set[int]]:
    """Return the neighbours of each rank, without the rank itself."""
    found = [set(graph.get(rank, ())) - {rank} for rank in range(size)]
    named = set(graph).union(*found)
    if wrong := named - set(range(size)):
        raise ValueError(f"neighbours: no such rank, expected 0 .. {size - 1}, got {min(wrong)}")
    for rank, others in enumerate(found):
        for other in sorted(others):
            if rank not in found[other]:
                raise ValueError(
                    f"neighbours: the graph is not symmetric, expected rank {rank} among the "
                    f"neighbours of rank {other}, got {sorted(found[other])}"
                )
    return found


def _checked(graph: Sequence[Sequence[float]], size: int) -> list[Row]:
    shape = len(graph), sorted({len(row) for row in graph})
    if shape != (size, [size]):
        raise ValueError(
            f"neighbours: expected {size} rows of {size} weights, got {shape[0]} of {shape[1]}"
        )
    for kind, lines in {"row": graph, "column": list(zip(*graph, strict=True))}.items():
        for number, line in enumerate(lines):
            if min(line) < 0 or abs(sum(line) - 1) > _TOLERANCE:
                raise ValueError(
                    f"neighbours: the matrix is not doubly stochastic, expected weights >= 0 that "
                    f"add up to 1, got {list(line)} in {kind} {number}"
                )
    return [{n: float(weight) for n, weight in enumerate(row) if weight} for row in graph]


def _reachable(rows: Sequence[Row]) -> set[int]:
    """Return the ranks whose arrays reach rank 0 in the end, and itself."""
    reached, new = {0}, [0]
    while new:
        new = [source for rank in new for source in rows[rank] if source not in reached]
        reached.update(new)
    return reached
