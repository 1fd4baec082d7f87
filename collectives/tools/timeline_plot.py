"""Plot of a timeline, one row per rank."""

from __future__ import annotations

from pathlib import Path

from collectives.tools import plot
from collectives.tools.timeline_files import Ranks, spans_of
from collectives.tracing.timeline_events import KINDS

__all__ = ["draw"]

_COLORS = dict(zip(KINDS, ("tab:red", "tab:blue", "tab:green", "tab:orange"), strict=True))

# Of a row, from its middle: where spans, calls and their parts are drawn.
_PLACES = {"span": (0.04, 0.32), "call": (-0.36, 0.36), "part": (-0.36, 0.24)}


def draw(ranks: Ranks, path: Path) -> None:
    """Draw all of it into a file; its ending decides about the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.2 + 0.8 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    zero = min(rank.at(rank.first) for rank in ranks.values())
    for row, rank in enumerate(ranks.values()):
        for one in spans_of(rank):
            began, ended = ((rank.at(time) - zero) / 1000 for time in (one.began, one.ended))
            low, height = _PLACES[one.kind]
            color = {"span": "lightblue", "call": "lightgrey"}.get(one.kind) or _COLORS[one.name]
            bar, across = (began, ended - began), (row - low - height, height)
            axes.broken_barh([bar], across, color=color, ec="white", lw=0.3)
            if one.kind == "span":
                place = (began + ended) / 2, row - low - height / 2
                axes.annotate(one.name, place, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(ranks)), [f"rank {number}" for number in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlabel("ms")
    known = {"a span": "lightblue", "a call": "lightgrey", **_COLORS}
    patches = [Patch(color=color, label=name) for name, color in known.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8)
    plot.save(figure, path)
