"""`python -m collectives timeline`: merges the ranks' timelines and reports who waited.

Of the ranks that make a call, the last to enter it keeps the others waiting, each from when it has
entered itself.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from collectives.tools import plot
from collectives.tools.timeline_files import (
    Ranks,
    RankTimeline,
    RecordedCall,
    events,
    read,
    spans_of,
)
from collectives.tracing.timeline import FIRST_LINE, LAST_LINE
from collectives.tracing.timeline_events import KINDS

__all__ = ["Late", "draw", "late_ranks", "merge", "report", "run"]

MERGED = "timeline.json"

# How many ranks, and ranks that wait for one, are printed.
_LINES, _NAMES = 8, 6

# In the picture: colors of what a call spends its time on, and of the bars below.
_COLORS = dict(zip(KINDS, ("tab:red", "tab:blue", "tab:green", "tab:orange"), strict=True))
_BACKGROUNDS = {"span": "lightblue", "call": "lightgrey"}

# In the picture: first and last height of a bar, from the middle of its rank's row.
_HEIGHTS = {"span": (0.04, 0.32), "call": (-0.36, 0.36), "part": (-0.36, 0.24)}


def merge(ranks: Ranks, path: Path) -> None:
    """Write the stretches of all ranks into one file, by rank 0's clock, from 0 on."""
    zero = min(rank.at(rank.first) for rank in ranks.values() if rank.first <= rank.last)
    with path.open("w", encoding="utf-8") as out:
        out.write(FIRST_LINE)
        for rank in ranks.values():
            for event in events(rank.path):
                if event is None:
                    continue
                if "ts" in event:
                    begins = rank.at(event["ts"])
                    if "dur" in event:
                        ends = rank.at(event["ts"] + event["dur"])
                        event["dur"] = round(ends - begins, 3)
                    event["ts"] = round(begins - zero, 3)
                out.write(json.dumps(event, separators=(",", ":")) + ",\n")
        out.write(LAST_LINE)


class Late:
    """How a rank kept others waiting.

    Attributes:
        rank: this one.
        waited: seconds of each of the others.
        calls: in how many calls.
        longest: seconds of the longest wait, for which call, and in which span it was meanwhile.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.waited: dict[int, float] = defaultdict(float)
        self.calls = 0
        self.longest: tuple[float, RecordedCall, str] = 0.0, RecordedCall("", 0.0, 0.0, ""), ""

    @property
    def total(self) -> float:
        """Seconds of all others."""
        return sum(self.waited.values())


def late_ranks(ranks: Ranks) -> list[Late]:
    """Return which ranks kept others waiting, whom the others waited longest for first."""
    late = {number: Late(number) for number in ranks}
    together: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, rank in ranks.items():
        for key in rank.calls:
            together[key].append(number)
    for key, members in together.items():
        calls = {number: ranks[number].calls[key] for number in members}
        began = {number: ranks[number].at(call.began) for number, call in calls.items()}
        last = max(members, key=lambda number: began[number])
        waits = {
            number: min(began[last], ranks[number].at(calls[number].ended)) - began[number]
            for number in members if number != last
        }  # fmt: skip
        _add(late[last], calls[last], waits)
        if late[last].longest[1] is calls[last]:
            us = max(waits.values())
            span = _span(ranks[last], calls[last].began - us, calls[last].began)
            late[last].longest = us / 1e6, calls[last], span
    for number, rank in ranks.items():
        for source, call in rank.received:
            if source in late:
                _add(late[source], call, {number: call.ended - call.began})
    return sorted(late.values(), key=lambda one: -one.total)


def _add(late: Late, call: RecordedCall, waits: Mapping[int, float]) -> None:
    late.calls += bool(waits)
    for number, us in waits.items():
        late.waited[number] += us / 1e6
        if us / 1e6 > late.longest[0]:
            late.longest = us / 1e6, call, ""


def _span(rank: RankTimeline, began: float, ended: float) -> str:
    """Return in which of the user's spans a rank was for at least half of a time, the shortest."""
    fitting = [
        (until - since, name)
        for since, until, name in rank.spans
        if min(until, ended) - max(since, began) > (ended - began) / 2
    ]
    return min(fitting)[1] if fitting else ""


def report(ranks: Ranks) -> str:
    """Say what each rank spent its time on, and who waited for whom."""
    nodes = len({rank.facts["node"] for rank in ranks.values()})
    begin = min(rank.at(rank.first) for rank in ranks.values())
    whole = max(rank.at(rank.last) for rank in ranks.values()) - begin
    error = max(clock.error for rank in ranks.values() for clock in rank.clocks)
    size = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {nodes} node{'s' * (nodes > 1)}"
    fit = f", whose clocks fit to {error / 1e6:.3f} ms" if nodes > 1 else ""
    lines = [f"{size}{fit}, {whole / 1e6:.3f} s"]
    head = "".join(f"{kind:>16}" for kind in KINDS)
    lines.append(f"{'seconds':<10}{'calls':>9}{'in calls':>12}{head}")
    for number, rank in ranks.items():
        parts = "".join(f"{rank.totals[kind] / 1e6:16.3f}" for kind in KINDS)
        name = f"rank {number}"
        lines.append(f"{name:<10}{rank.number_of_calls:>9}{rank.in_calls / 1e6:12.3f}{parts}")
    late = [one for one in late_ranks(ranks) if one.total > 0]
    lines.append("who waited for whom" if late else "nobody waited for anybody")
    for one in late[:_LINES]:
        waited = sorted(one.waited.items(), key=lambda item: -item[1])
        names = [f"rank {number} {seconds:.3f} s" for number, seconds in waited[:_NAMES]]
        more = f", {len(waited) - _NAMES} more" if len(waited) > _NAMES else ""
        lines.append(
            f"for rank {one.rank}: {one.total:.3f} s in {one.calls} calls: {', '.join(names)}{more}"
        )
        seconds, call, span = one.longest
        doing = f", while it was in {span!r}" if span else ""
        lines.append(f"    longest {seconds:.3f} s, for {call.name} at {call.at}{doing}")
    return "\n".join(lines)


def draw(ranks: Ranks, path: Path) -> None:
    """Draw a row for each rank, with its spans and calls; the suffix of `path` is the format."""
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
            low, height = _HEIGHTS[one.kind]
            color = _BACKGROUNDS.get(one.kind) or _COLORS[one.name]
            bar, across = (began, ended - began), (row - low - height, height)
            axes.broken_barh([bar], across, color=color, ec="white", lw=0.3)
            if one.kind == "span":
                middle = (began + ended) / 2, row - low - height / 2
                axes.annotate(one.name, middle, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(ranks)), [f"rank {number}" for number in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlabel("ms")
    legend = {**{f"a {kind}": color for kind, color in _BACKGROUNDS.items()}, **_COLORS}
    patches = [Patch(color=color, label=name) for name, color in legend.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8)
    plot.save(figure, path)


def run(directory: Path, out: Path | None, picture: Path | None) -> int:
    """Merge, print the report, and draw it; returns the exit status."""
    if picture is not None and not plot.is_possible():
        print("timeline: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    try:
        ranks, remarks = read(directory)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    merged = directory / MERGED if out is None else out
    merge(ranks, merged)
    print(report(ranks))
    for remark in remarks:
        print(remark)
    if picture is not None:
        draw(ranks, picture)
    print(f"all of it, for https://ui.perfetto.dev: {merged}")
    return 0
