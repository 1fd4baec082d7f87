"""The example that trains by one program or one per replica, synchronously or not."""

import re

import pytest

from launcher import ROOT, mpirun
from pairwise import also


@pytest.mark.parametrize("size", [also(2), 3])
def test_all_four_ways_learn_the_digits_and_those_in_step_find_the_same(size):
    result = mpirun(size, ROOT / "examples" / "four_ways.py", timeout=100).checked()
    found = re.findall(r"^ *(.*): +(\d+) updates, \S+ s, accuracy (\S+)$", result.stdout, re.M)
    ways = {way: (int(updates), float(accuracy)) for way, updates, accuracy in found}
    batches = 12 * (1250 // 50)
    for program in ("one program", "one per replica"):
        assert ways[f"{program}, synchronous"][0] == batches // (size - 1)
        assert ways[f"{program}, asynchronous"][0] == batches
    assert ways["one program, synchronous"] == ways["one per replica, synchronous"]
    for way, (_, accuracy) in ways.items():
        # The last update may be by a gradient that waited for a processor since the first ones.
        assert accuracy > (0.7 if "asynchronous" in way else 0.9), result
