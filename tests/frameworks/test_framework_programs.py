"""Programs of frameworks for Gloo give the same bits, unchanged, over this library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher import ROOT, mpirun
from requirements import needs

FOLDER = Path(__file__).parent

# Program of this folder -> the framework's package.
PROGRAMS = {
    "graphs": "torch_geometric",
    "ignite_trains": "ignite",
    "metric_learning": "pytorch_metric_learning",
    "torchmetrics_sync": "torchmetrics",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_for_gloo_is_run_unchanged(program):
    needs("torch", PROGRAMS[program])
    shown = []
    for option in ((), ("--replace", "gloo")):
        # Imports take seconds of a core for each rank, on a busy machine up to 80.
        result = mpirun(
            2, "-m", "strategies.torch", *option, FOLDER / f"{program}.py", timeout=280
        ).checked()
        shown.append(sorted(re.findall(r"^shown gloo \d .*$", result.stdout, re.MULTILINE)))
        assert result.stderr.count("unisono: replaces Gloo") == len(option) // 2
    assert shown[0] == shown[1]
    assert len(shown[0]) == 2


def test_every_program_is_in_the_table_and_on_the_page():
    programs = {path.stem for path in FOLDER.glob("*.py")}
    assert programs - {"shown", "test_framework_programs"} == set(PROGRAMS)
    page = (ROOT / "docs" / "frameworks.md").read_text()
    for program in PROGRAMS:
        assert f"`tests/frameworks/{program}.py`" in page
