"""Fewer cases of a full cross: every two values that meet in one of them meet in a chosen one.

Most faults need one value, or two that meet: a dtype alone, an algorithm with a number of ranks.
The cases that are chosen grow with the product of the two longest factors, not of all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = Sequence[Hashable]

# Set by `--long`: all combinations.
full = False


def crossed(*factors: Sequence[Hashable]) -> list[Row]:
    """Return combinations of values, for loops inside a test: all pairs, or all with `--long`.

    Args:
        factors: the values of each, no two equal; of two factors all combinations are pairs.
    """
    rows = list(product(*factors))
    return rows if full else [rows[number] for number in pairwise(rows)]


def also(*values: Any) -> Any:
    """Return values of a parameter, or of several, for a case that runs with `--long` only."""
    return pytest.param(*values, marks=pytest.mark.long)


def pairwise(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of the rows to keep, in order.

    Greedy and without chance: the row that brings most new pairs is next, the first of equals.

    Args:
        rows: the cases that exist, a value of each factor in each; not all combinations need to be
            there, and what is not there is not missed.
    """
    pairs = [_pairs(row) for row in rows]
    missing = set().union(*pairs)
    # By how many pairs a row may still bring: a number that is out of date is only too high.
    bring = [len(found) for found in pairs]
    kept = []
    while missing:
        best, most = -1, 0
        for number, limit in enumerate(bring):
            if limit > most:
                bring[number] = len(pairs[number] & missing)
                if bring[number] > most:
                    best, most = number, bring[number]
        kept.append(best)
        missing -= pairs[best]
    return sorted(kept)


def _pairs(row: Row) -> set[Hashable]:
    """The pairs of a row; a value alone is one, so that a single factor keeps all its values."""
    values = list(enumerate(row))
    return {*values, *combinations(values, 2)}
