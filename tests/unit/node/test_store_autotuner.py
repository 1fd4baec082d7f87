"""How a rank fills slots: by the place that single lines tell, and what calls there have shown."""

import numpy as np
import pytest

from collectives.arrays.host_arrays import address
from collectives.node import control_block, store_autotuner

LARGE, SMALL = 1 << 20, 1 << 12
TRIALS = store_autotuner.TRIALS
PLAIN, STREAMING = control_block.PLAIN, control_block.STREAMING
NEAR, FAR = control_block.NEAR, control_block.FAR
IN_TURNS = [PLAIN] * TRIALS + [STREAMING] * TRIALS


class Rank:
    """A rank's state, and the block of a call that it makes again and again."""

    def __init__(self, state=None, rank=0, headers=None):
        if state is None:
            state = np.zeros(1, control_block.STATE)
            state["default_mode"][0, [NEAR, FAR]] = PLAIN, STREAMING
        self.state = state
        self.headers = np.zeros(1, control_block.HEADER) if headers is None else headers
        self.block = np.zeros(1, control_block.BLOCK)[0]
        self.block["state"] = address(self.state)
        self.block["headers"] = address(self.headers)
        self.block["rank"] = rank
        self.block["size"] = len(self.headers)
        self.block["hash"] = 7

    def calls(self, count, nbytes=LARGE, spent=(0, 0)):
        """Make calls, of which those of a comparison take so long; return their ways."""
        ways = []
        for _ in range(count):
            store_autotuner.begin_stores(self.block, nbytes)
            ways.append(self.state["store_mode"].item())
            if self.block["tune_timed"]:
                # So long that what the clock adds changes nothing.
                self.block["tune_ns"] = spent[ways[-1]] * 10**12
            store_autotuner.end_stores(self.block)
        return ways

    def moves(self, place):
        self.state["core_distance"] = place


@pytest.fixture(name="rank")
def _rank():
    return Rank()


@pytest.mark.parametrize(("spent", "better"), [((9, 8), STREAMING), ((8, 9), PLAIN)])
@pytest.mark.parametrize("place", [NEAR, FAR])
def test_the_faster_way_is_taken_after_some_calls_of_each(rank, place, spent, better):
    rank.moves(place)
    usual = PLAIN if place == NEAR else STREAMING
    assert rank.calls(1) == [usual]
    assert rank.calls(2 * TRIALS, spent=spent) == IN_TURNS
    assert rank.calls(1) == [usual]  # in which all ranks end the last one of the comparison
    kept = store_autotuner.PERIOD - 2 * TRIALS - 1
    assert rank.calls(kept) == [better] * kept
    assert rank.calls(2 * TRIALS, spent=spent[::-1]) == IN_TURNS
    assert rank.calls(2) == [better, PLAIN + STREAMING - better]


def together(spent, hashes=(7, 7)):
    """Let two ranks compare, each of which takes so long; return the ways they find."""
    headers = np.zeros(2, control_block.HEADER)
    ranks = [Rank(rank=number, headers=headers) for number in range(2)]
    for rank, word in zip(ranks, hashes, strict=True):
        rank.block["hash"] = word
    for _ in range(2 + 2 * TRIALS):
        for rank, times in zip(ranks, spent, strict=True):
            rank.calls(1, spent=times)
    return [rank.calls(1)[0] for rank in ranks]


def test_who_is_slowest_decides():
    # As in a broadcast: who puts is faster past the caches, but who reads is not.
    assert together([(5, 3), (6, 9)]) == [PLAIN, PLAIN]
    assert together([(5, 3), (9, 6)]) == [STREAMING, STREAMING]


def test_times_of_another_call_are_not_looked_at():
    same_row = 7 + control_block.DURATION_ROWS
    assert together([(5, 3), (6, 9)], (7, same_row)) == [STREAMING, PLAIN]


def test_what_a_call_has_found_holds_for_others_that_compare_nothing(rank):
    rank.moves(FAR)
    rank.calls(3 + 2 * TRIALS, spent=(8, 9))
    broadcast = Rank(rank.state)
    assert broadcast.calls(20, SMALL) == [PLAIN] * 20
    rank.moves(NEAR)
    assert broadcast.calls(1, 0) == [PLAIN]


def test_each_place_has_a_way_of_its_own_and_is_compared_soon(rank):
    rank.calls(3 + 2 * TRIALS, spent=(8, 9))
    rank.moves(FAR)
    first = rank.calls(store_autotuner.SOONER - 2 - 2 * TRIALS)
    assert first == [STREAMING] * len(first)
    assert rank.calls(2 * TRIALS, spent=(8, 9)) == IN_TURNS
    assert rank.calls(10) == [STREAMING] + [PLAIN] * 9
    rank.moves(NEAR)
    assert rank.calls(40) == [PLAIN] * 40  # known there: no comparison before its time


def test_a_rank_that_moves_meanwhile_draws_no_conclusion(rank):
    rank.calls(1)
    rank.calls(TRIALS, spent=(9, 8))
    rank.moves(FAR)
    rank.calls(TRIALS, spent=(9, 8))
    assert rank.calls(2) == [STREAMING] * 2  # as ever in that place
    assert not rank.block["tune_best_mode"].any()
    rank.moves(NEAR)
    assert rank.calls(1) == [PLAIN]


@pytest.mark.parametrize("place", [NEAR, FAR])
def test_where_both_take_as_long_the_usual_way_is_kept(rank, place):
    rank.moves(place)
    usual = PLAIN if place == NEAR else STREAMING
    spent = (100, 98) if place == NEAR else (98, 100)
    assert rank.calls(3 + 2 * TRIALS, spent=spent)[-1] == usual


@pytest.mark.parametrize("way", [PLAIN, STREAMING])
def test_nothing_is_compared_where_the_way_is_a_setting(rank, way):
    rank.state["store_forced"], rank.state["store_mode"] = True, way
    assert rank.calls(20, spent=(9, 8)) == [way] * 20
