"""Examples of the explanations are true, and drawings are those that their scripts make."""

from __future__ import annotations

import doctest
import sys

from launcher import ROOT, run

DRAWINGS = ROOT / "docs" / "drawings"


def test_examples():
    result = doctest.testfile(str(ROOT / "docs" / "same-bits.md"), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0


def test_drawings_are_as_their_scripts_make_them(tmp_path):
    result = run([sys.executable, str(DRAWINGS), str(tmp_path)], timeout=60)
    assert result.status == 0, result.stderr
    made = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    kept = {path.name: path.read_text() for path in DRAWINGS.glob("*.svg")}
    assert len(made) >= 8
    assert made == kept, "python docs/drawings"


def test_every_drawing_is_shown_and_says_what_it_shows():
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for path in DRAWINGS.glob("*.svg"):
        assert f"drawings/{path.name})" in pages, path.name
        assert "<desc" in path.read_text()
