"""Reader of timeline files, with clock alignment.

The files (`collectives.tracing.timeline`) have times of their nodes' clocks, and comparisons with
rank 0's clock (`collectives.operations.timeline_control`). One comparison gives the offset, two
also the relative rate. A killed job has only the first one. Then its last calls are used: no rank
leaves an all-reduce before the last rank has entered, so a clock that shows otherwise is wrong by
the difference.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from collectives.core.errors import some
from collectives.tracing.timeline import FIRST_LINE, LAST_LINE
from collectives.tracing.timeline_events import KINDS

__all__ = [
    "RecordedCall",
    "ClockReading",
    "RankTimeline",
    "Ranks",
    "RecordedSpan",
    "events",
    "limits",
    "read",
    "spans_of",
]

# Calls that no rank leaves before all have entered, for all settings and algorithms.
_FOR_ALL = {
    "allgather", "allreduce", "alltoall", "barrier", "grouped_allreduce", "planned allreduce",
    "stop_timeline",
}  # fmt: skip

# Number of last calls that determine the error of a clock.
_LAST_CALLS = 1000

_NAME = re.compile(r"rank-(\d+)\.json")


class ClockReading(NamedTuple):
    """A comparison of a rank's clock with rank 0's, in ns."""

    at: int
    offset: int
    error: int


class RecordedCall(NamedTuple):
    """A call of one rank; times in us."""

    name: str
    began: float
    ended: float
    at: str


class RankTimeline:
    """Contents of a rank's file.

    Attributes:
        facts: facts about the process.
        clocks: clock comparisons.
        calls: calls of all ranks of a group, by group and key.
        received: received messages: source rank, and the call.
        spans: begin, end and name of the user's spans, in us.
        totals: us by kind of part.
        number_of_calls: number of all calls; the next field is their us.
        first, last: first and last time in the file, in us.
        damaged: number of unreadable lines.
        left_out: number of spans missing in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.clocks: list[ClockReading] = []
        self.calls: dict[tuple[str, str], RecordedCall] = {}
        self.received: list[tuple[int, RecordedCall]] = []
        self.spans: list[tuple[float, float, str]] = []
        self.totals = dict.fromkeys(KINDS, 0.0)
        self.number_of_calls = 0
        self.in_calls = 0.0
        self.first, self.last = float("inf"), float("-inf")
        self.damaged = self.left_out = 0

    def at(self, time: float) -> float:
        """Convert a time of this rank's clock to rank 0's; both in us."""
        first, last = self.clocks[0], self.clocks[-1]
        offset = float(first.offset)
        # Between two comparisons, and beyond, clocks drift at a constant rate.
        if last.at > first.at:
            rate = (last.offset - first.offset) / (last.at - first.at)
            offset += rate * (1000 * time - first.at)
        return time + offset / 1000


Ranks = Mapping[int, RankTimeline]


def events(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the events of a file, complete or not; None for a damaged line."""
    # A killed process may leave a cut character.
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            # Lines of the list itself.
            if text in ("", FIRST_LINE.strip(), LAST_LINE.strip(), "]"):
                continue
            try:
                event = json.loads(text)
            except json.JSONDecodeError:
                event = None
            yield event if isinstance(event, dict) else None


def read(directory: Path) -> tuple[Ranks, list[str]]:
    """Read the ranks' files of the newest job in a directory.

    Returns:
        their contents by rank, and remarks.

    Raises:
        ValueError: the directory has no such files, or they contain no event.
    """
    found = [path for path in directory.glob("rank-*.json") if _NAME.fullmatch(path.name)]
    # A file without facts or clock ended before its timeline had begun.
    ranks = {rank.facts["rank"]: rank for rank in map(_parse, found) if rank.clocks and rank.facts}
    if not ranks:
        raise ValueError(f"timeline: no files rank-N.json of a timeline in {directory}")
    # By date: an earlier job in this directory may have had more ranks.
    newest = max(ranks.values(), key=lambda rank: str(rank.facts["date"])).facts
    older = sorted(number for number, r in ranks.items() if r.facts["job"] != newest["job"])
    ranks = {number: ranks[number] for number in sorted(set(ranks) - set(older))}
    if not any(rank.first <= rank.last for rank in ranks.values()):
        raise ValueError(f"timeline: no event in the files rank-N.json in {directory}")
    remarks = []
    if older:
        remarks.append(f"left out, as of another job: {_ranks(older)}")
    if missing := sorted(set(newest["ranks"]) - set(ranks)):
        remarks.append(f"no files of {_ranks(missing)}")
    if damaged := sorted(number for number, rank in ranks.items() if rank.damaged):
        remarks.append(f"cut short or damaged: {_ranks(damaged)}")
    if left_out := sorted(number for number, rank in ranks.items() if rank.left_out):
        total = sum(rank.left_out for rank in ranks.values())
        remarks.append(f"{total} lines left out by {_ranks(left_out)}, whose disk was slow")
    _correct(ranks)
    return ranks, remarks


def limits(ranks: Ranks) -> tuple[float, float]:
    """Return the first and the last time of all ranks, on rank 0's clock in us."""
    # A rank without events has no times.
    timed = [rank for rank in ranks.values() if rank.first <= rank.last]
    return min(rank.at(rank.first) for rank in timed), max(rank.at(rank.last) for rank in timed)


class RecordedSpan(NamedTuple):
    """A call, a part of one, or a user's span; times in us."""

    kind: str
    name: str
    began: float
    ended: float
    args: Mapping[str, Any]


def spans_of(rank: RankTimeline) -> Iterator[RecordedSpan]:
    """Yield the completed spans of a rank's file."""
    begun: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events(rank.path):
        if event is None or event.get("ph") not in ("B", "E", "X"):
            continue
        whole = event
        if event["ph"] == "B":
            begun[event["tid"]].append(event)
            continue
        ended = event["ts"]
        if event["ph"] == "X":
            ended += event["dur"]
        elif begun[event["tid"]]:
            # An end belongs to the innermost open span of its thread.
            whole = begun[event["tid"]].pop()
        else:
            continue
        # A few names repeat in millions of spans.
        name = sys.intern(whole["name"])
        yield RecordedSpan(whole.get("cat", ""), name, whole["ts"], ended, event["args"])


def _parse(path: Path) -> RankTimeline:
    rank = RankTimeline(path)
    for event in events(path):
        if event is None:
            rank.damaged += 1
        elif event.get("ph") == "M":
            _take_facts(rank, event)
        elif "ts" in event:
            # Also of calls under way at the end, which have only a begin.
            rank.first, rank.last = min(rank.first, event["ts"]), max(rank.last, event["ts"])
    for one in spans_of(rank):
        _take(rank, one)
    return rank


def _take_facts(rank: RankTimeline, event: dict[str, Any]) -> None:
    args = event["args"]
    if event["name"] == "unisono":
        rank.facts = args
    elif event["name"] == "unisono_clock":
        rank.clocks.append(ClockReading(args["at"], args["offset"], args["error"]))
    elif event["name"] == "left_out":
        rank.left_out += args["lines"]


def _take(rank: RankTimeline, one: RecordedSpan) -> None:
    rank.last = max(rank.last, one.ended)
    if one.kind == "span":
        rank.spans.append((one.began, one.ended, one.name))
    if one.kind != "call":
        return
    args = one.args
    rank.number_of_calls += 1
    rank.in_calls += one.ended - one.began
    for kind in KINDS:
        rank.totals[kind] += args.get(f"{kind} us", 0.0)
    call = RecordedCall(one.name, one.began, one.ended, sys.intern(args["at"]))
    if isinstance(args.get("from"), int):
        rank.received.append((args["from"], call))
    elif "dest" not in args and "source" not in args:
        # Only calls of all ranks have a key in common.
        group, key = sys.intern(args["group"]), args["key"]
        while (group, key) in rank.calls:  # from an earlier group with this name
            key += "'"
        rank.calls[group, key] = call


def _correct(ranks: Ranks) -> None:
    """Correct clocks with a single comparison, by calls with the lowest rank of another node."""
    reference = next(iter(ranks.values()))
    wrong: dict[int, float] = defaultdict(float)  # of each node, in us
    late: dict[int, tuple[float, float]] = {}
    for rank in ranks.values():
        # The clock of the reference needs no correction, and two comparisons are enough.
        if rank.facts["node"] == reference.facts["node"] or len(rank.clocks) > 1:
            continue
        both = [key for key, call in rank.calls.items() if call.name in _FOR_ALL]
        both = [key for key in both if key in reference.calls][-_LAST_CALLS:]
        # The ranks of a node share its clock, so each of them narrows the limits.
        least, most = late.get(rank.facts["node"], (float("-inf"), float("inf")))
        for key in both:
            ours, theirs = rank.calls[key], reference.calls[key]
            # Both ranks are inside at some moment, which limits the correction.
            least = max(least, reference.at(theirs.began) - rank.at(ours.ended))
            most = min(most, reference.at(theirs.ended) - rank.at(ours.began))
        late[rank.facts["node"]] = least, most
    for node, (least, most) in late.items():
        # The smallest correction that makes all calls possible.
        wrong[node] = max(least, 0.0) + min(most, 0.0)
    for rank in ranks.values():
        if (us := wrong[rank.facts["node"]]) and rank.first <= rank.last:
            end = round(1000 * rank.last)
            offset, error = rank.clocks[0].offset + round(1000 * us), round(1000 * abs(us))
            # A second reading at the end, because the error grew since the first one.
            rank.clocks.append(ClockReading(max(end, rank.clocks[0].at + 1), offset, error))


def _ranks(numbers: Sequence[int]) -> str:
    return some([f"rank {number}" for number in numbers])
