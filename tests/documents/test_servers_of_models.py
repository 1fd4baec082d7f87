"""Models of PyTorch and JAX whose steps a strategy makes, as the examples show."""

import re
from pathlib import Path

import pytest

from launcher import ROOT, mpirun
from pairwise import also
from requirements import needs, require

PACKAGES = {"torch": ["torch"], "jax": ["jax", "optax"]}


@pytest.mark.parametrize(
    ("library", "size", "options"),
    [
        ("torch", 3, []),
        also("torch", 4, ["--synchronous"]),
        ("torch", 4, ["--spare", "1", "--steps", "300"]),
        ("jax", 3, []),
        also("jax", 4, ["--spare", "1", "--steps", "300"]),
    ],
)
def test_the_digits_are_learnt(library, size, options):
    needs(*PACKAGES[library], "sklearn")
    program = ROOT / "examples" / f"{library}_servers.py"
    result = mpirun(size, program, *options, timeout=110).checked()
    (accuracy,) = re.findall(r"^accuracy on the held-out digits: (.*)$", result.stdout, re.M)
    assert float(accuracy) >= 0.96, result
    expected = "1 of 4 replicas spare" if "--spare" in options else f"{size - 1} workers"
    assert expected in result.stdout


@pytest.mark.parametrize("rows", [6_000_000, also(100_000_000)])
def test_a_table_that_no_worker_has_the_memory_for(tmp_path, rows):
    needed = 3 * rows * 16 * 4  # the table, some room for what reads files
    facts = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
    if rows > 6_000_000 and int(facts["MemAvailable"]) << 10 < needed:
        require("memory", f"{needed >> 30} GiB are not free")
    options = [] if rows > 6_000_000 else ["--checkpoint", tmp_path / "run"]
    program = ROOT / "examples" / "large_table.py"
    started = _learnt(program, rows, options)
    assert started[1] < 0.01 < 0.5 < started[0]
    if options:  # every ps goes on from the rows that it has written
        assert max(_learnt(program, rows, options)) < 0.01


def _learnt(program, rows, options):
    """Return the loss at first and in the end; nobody has needed more memory than for its rows."""
    result = mpirun(4, program, "--rows", str(rows), *options, timeout=115).checked()
    losses = re.findall(r"^loss (.*) at first, (.*) in the end", result.stdout, re.M)[0]
    peaks = re.findall(r"^/job:(\w+)/task:\d: (\d+) MiB at most", result.stdout, re.M)
    assert [job for job, _ in peaks] == ["ps", "ps", "worker", "worker"]
    for job, peak in peaks:
        share = rows / 2 * 16 * 4 / 2**20 if job == "ps" else 0
        read = share if "read in" in result.stdout else 0
        assert int(peak) < 300 + share + read, result  # where the whole would be 366 or more
    return tuple(map(float, losses))
