"""Tests for `benchmarks/model.py` on what it has measured before."""

import importlib
import json
import sys

import pytest

from launcher import ROOT, run

KEPT = ROOT / "docs" / "benchmarks"


def simulated_again(file):
    """Simulate the layouts of a file, and measure none."""
    program = ROOT / "benchmarks" / "model.py"
    return run([sys.executable, program, "--layouts", "", "--json", file], timeout=100)


@pytest.fixture(name="older")
def _older(tmp_path):
    """A file as an earlier version of the benchmark wrote them."""
    kept = json.loads((KEPT / "model.json").read_text())
    for layout in kept["layouts"]:
        for name in ("copying", "python", "waits"):
            del layout[name]
    file = tmp_path / "older.json"
    file.write_text(json.dumps(kept))
    return file


def test_figures_of_an_earlier_version_are_refused_and_kept(older):
    before = older.read_bytes()
    result = simulated_again(older)
    assert result.status == 1
    assert "which did not measure copying, python, waits; name another" in result.stderr
    assert older.read_bytes() == before


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


def test_what_is_measured_again_need_not_be_complete(monkeypatch, older):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    model = importlib.import_module("model")
    layouts = json.loads(older.read_text())["layouts"]
    again = [tuple(each[name] for name in model.NAMES) for each in layouts]
    assert model.earlier(older, again) == layouts
    with pytest.raises(SystemExit, match="did not measure copying, python, waits"):
        model.earlier(older, again[1:])
