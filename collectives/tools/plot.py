"""The plot of a benchmark: time and bandwidth over size, ours and the peers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["draw", "is_possible"]


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
