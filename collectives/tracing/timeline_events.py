"""Timeline events of a group's operations.

| part | what the rank did |
| --- | --- |
| `wait for peers` | it waited until the others had come, where the ranks meet or compare calls |
| `copy` | it copied its array to where others read it, or theirs from there |
| `reduce` | it combined what the ranks brought |
| `network` | it waited for messages, of its node or of another one |

In shared memory the compiled rounds note the time (`collectives.node.synchronization`), so that a
part has no gap to the next. By messages the waits are noted; what lies between two of them is
combining in a reduction, and copying elsewhere. Parts of less than 1 us are only counted.

Every call has a `key`, equal on all ranks that make it: its first round where all meet in shared
memory, else its number.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.node import control_block
from collectives.node.engine import Engine, Event
from collectives.tracing.call_sites import Site
from collectives.tracing.recorder import Record
from collectives.tracing.timeline import Span, Timeline, Track
from collectives.transport.backoff import PendingMessage

__all__ = ["KINDS", "GroupInfo", "WaitTracer", "CallTracer", "CallListener"]

KINDS = ("wait for peers", "copy", "reduce", "network")
"""Names of the parts."""

WAIT, COPY, REDUCE, NETWORK = range(4)

# Nanoseconds: shorter parts are not shown, and what lies between two waits is what Python takes to
# start messages.
_SHOWN, _BETWEEN = 1_000, 5_000

# How many parts of a call are kept, and shown: beyond, those that are short in it are joined.
_MOST_PARTS, _MOST_SHOWN = 4096, 64

# How many texts are kept, as in `collectives.tracing.peer_status`.
_TEXTS = 1024

# Parts: from when, until when, what, and the rank in the world that it is about, or -1.
Part = tuple[int, int, int, int]

_NOBODY = -1


class CallListener(Protocol):
    """Is told as operations begin and end."""

    def enter(self, record: Record) -> None:
        """Take note that this rank enters an operation."""

    def leave(self, record: Record) -> None:
        """Take note that it has left it."""


class GroupInfo(NamedTuple):
    """Who the ranks of a group are.

    Attributes:
        name: of the group.
        world: of each rank its number in the world.
        leaders: for every rank an integer that is the same exactly for the ranks of one node.
        rank: this one.
        is_on_one_node: whether all are.
    """

    name: str
    world: Sequence[int]
    leaders: Sequence[int]
    rank: int
    is_on_one_node: bool


class CallTracer:
    """Tells a timeline of the operations of one group.

    Args:
        timeline: that is told.
        members: of the group.
        other: is told, too.
        engine: where the ranks of this node meet.
        here: of each rank of that node its number in the world.
    """

    def __init__(
        self,
        timeline: Timeline,
        members: GroupInfo,
        other: CallListener | None,
        engine: Engine | None,
        here: Sequence[int],
    ) -> None:
        self._timeline = timeline
        self._members = members
        self._other = other
        self._engine = engine
        self._here = here
        self._in_memory = engine is not None and members.is_on_one_node
        # Groups of one name that exist at the same time have no rank in common.
        self._name = f"{members.name}:{members.world[0]}"
        self._texts: dict[tuple[object, ...], tuple[str, CodeType]] = {}

    def waits(self) -> WaitTracer:
        """Return what is told of the waits of a call of this thread."""
        return WaitTracer(self._members, self._timeline.track())

    def enter(self, record: Record) -> None:
        """Begin a stretch."""
        if self._other is not None:
            self._other.enter(record)
        track = self._timeline.track()
        if self._engine is not None and track.open:  # so far it is about the call around this one
            self._add_rounds(track.open[-1].parts, self._engine.noted())
        began = round(1e9 * record.began)
        track.begin(record, "call", record.operation, began, self._describe)

    def leave(self, record: Record) -> None:
        """End it."""
        if self._other is not None:
            self._other.leave(record)
        track = self._timeline.track()
        call = track.add_span(record)
        if call is None:  # it began before the timeline
            return
        noted = [] if self._engine is None else self._engine.noted()
        call.facts = record.number, record.fields, record.caller, record.state, noted
        track.end(call, round(1e9 * (record.ended or time.monotonic())))
        if record.state != "done":
            self._timeline.flush()  # the process may be about to end

    def add_cached_call(
        self, name: str, fields: Mapping[str, object], number: int, caller: tuple[CodeType, int]
    ) -> None:
        """Take note of a call that is over, and of which only the rounds know when it was."""
        noted = [] if self._engine is None else self._engine.noted()
        if noted:
            (_, began, *_), (_, ended, *_) = noted[0], noted[-1]
            call = Span(None, "call", name, began, self._describe)
            call.facts = number, fields, caller, "done", noted
            self._timeline.track().end(call, ended)

    def _describe(self, track: Track, call: Span) -> tuple[str, str]:
        """Return what is known of a call, as JSON, and lines about its parts."""
        number, fields, _, state, noted = call.facts
        first_round = self._add_rounds(call.parts, noted)
        key = f"call {number}" if first_round < 0 else f"round {first_round}"
        parts = call.parts or self._guess_parts(call, fields)
        call.began = min(call.began, parts[0][0]) if parts else call.began
        parts = _fill_gaps(parts, "op" in fields)
        totals: dict[int, int] = {}
        for began, ended, kind, _ in parts:
            totals[kind] = totals.get(kind, 0) + ended - began
        spent = "".join(
            [f',"{KINDS[kind]} us":{total / 1000:.3f}' for kind, total in totals.items()]
        )
        error = "" if state == "done" else f',"error":{json.dumps(state)}'
        args = f'{{"key":"{key}","call":{number},{self._text(call)}{spent}{error}}}'
        return args, _lines(track, parts, call.ended - call.began)

    def _add_rounds(self, parts: list[Part], noted: Sequence[Event]) -> int:
        """Add what the compiled rounds have noted; returns the number of the first, -1 for none."""
        first, at, kind, reduces = -1, 0, COPY, False
        for what, began, ended, last in noted:
            if what in (control_block.MOVE, control_block.REDUCE):
                if at and began - at > _BETWEEN and self._in_memory:
                    parts.append((at, began, COPY, _NOBODY))  # from one meeting to the next
                first = ended if first < 0 else first
                at, kind, reduces = began, COPY, what == control_block.REDUCE
                continue
            parts.append((at, began, kind, _NOBODY))
            at = began
            if what != control_block.END:
                parts.append((began, ended, WAIT, self._here[last] if last >= 0 else _NOBODY))
                at, kind = ended, REDUCE if what == control_block.WAIT_FILLED and reduces else COPY
        return first if self._in_memory else -1

    def _guess_parts(self, call: Span, fields: Mapping[str, object]) -> list[Part]:
        """Return of what a call was made of which nothing else is known."""
        if "source" in fields:  # by `recv`, perhaps from any
            source = fields["source"]
            rank = self._members.world[source] if isinstance(source, int) else _NOBODY
            return [(call.began, call.ended, NETWORK, rank)]
        if self._in_memory or "dest" in fields or len(self._members.world) == 1:
            return []
        return [(call.began, call.ended, WAIT, _NOBODY)]

    def _text(self, call: Span) -> str:
        """Return what most calls of a line have in common, as the members of an object in JSON."""
        _, fields, (code, instruction), *_ = call.facts
        # The code by its identity, which is kept alive here: its hash would take 1 us.
        key = call.name, call.algorithm, id(code), instruction, *fields.values()
        try:
            known = self._texts.get(key)
        except TypeError:  # a value that cannot be looked up
            return self._common(call)
        if known is None:
            if len(self._texts) >= _TEXTS:
                self._texts.clear()
            known = self._texts[key] = self._common(call), code
        return known[0]

    def _common(self, call: Span) -> str:
        _, given, caller, *_ = call.facts
        fields: dict[str, Any] = {
            name: value if isinstance(value, int) else str(value) for name, value in given.items()
        }
        if "shape" in given and "dtype" in given:
            fields["bytes"] = math.prod(given["shape"]) * np.dtype(given["dtype"]).itemsize
        if isinstance(given.get("source"), int):
            fields["from"] = self._members.world[given["source"]]
        is_of_two = "source" in fields or "dest" in fields
        if not is_of_two and fields.get("algorithm", "auto") == "auto":
            usual = "node" if self._in_memory else "eager"
            fields["algorithm"] = call.algorithm or usual
        fields["where"] = "near" if self._members.is_on_one_node else "far"
        fields["group"] = self._name
        fields["at"] = str(Site(*caller))
        return json.dumps(fields, separators=(",", ":"))[1:-1]


_NAMES = [json.dumps(kind) for kind in KINDS]


def _lines(track: Track, parts: Sequence[Part], whole: int) -> str:
    """Return lines about the parts of a call that took so many ns."""
    if len(parts) > _MOST_SHOWN:
        parts = list(_join_parts(parts, whole // _MOST_SHOWN))
    return "".join(
        [
            track.line("part", _NAMES[kind], began, ended, _about(rank))
            for began, ended, kind, rank in parts if ended - began >= _SHOWN
        ]
    )  # fmt: skip


def _about(rank: int) -> str:
    return "{}" if rank == _NOBODY else f'{{"rank":{rank}}}'


def _join_parts(parts: Sequence[Part], least: int) -> Iterator[Part]:
    """Join parts that are shorter and follow each other, as what most of their time is spent on."""
    for is_short, run in itertools.groupby(parts, lambda part: part[1] - part[0] < least):
        if not is_short:
            yield from run
            continue
        short = list(run)
        spent = Counter[int]()
        for began, until, kind, _ in short:
            spent[kind] += until - began
        yield short[0][0], short[-1][1], spent.most_common(1)[0][0], _NOBODY


def _fill_gaps(parts: Sequence[Part], reduces: bool) -> list[Part]:
    """Return the parts in order of time, and what lies between two messages."""
    filled: list[Part] = []
    for part in sorted(parts):
        if filled and part[2] == filled[-1][2] == NETWORK and part[0] - filled[-1][1] > _BETWEEN:
            kind = REDUCE if reduces else COPY
            filled.append((filled[-1][1], part[0], kind, _NOBODY))
        filled.append(part)
    return filled


class WaitTracer:
    """Takes note of the waits of one call.

    Args:
        members: of its group.
        track: of the thread that makes it.
    """

    __slots__ = ("_members", "_track")

    def __init__(self, members: GroupInfo, track: Track) -> None:
        self._members = members
        self._track = track

    def waited(self, began: int, messages: Sequence[PendingMessage]) -> None:
        """Note a wait for messages."""
        if messages and self._track.open:
            peers = messages[0].peers
            rank = self._members.world[peers[0]] if peers else _NOBODY
            self._add(began, NETWORK, rank)

    def exchanged(self, began: int) -> None:
        """Note an exchange among all ranks."""
        if len(self._members.world) > 1:
            self._add(began, WAIT, _NOBODY)

    def algorithm_chosen(self, algorithm: str) -> None:
        """Note the algorithm."""
        if self._track.open:
            self._track.open[-1].algorithm = algorithm

    def _add(self, began: int, kind: int, rank: int) -> None:
        if self._track.open:
            parts = self._track.open[-1].parts
            if len(parts) < _MOST_PARTS:
                parts.append((began, time.monotonic_ns(), kind, rank))
