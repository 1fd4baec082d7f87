"""The example that serves single queries by whichever replica is free."""

import re

import pytest

from launcher import ROOT, mpirun
from pairwise import also


@pytest.mark.parametrize("size", [also(2), 3])
def test_every_query_is_answered_by_one_replica_and_by_two(size):
    options = ["--queries", 100, "--wait", 1]
    result = mpirun(size, ROOT / "examples" / "serving.py", *options, timeout=100).checked()
    pattern = r"^replicas: (\d+), (\d+) queries per second, each \S+ ms, accuracy (\S+)$"
    found = re.findall(pattern, result.stdout, re.M)
    assert [int(replicas) for replicas, _, _ in found] == list(range(1, size))
    accuracies = {float(accuracy) for _, _, accuracy in found}
    assert len(accuracies) == 1, "the same queries, each answered once"
    assert accuracies.pop() > 0.9


def test_one_rank_has_nobody_to_ask():
    result = mpirun(1, ROOT / "examples" / "serving.py")
    assert result.status != 0
    assert "expected a replica besides" in result.stderr
