"""Drawings of the explanations are those that their scripts make."""

import re
import sys

from launcher import ROOT, run
from requirements import needs

DRAWINGS = ROOT / "docs" / "drawings"


def test_drawings_are_as_their_scripts_make_them(tmp_path):
    run([sys.executable, str(DRAWINGS), str(tmp_path)], timeout=60).checked()
    made = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    kept = {path.name: path.read_text() for path in DRAWINGS.glob("*.svg")}
    assert len(made) >= 8
    assert made == kept, "python docs/drawings"


def test_measured_pictures_can_be_read_on_light_pages_and_on_dark_ones(tmp_path):
    needs("matplotlib")
    from matplotlib.figure import Figure

    from collectives.tools import plot

    figure = Figure()
    figure.subplots().plot([1, 2], label="a line")
    for name in ("one.svg", "two.svg"):
        plot.save(figure, tmp_path / name)
    made = (tmp_path / "one.svg").read_text()
    assert made == (tmp_path / "two.svg").read_text()
    kept = [path.read_text() for path in (ROOT / "docs" / "benchmarks").glob("*.svg")]
    assert len(kept) >= 3
    for text in (made, (ROOT / "docs" / "timeline.svg").read_text(), *kept):
        assert "@media(prefers-color-scheme:dark)" in text
        drawn = text.partition("</style>")[2]
        assert not re.search(r"#[0-9a-f]{6}", drawn), "a colour that no card has"
    plot.save(figure, tmp_path / "three.png")
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


def test_every_drawing_is_shown_and_says_what_it_shows():
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for path in DRAWINGS.glob("*.svg"):
        assert f"drawings/{path.name})" in pages, path.name
        assert "<desc" in path.read_text()
