"""Tests for `benchmarks/model.py` on what it has measured before."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from launcher import ROOT, run

KEPT = ROOT / "docs" / "benchmarks"


def simulated_again(file):
    """Simulate the layouts of a file, and measure none."""
    program = ROOT / "benchmarks" / "model.py"
    return run([sys.executable, program, "--layouts", "", "--json", file], timeout=100)


def test_figures_of_an_earlier_version_are_refused_and_kept(tmp_path):
    file = tmp_path / "model.json"
    shutil.copy(KEPT / "model.json", file)
    result = simulated_again(file)
    assert result.status == 1
    assert "which did not measure copying, python, waits; name another" in result.stderr
    assert file.read_bytes() == (KEPT / "model.json").read_bytes()


def test_what_was_measured_is_simulated_again(tmp_path):
    kept = json.loads((KEPT / "model-slow-cores.json").read_text())
    layout = next(each for each in kept["layouts"] if each["machines"] == 2)
    simulated = [size.pop("simulated") for size in layout["sizes"]]
    file = tmp_path / "model.json"
    file.write_text(json.dumps(kept | {"layouts": [layout]}))
    result = simulated_again(file)
    assert result.status == 0, result.stderr
    (again,) = json.loads(file.read_text())["layouts"]
    assert [size["simulated"] for size in again["sizes"]] == [
        pytest.approx(times, rel=1e-6) for times in simulated
    ]


def test_neither_layouts_nor_figures_is_an_error(tmp_path):
    result = simulated_again(tmp_path / "none.json")
    assert result.status == 1
    assert "expected --layouts, or a --json of an earlier run" in result.stderr
