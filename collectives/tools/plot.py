"""Pictures: of a benchmark, ours and the peers'; of what a call should take on more nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collectives.tools.explain import Point

__all__ = ["draw", "draw_curve", "draw_efficiency", "draw_sizes", "is_possible"]


def is_possible() -> bool:
    """Tell whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(
    title: str,
    rows: Sequence[dict[str, Any]],
    names: Mapping[str, str],
    bus_factor: float,
    path: Path,
) -> None:
    """Draw the rows of `bench.measure` into a file; its ending decides about the format.

    Args:
        title: above the picture.
        rows: at least one.
        names: of the peers, for people.
        bus_factor: busbw / algbw.
        path: of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
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
    figure.savefig(path)


def draw_curve(title: str, points: Sequence[Point], path: Path) -> None:
    """Draw a curve into a file, all algorithms beside what "auto" takes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in dict.fromkeys(name for point in points for name in point.times):
        known = [(point.nodes, 1e3 * point.times[name]) for point in points if name in point.times]
        axes.loglog(*zip(*known, strict=True), "--", label=name, alpha=0.6)
    nodes, times = zip(*((point.nodes, 1e3 * point.seconds) for point in points), strict=True)
    axes.loglog(nodes, times, "ko-", label="auto, with its comparison")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("nodes")
    axes.set_ylabel("estimated ms")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title)
    figure.savefig(path)


def draw_sizes(title: str, curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """Draw what calls of several sizes take into a file: name -> bytes and seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in curves.items():
        axes.loglog(*zip(*((n, 1e3 * s) for n, s in points), strict=True), "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes")
    axes.set_ylabel("simulated ms")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title)
    figure.savefig(path)


def draw_efficiency(title: str, curve: Sequence[tuple[int, float]], path: Path) -> None:
    """Draw the efficiency of a step into a file: machines and share."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.semilogx(*zip(*((n, 100 * share) for n, share in curve), strict=True), "o-", base=2)
    axes.set_xlabel("machines")
    axes.set_ylabel("efficiency, %")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.set_title(title)
    figure.savefig(path)
