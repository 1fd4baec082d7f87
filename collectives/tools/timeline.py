"""`python -m collectives timeline`: merges the ranks' timelines and reports who waited.

The last rank to enter a call keeps the other ranks of the call waiting, each from its own entry on.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collectives.core.errors import counted
from collectives.tools import plot
from collectives.tools.timeline_files import (
    Ranks,
    RankTimeline,
    RecordedCall,
    events,
    limits,
    read,
    spans_of,
)
from collectives.tracing.timeline import FIRST_LINE, LAST_LINE
from collectives.tracing.timeline_events import KINDS

__all__ = ["Late", "draw", "facts", "late_ranks", "merge", "report", "run"]

MERGED = "timeline.json"

# Most ranks that are printed, and most waiting ranks for each.
_LINES, _NAMES = 8, 6

# Colors of the picture: parts of a call, and the bars below.
_COLORS = dict(zip(KINDS, ("tab:red", "tab:blue", "tab:green", "tab:orange"), strict=True))
_BACKGROUNDS = {"span": "lightblue", "call": "lightgrey"}

# First and last height of a bar in the picture, from the middle of its rank's row.
_HEIGHTS = {"span": (0.04, 0.32), "call": (-0.36, 0.36), "part": (-0.36, 0.24)}


def merge(ranks: Ranks, path: Path) -> None:
    """Write the spans of all ranks into one file, on rank 0's clock, starting at 0."""
    zero, _ = limits(ranks)
    with path.open("w", encoding="utf-8") as out:
        out.write(FIRST_LINE)
        for rank in ranks.values():
            for event in events(rank.path):
                # Damaged; `read` has counted these lines.
                if event is None:
                    continue
                # Metadata has no time.
                if "ts" in event:
                    begins = rank.at(event["ts"])
                    # Clocks differ in rate, so durations change as well.
                    if "dur" in event:
                        ends = rank.at(event["ts"] + event["dur"])
                        event["dur"] = round(ends - begins, 3)
                    event["ts"] = round(begins - zero, 3)
                out.write(json.dumps(event, separators=(",", ":")) + ",\n")
        out.write(LAST_LINE)


class Late:
    """Waits that a late rank caused.

    Attributes:
        rank: the late rank.
        waited: seconds by waiting rank.
        calls: number of calls.
        longest: seconds of the longest wait, its call, and the late rank's span at that time.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.waited: dict[int, float] = defaultdict(float)
        self.calls = 0
        self.longest: tuple[float, RecordedCall, str] = 0.0, RecordedCall("", 0.0, 0.0, ""), ""

    @property
    def total(self) -> float:
        """Total seconds of all waiting ranks."""
        return sum(self.waited.values())


def late_ranks(ranks: Ranks) -> list[Late]:
    """Return the late ranks, in the order of the waits they caused, longest first."""
    late = {number: Late(number) for number in ranks}
    together: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, rank in ranks.items():
        for key in rank.calls:
            together[key].append(number)
    # Calls with one key are one call of all its ranks.
    for key, members in together.items():
        calls = {number: ranks[number].calls[key] for number in members}
        began = {number: ranks[number].at(call.began) for number, call in calls.items()}
        # The other ranks wait for the last one to enter.
        last = max(members, key=lambda number: began[number])
        waits = {
            # A rank whose call ended before has waited only until then.
            number: min(began[last], ranks[number].at(calls[number].ended)) - began[number]
            for number in members if number != last
        }  # fmt: skip
        _add(late[last], calls[last], waits)
        # Looked up only for the longest wait, because a rank may have many spans.
        if late[last].longest[1] is calls[last]:
            us = max(waits.values())
            span = _span(ranks[last], calls[last].began - us, calls[last].began)
            late[last].longest = us / 1e6, calls[last], span
    for number, rank in ranks.items():
        # A receive from a known rank waits for its sender.
        for source, call in rank.received:
            # The file of a sender may be missing.
            if source in late:
                _add(late[source], call, {number: call.ended - call.began})
    return sorted(late.values(), key=lambda one: -one.total)


def _add(late: Late, call: RecordedCall, waits: Mapping[int, float]) -> None:
    # No other rank waits for a call of one rank.
    late.calls += bool(waits)
    for number, us in waits.items():
        late.waited[number] += us / 1e6
        if us / 1e6 > late.longest[0]:
            late.longest = us / 1e6, call, ""


def _span(rank: RankTimeline, began: float, ended: float) -> str:
    """Return the shortest user span that covers at least half of a time, or ""."""
    fitting = [
        (until - since, name)
        for since, until, name in rank.spans
        if min(until, ended) - max(since, began) > (ended - began) / 2
    ]
    return min(fitting)[1] if fitting else ""


def _extent(ranks: Ranks) -> tuple[int, float, float]:
    """Return the number of nodes, the time of all ranks, and the error of clocks, in seconds."""
    nodes = len({rank.facts["node"] for rank in ranks.values()})
    begin, end = limits(ranks)
    error = max(clock.error for rank in ranks.values() for clock in rank.clocks)
    return nodes, (end - begin) / 1e6, error / 1e9


def facts(ranks: Ranks) -> dict[str, Any]:
    """Return the content of `report`, with all ranks, for JSON; times in seconds."""
    nodes, whole, error = _extent(ranks)
    late = [one for one in late_ranks(ranks) if one.total > 0]
    return {
        "nodes": nodes,
        "seconds": whole,
        "clock_error": error,
        "ranks": {
            number: {
                "calls": rank.number_of_calls,
                "in_calls": rank.in_calls / 1e6,
                "parts": {kind: rank.totals[kind] / 1e6 for kind in KINDS},
            }
            for number, rank in ranks.items()
        },
        "late": [
            {"rank": one.rank, "waited": one.waited, "calls": one.calls, "longest": _longest(one)}
            for one in late
        ],
    }


def _longest(late: Late) -> dict[str, Any]:
    seconds, call, span = late.longest
    return {"seconds": seconds, "call": call.name, "at": call.at, "span": span or None}


def report(ranks: Ranks) -> str:
    """Report how each rank spent its time, and which ranks waited for which."""
    nodes, whole, error = _extent(ranks)
    size = f"{counted(len(ranks), 'rank')} on {counted(nodes, 'node')}"
    fit = f", whose clocks fit to {1e3 * error:.3f} ms" if nodes > 1 else ""
    lines = [f"{size}{fit}, {whole:.3f} s"]
    head = "".join(f"{kind:>16}" for kind in KINDS)
    lines.append(f"{'seconds':<10}{'calls':>9}{'in calls':>12}{head}")
    for number, rank in ranks.items():
        parts = "".join(f"{rank.totals[kind] / 1e6:16.3f}" for kind in KINDS)
        name = f"rank {number}"
        lines.append(f"{name:<10}{rank.number_of_calls:>9}{rank.in_calls / 1e6:12.3f}{parts}")
    late = [one for one in late_ranks(ranks) if one.total > 0]
    lines.append("who waited for whom" if late else "no rank waited for another")
    for one in late[:_LINES]:
        waited = sorted(one.waited.items(), key=lambda item: -item[1])
        names = [f"rank {number} {seconds:.3f} s" for number, seconds in waited[:_NAMES]]
        more = f", {len(waited) - _NAMES} more" if len(waited) > _NAMES else ""
        lines.append(
            f"for rank {one.rank}: {one.total:.3f} s in {counted(one.calls, 'call')}: "
            f"{', '.join(names)}{more}"
        )
        seconds, call, span = one.longest
        doing = f", while it was in {span!r}" if span else ""
        lines.append(f"    longest {seconds:.3f} s, for {call.name} at {call.at}{doing}")
    return "\n".join(lines)


def draw(ranks: Ranks, path: Path) -> None:
    """Draw a row per rank, with its spans and calls; the suffix of `path` is the format."""
    from matplotlib.patches import Patch

    figure = plot.empty(11, 1.2 + 0.8 * len(ranks))
    axes = figure.subplots()
    zero, _ = limits(ranks)
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
    # Rank 0 on top.
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlabel("ms")
    legend = {**{f"a {kind}": color for kind, color in _BACKGROUNDS.items()}, **_COLORS}
    patches = [Patch(color=color, label=name) for name, color in legend.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8)
    plot.save(figure, path)


def run(directory: Path, out: Path | None, picture: Path | None, as_json: bool = False) -> int:
    """Merge, print the report or its facts as JSON, and draw it; return the exit status."""
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
    if as_json:
        print(json.dumps({**facts(ranks), "remarks": remarks, "file": str(merged)}, indent=2))
    else:
        print("\n".join([report(ranks), *remarks]))
    if picture is not None:
        draw(ranks, picture)
    if not as_json:
        print(f"all of it, for https://ui.perfetto.dev: {merged}")
    return 0
