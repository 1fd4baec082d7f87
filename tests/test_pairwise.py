"""Choosing cases: no pair is lost, and few cases remain."""

from itertools import combinations, product

import pytest

import pairwise as module
from pairwise import crossed, pairwise

CROSSES = [(4,), (3, 2), (4, 3, 2), (5, 5, 5), (2,) * 8, (6, 1, 3, 2)]


def met(rows):
    """Every two values that meet in a row, and where they stand."""
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize("lengths", CROSSES, ids=str)
def test_every_two_values_meet(lengths):
    cross = list(product(*map(range, lengths)))
    kept = [cross[number] for number in pairwise(cross)]
    assert met(kept) == met(cross)
    assert {value for row in kept for value in enumerate(row)} == {
        (place, value) for place, length in enumerate(lengths) for value in range(length)
    }


@pytest.mark.parametrize(
    ("lengths", "most"), [((4,), 4), ((3, 2), 6), ((4, 3, 2), 13), ((5, 5, 5), 35), ((2,) * 8, 9)]
)
def test_few_cases_remain(lengths, most):
    cross = list(product(*map(range, lengths)))
    assert len(pairwise(cross)) <= most


def test_what_does_not_exist_is_not_missed():
    rows = [(a, b, c) for a, b, c in product(range(3), repeat=3) if a != b]
    kept = [rows[number] for number in pairwise(rows)]
    assert met(kept) == met(rows)
    assert all(a != b for a, b, _ in kept)


def test_the_choice_is_always_the_same_and_in_order():
    cross = list(product("ab", "xyz", range(4)))
    assert pairwise(cross) == pairwise(cross) == sorted(pairwise(cross))


def test_loops_inside_a_test_have_all_pairs_or_all(monkeypatch):
    factors = ["ab", "xyz", range(4)]
    everything = list(product(*factors))
    for full in (True, False):
        monkeypatch.setattr(module, "full", full)
        rows = crossed(*factors)
        assert met(rows) == met(everything)
        assert (rows == everything) == full


def test_nothing_of_nothing():
    assert pairwise([]) == []
    assert pairwise([()]) == []
