"""Row counts per rank, and the check that they fit the output."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from collectives.arrays.host_arrays import ALLOCATE, Array
from collectives.calls.call import Call
from collectives.calls.group import Group
from collectives.calls.overloads import Splits
from collectives.core import topology
from collectives.core.errors import MismatchError, in_turn, some

__all__ = ["split_counts", "output_mismatch"]


def split_counts(call: Call, array: Array, counts: Splits | None) -> list[int]:
    """Return the number of rows for every rank.

    Args:
        array: shape (n, ...).
        counts: rows for every rank; None shares evenly, with one more row for each of the first
            `n % size` ranks.

    Raises:
        ValueError: the array is a scalar, or the counts do not add up to n.
    """
    size, operation = call.group.size, call.operation
    if array.ndim == 0:
        raise ValueError(f"{operation}: a scalar has no rows, expected shape (n, ...)")
    if counts is None:
        # The rule of `numpy.array_split`: longer shares first.
        bounds = topology.chunk_bounds(array.shape[0], size)
        return [stop - start for start, stop in itertools.pairwise(bounds)]
    rows = [operator.index(n) for n in counts]
    if len(rows) != size or min(rows) < 0 or sum(rows) != array.shape[0]:
        raise ValueError(
            f"{operation}: counts do not fit, expected {size} numbers >= 0 that add "
            f"up to {array.shape[0]} rows, got {rows}"
        )
    return rows


def output_mismatch(
    group: Group,
    operation: str,
    row: tuple[int, ...],
    given: Sequence[int],
    expected: Sequence[int],
) -> Exception | None:
    """Return this rank's error if `out` has the wrong shape on any rank, else None.

    All ranks know the shapes, so all ranks raise an error.

    Args:
        group: the ranks.
        operation: name of the operation.
        row: shape of a row.
        given: rows of `out` on every rank, `ALLOCATE.number` without `out`.
        expected: rows of the result on every rank.
    """
    wrong = {
        rank: f"out has the wrong shape, expected {(right, *row)}, got {(n, *row)}"
        for rank, (n, right) in enumerate(zip(given, expected, strict=True))
        if n not in (ALLOCATE.number, right)
    }
    if not wrong:
        return None
    # A rank with a wrong `out` raises its own error, as if it had refused the call alone.
    if group.rank in wrong:
        return ValueError(f"{operation}: {wrong[group.rank]}")
    name, first = group.transport.name, next(iter(wrong))
    whys = some([f"{name([rank])}: {why}" for rank, why in wrong.items()])
    text = f"{operation}: refused on {name(list(wrong))}, so no rank continues: {whys}"
    # The first rank with a wrong `out` prints its error first; the others follow (`core.errors`).
    return in_turn(MismatchError(text), (group.rank - first) % group.size)
