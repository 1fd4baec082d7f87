"""The example that cross-validates networks, folds over ranks."""

import re

from launcher import ROOT, mpirun


def validated(size):
    """Return what was printed for each size of network, and how many were trained by each rank."""
    result = mpirun(size, ROOT / "examples" / "cross_validation.py", timeout=100).checked()
    *table, last = result.stdout.splitlines()
    return table, [int(n) for n in re.search(r"by rank: (.*)$", last)[1].split()]


def test_folds_over_ranks_find_what_one_rank_finds():
    table, taken = validated(3)
    assert len(taken) == 3
    assert sum(taken) == 15
    assert [int(line.split()[0]) for line in table] == [4, 16, 64]
    shares = [float(re.search(r"accuracy (\S+),", line)[1]) for line in table]
    assert shares == sorted(shares)
    assert shares[-1] > 0.93
    assert validated(1) == (table, [15])
