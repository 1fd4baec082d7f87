"""The example that trains to an accuracy by all-reduce and with a parameter server."""

import re

from launcher import ROOT, mpirun


def test_all_reduce_and_a_server_come_to_the_accuracy_with_a_slow_worker():
    result = mpirun(
        3, ROOT / "examples" / "time_to_accuracy.py", "--slow", 5, timeout=110
    ).checked()
    pattern = r"^ *(\S+): 0.96 within \S+ s, steps of the workers: (\d+) (\d+)$"
    steps = {name: (int(a), int(b)) for name, a, b in re.findall(pattern, result.stdout, re.M)}
    assert list(steps) == ["all-reduce", "server"], result
    assert steps["all-reduce"][0] == steps["all-reduce"][1] > 0
    assert sum(steps["server"]) > 0
