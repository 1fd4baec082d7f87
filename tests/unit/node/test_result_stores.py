"""How a rank stores what calls bring it: compared by their times, call by call, with equal bits."""

import numpy as np
import pytest

from collectives.arrays.host_arrays import address
from collectives.node import control_block, result_stores

LARGE, SMALL = 1 << 25, 1 << 20
TRIALS = result_stores.TRIALS
FIRST_OF_ALL = 1

WAYS = {"plain": control_block.PLAIN, "streaming": control_block.STREAMING}


@pytest.fixture(name="block")
def _block():
    state = np.zeros(1, control_block.STATE)
    block = np.zeros(1, control_block.BLOCK)[0]
    block["state"] = address(state)
    yield block
    state.fill(0)  # it lives as long as the block does


def calls(block, count, nbytes=LARGE, took=(0, 0)):
    """Make calls whose copies take so long, plainly and past the caches; return their ways."""
    ways = []
    for _ in range(count):
        result_stores.begin_result(block, nbytes)
        ways.append(int(block["result_mode"]))
        if block["result_timed"]:
            block["result_ns"] = took[ways[-1]]
        result_stores.end_result(block)
    return ways


@pytest.mark.parametrize(("took", "better"), [((900, 800), "streaming"), ((800, 900), "plain")])
def test_the_faster_way_is_taken_after_some_calls_of_each(block, took, better):
    assert calls(block, FIRST_OF_ALL) == [control_block.STREAMING]  # large, and nothing known
    trials = [control_block.PLAIN] * TRIALS + [control_block.STREAMING] * TRIALS
    assert calls(block, 2 * TRIALS, took=took) == trials
    kept = result_stores.PERIOD - 2 * TRIALS
    assert calls(block, kept) == [WAYS[better]] * kept
    assert calls(block, 2 * TRIALS, took=took[::-1]) == trials  # whatever was, is compared again
    assert calls(block, 1) == [control_block.PLAIN + control_block.STREAMING - WAYS[better]]


def test_of_each_way_the_fastest_call_counts(block):
    calls(block, FIRST_OF_ALL)
    for plain in (5000, 700, 5000)[:TRIALS]:
        calls(block, 1, took=(plain, 0))
    calls(block, TRIALS, took=(0, 800))
    assert calls(block, 1) == [control_block.PLAIN]


def test_what_is_small_is_never_compared(block):
    ways = calls(block, 20, SMALL, took=(900, 100))
    assert ways == [control_block.UNKNOWN] * 20
    assert calls(block, 1) == [control_block.STREAMING]  # the first large one


def test_calls_that_bring_nothing_do_not_count_as_trials(block):
    """As where a call is made in place, and then elsewhere."""
    calls(block, FIRST_OF_ALL)
    for _ in range(TRIALS):
        calls(block, 1, 0)
        calls(block, 1, took=(800, 0))
    assert calls(block, TRIALS, took=(0, 700)) == [control_block.STREAMING] * TRIALS
    assert calls(block, 1) == [control_block.STREAMING]


def test_a_call_that_has_failed_is_no_trial(block):
    calls(block, FIRST_OF_ALL + 2 * TRIALS - 1, took=(800, 700))
    result_stores.begin_result(block, LARGE)
    block["result_ns"] = 1  # and it does not end
    assert calls(block, 1) == [control_block.STREAMING]
    assert block["result_best_ns"].tolist() == [0, 0]


def test_a_way_that_was_never_seen_to_the_end_is_not_taken(block):
    """As where the ranks do not bring what a plan knows, and nothing moves."""
    calls(block, FIRST_OF_ALL + TRIALS, took=(800, 0))
    for _ in range(TRIALS):
        result_stores.begin_result(block, LARGE)
    assert calls(block, 1) == [control_block.PLAIN]


def test_nothing_is_compared_where_the_way_is_a_setting(block):
    state = np.zeros(1, control_block.STATE)
    state["store_forced"] = True
    block["state"] = address(state)
    assert calls(block, 20) == [control_block.STREAMING] * 20
    assert calls(block, 20, SMALL << 2) == [control_block.UNKNOWN] * 20


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(
    "way", [control_block.PLAIN, control_block.STREAMING, control_block.UNKNOWN]
)
def test_either_way_copies_the_bytes_and_none_beside_them(block, way, far):
    source = np.random.default_rng(way).integers(1, 255, 10_000, np.uint8)
    for first in (0, 1, 63):
        for nbytes in (0, 1, 64, 9000):
            dest = np.zeros(10_000, np.uint8)
            block["result_mode"], block["result_timed"] = way, True
            result_stores.write_result(block, address(dest) + first, address(source), nbytes, far)
            np.testing.assert_array_equal(dest[first : first + nbytes], source[:nbytes])
            assert not dest[:first].any()
            assert not dest[first + nbytes :].any()
    assert block["result_ns"] > 0
