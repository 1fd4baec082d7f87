"""Plots of benchmarks and of predicted scaling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from collectives.tools.explain import CurvePoint

__all__ = [
    "check",
    "draw",
    "draw_curve",
    "draw_efficiency",
    "draw_sizes",
    "empty",
    "is_possible",
    "save",
]

# Colours of matplotlib -> (name in an SVG, colour on a light card, colour on a dark card). Text and
# lines have a contrast of at least 3 : 1 on both, as pictures need.
_COLOURS = {
    "#ffffff": ("card", "#ffffff", "#161b22"),
    "#000000": ("ink", "#1f2328", "#f0f3f6"),
    "#b0b0b0": ("grid", "#8c959f", "#7d8590"),
    "#cccccc": ("edge", "#d0d7de", "#3d444d"),
    "#808080": ("grey", "#57606a", "#9ea7b3"),
    "#d3d3d3": ("call", "#d0d7de", "#3d444d"),
    "#add8e6": ("span", "#cfe3ff", "#123a70"),
    "#1f77b4": ("h0", "#1f6fb4", "#79b0ff"),
    "#ff7f0e": ("h1", "#b8620a", "#f0a35c"),
    "#2ca02c": ("h2", "#2b7a3b", "#6fcf83"),
    "#d62728": ("h3", "#c0262d", "#ff8f8a"),
    "#9467bd": ("h4", "#7a4fb0", "#bda4f5"),
    "#8c564b": ("h5", "#8c564b", "#d0a79d"),
    "#e377c2": ("h6", "#b53f93", "#f29ccb"),
}


def is_possible() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def check(path: Path, option: str) -> None:
    """Check that a picture can be written to a file, before anything is computed for it.

    Raises:
        ValueError: matplotlib is not installed, or the folder or format does not exist.
    """
    if not is_possible():
        raise ValueError(f"{option} needs matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(
            f"{option}: expected a file that ends in one of .{' .'.join(sorted(known))}, "
            f"got {str(path)!r}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {str(path.parent)!r}")


def save(figure: Figure, path: Path | str) -> None:
    """Write a picture to a file; an SVG is readable on light and dark pages.

    Its background is a card of its own, whose colours follow the reader's preference.
    """
    if Path(path).suffix != ".svg":
        figure.savefig(path)
        return
    import io

    import matplotlib

    text = io.StringIO()
    # Without a date, and with ids that are the same each time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "unisono"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue()
    # matplotlib writes colours literally; variables replace them.
    for colour, (name, *_) in _COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    light, dark = (
        "".join(f"--{name}:{shades[night]};" for name, *shades in _COLOURS.values())
        for night in (0, 1)
    )
    style = (
        f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "text{fill:var(--ink)}</style>"
    )
    # Behind the root's start tag, so that the style applies to the whole picture.
    Path(path).write_text(re.sub(r"(<svg[^>]*>)", rf"\1\n {style}", drawn, count=1))


def draw(
    title: str,
    rows: Sequence[dict[str, Any]],
    names: Mapping[str, str],
    bus_factor: float,
    path: Path,
) -> None:
    """Draw rows of `bench.measure` into a file, in the format of its suffix.

    Args:
        title: title of the picture.
        rows: at least one.
        names: names of the peers, for people.
        bus_factor: busbw / algbw.
        path: path of the file.
    """
    figure = empty(10)
    left, right = figure.subplots(1, 2)
    nbytes = np.array([row["bytes"] for row in rows])
    ours = np.array([row["median"] for row in rows])
    lines = {"unisono": ours}
    lines |= {name: np.array([row["peers"][peer] for row in rows]) for peer, name in names.items()}
    for name, seconds in lines.items():
        left.loglog(nbytes, 1e6 * seconds, "o-", label=name)
        right.semilogx(nbytes, nbytes * bus_factor / seconds / 1e9, "o-", label=name)
    left.fill_between(nbytes, 1e6 * ours, [1e6 * row["p99"] for row in rows], alpha=0.2)
    left.set_ylabel("median time, us (shaded up to p99)")
    right.set_ylabel("bus bandwidth, GB/s")
    for axes in (left, right):
        axes.set_xlabel("bytes")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    save(figure, path)


def draw_curve(title: str, points: Sequence[CurvePoint], path: Path) -> None:
    """Draw a curve into a file: all algorithms, and the choice of "auto"."""
    with _axes(title, "nodes", "estimated ms", path) as axes:
        for name in dict.fromkeys(name for point in points for name in point.times):
            # An algorithm may exist for some numbers of nodes only.
            known = [(p.nodes, 1e3 * p.times[name]) for p in points if name in p.times]
            axes.loglog(*zip(*known, strict=True), "--", label=name, alpha=0.6)
        nodes, times = zip(*((point.nodes, 1e3 * point.seconds) for point in points), strict=True)
        axes.loglog(nodes, times, "ko-", label="auto, with its comparison")
        axes.legend()


def draw_sizes(title: str, curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """Draw times of calls by size into a file: name -> (bytes, seconds)."""
    with _axes(title, "bytes", "simulated ms", path) as axes:
        for name, points in curves.items():
            axes.loglog(*zip(*((n, 1e3 * s) for n, s in points), strict=True), "o-", label=name)
        axes.legend()


def draw_efficiency(title: str, curve: Sequence[tuple[int, float]], path: Path) -> None:
    """Draw the efficiency of a step into a file: (machines, share)."""
    with _axes(title, "machines", "efficiency, %", path) as axes:
        axes.semilogx(*zip(*((n, 100 * share) for n, share in curve), strict=True), "o-")
        axes.set_ylim(0, 102)


@contextmanager
def _axes(title: str, across: str, up: str, path: Path) -> Iterator[Any]:
    """Save what the block draws, over powers of two."""
    figure = empty(7)
    axes = figure.subplots()
    yield axes
    axes.set_xscale("log", base=2)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    axes.set_title(title)
    save(figure, path)


def empty(width: float, height: float = 4) -> Figure:
    """Return an empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, which keeps global state and looks for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
