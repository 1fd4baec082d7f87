"""Timeline events of a group's operations.

| part | activity of the rank |
| --- | --- |
| `wait for peers` | waiting for other ranks, in the engine or during the comparison of calls |
| `copy` | copying its array to shared memory, or other ranks' arrays from it |
| `reduce` | combining the ranks' contributions |
| `network` | waiting for messages, from its node or another node |

In shared memory the compiled rounds record times (`collectives.node.synchronization`) without gaps
between parts. By messages only the waits are recorded; the time between two waits counts as
combining in a reduction, and as copying otherwise. Parts below 1 us are only counted.

Every call has a `key` that is equal on all its ranks: the number of its first round if all ranks
share an engine, else its call number.
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

# Nanoseconds: shorter parts are not shown; shorter gaps between two waits are the time that Python
# needs to start messages.
_SHOWN, _BETWEEN = 1_000, 5_000

# Most recorded parts of a call, and most shown parts; beyond, short parts are joined.
_MOST_PARTS, _MOST_SHOWN = 4096, 64

# Most cached texts, as in `collectives.tracing.peer_status`.
_TEXTS = 1024

# Parts: start, end, kind, and the world rank that the part concerns, or -1.
Part = tuple[int, int, int, int]

_NOBODY = -1


class CallListener(Protocol):
    """Interface of objects that are notified of the start and end of operations."""

    def enter(self, record: Record) -> None:
        """Record that this rank enters an operation."""

    def leave(self, record: Record) -> None:
        """Record that this rank has left an operation."""


class GroupInfo(NamedTuple):
    """Ranks of a group.

    Attributes:
        name: name of the group.
        world: number of each rank in the world.
        leaders: one integer per rank, equal exactly for the ranks of one node.
        rank: number of this rank.
        is_on_one_node: whether all ranks are on one node.
    """

    name: str
    world: Sequence[int]
    leaders: Sequence[int]
    rank: int
    is_on_one_node: bool


class CallTracer:
    """Writes the operations of one group to a timeline.

    Args:
        timeline: the timeline.
        members: ranks of the group.
        other: another listener to notify, or None.
        engine: node engine of this rank's node, or None.
        here: world numbers of the ranks of this node.
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
        # Groups with equal names that exist at the same time have no common rank.
        self._name = f"{members.name}:{members.world[0]}"
        self._texts: dict[tuple[object, ...], tuple[str, CodeType]] = {}

    def waits(self) -> WaitTracer:
        """Return the tracer of the waits of a call of this thread."""
        return WaitTracer(self._members, self._timeline.track())

    def enter(self, record: Record) -> None:
        """Start a span."""
        if self._other is not None:
            self._other.enter(record)
        track = self._timeline.track()
        # Rounds that were noted until now happened before this call.
        if self._engine is not None and track.open:  # rounds so far belong to the enclosing call
            self._add_rounds(track.open[-1].parts, self._engine.noted())
        began = round(1e9 * record.began)
        track.begin(record, "call", record.operation, began, self._describe)

    def leave(self, record: Record) -> None:
        """End the span of an operation."""
        if self._other is not None:
            self._other.leave(record)
        track = self._timeline.track()
        call = track.add_span(record)
        if call is None:  # it started before the timeline
            return
        # The events of all rounds of this call; they are formatted later.
        noted = [] if self._engine is None else self._engine.noted()
        call.facts = record.number, record.fields, record.caller, record.state, noted
        track.end(call, round(1e9 * (record.ended or time.monotonic())))
        # Written now, because after a failure the program may be killed.
        if record.state != "done":
            self._timeline.flush()  # the process may end soon

    def add_cached_call(
        self, name: str, fields: Mapping[str, object], number: int, caller: tuple[CodeType, int]
    ) -> None:
        """Add a completed call whose times only the compiled rounds have recorded."""
        noted = [] if self._engine is None else self._engine.noted()
        # Without events the call was not traced from its start.
        if noted:
            # The first event begins the call, the last one ends it.
            (_, began, *_), (_, ended, *_) = noted[0], noted[-1]
            call = Span(None, "call", name, began, self._describe)
            call.facts = number, fields, caller, "done", noted
            self._timeline.track().end(call, ended)

    def _describe(self, track: Track, call: Span) -> tuple[str, str]:
        """Return the facts of a call as JSON, and the lines of its parts."""
        number, fields, _, state, noted = call.facts
        first_round = self._add_rounds(call.parts, noted)
        # Equal on all ranks: the first round, or the call number if calls use messages.
        key = f"call {number}" if first_round < 0 else f"round {first_round}"
        parts = call.parts or self._guess_parts(call, fields)
        # A plan records its call only after the kernel has begun to wait.
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
        """Add the times of the compiled rounds; return the number of the first round, or -1."""
        first, at, kind, reduces = -1, 0, COPY, False
        for what, began, ended, last in noted:
            if what in (control_block.MOVE, control_block.REDUCE):
                # With several nodes, the time between two rounds belongs to the network.
                if at and began - at > _BETWEEN and self._in_memory:
                    parts.append((at, began, COPY, _NOBODY))  # between two rounds
                # The number of the first round is in `ended` of MOVE and REDUCE.
                first = ended if first < 0 else first
                at, kind, reduces = began, COPY, what == control_block.REDUCE
                continue
            parts.append((at, began, kind, _NOBODY))
            at = began
            if what != control_block.END:
                parts.append((began, ended, WAIT, self._here[last] if last >= 0 else _NOBODY))
                # After a wait for `filled` slots the rank combines them.
                at, kind = ended, REDUCE if what == control_block.WAIT_FILLED and reduces else COPY
        # Each node counts rounds of its own.
        return first if self._in_memory else -1

    def _guess_parts(self, call: Span, fields: Mapping[str, object]) -> list[Part]:
        """Return one part for a call without recorded parts, if its kind is known."""
        if "source" in fields:  # a `recv`, perhaps from any rank
            source = fields["source"]
            rank = self._members.world[source] if isinstance(source, int) else _NOBODY
            # Point-to-point calls have no recorded parts: the whole call is the wait.
            return [(call.began, call.ended, NETWORK, rank)]
        if self._in_memory or "dest" in fields or len(self._members.world) == 1:
            return []
        # By messages without recorded waits: an exchange in compiled code.
        return [(call.began, call.ended, WAIT, _NOBODY)]

    def _text(self, call: Span) -> str:
        """Return the facts that most calls of a line share, as the members of a JSON object."""
        _, fields, (code, instruction), *_ = call.facts
        # Key by identity, because hashing a code object takes 1 us; the cache keeps the code alive.
        key = call.name, call.algorithm, id(code), instruction, *fields.values()
        try:
            known = self._texts.get(key)
        except TypeError:  # an unhashable value
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
        # The chosen algorithm replaces "auto".
        if not is_of_two and fields.get("algorithm", "auto") == "auto":
            usual = "node" if self._in_memory else "eager"
            fields["algorithm"] = call.algorithm or usual
        fields["where"] = "near" if self._members.is_on_one_node else "far"
        fields["group"] = self._name
        fields["at"] = str(Site(*caller))
        return json.dumps(fields, separators=(",", ":"))[1:-1]


_NAMES = [json.dumps(kind) for kind in KINDS]


def _lines(track: Track, parts: Sequence[Part], whole: int) -> str:
    """Return lines about the parts of a call that took `whole` ns."""
    # Long calls have thousands of waits, which no viewer shows.
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
    """Join adjacent parts shorter than `least`, with the kind that takes most of their time."""
    # Runs of short parts become one part each.
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
    """Return the parts sorted by time, with the gaps between two messages filled."""
    filled: list[Part] = []
    # Sorted, because waits of messages and rounds are noted separately.
    for part in sorted(parts):
        # A gap between two waits for messages is work on the data.
        if filled and part[2] == filled[-1][2] == NETWORK and part[0] - filled[-1][1] > _BETWEEN:
            kind = REDUCE if reduces else COPY
            filled.append((filled[-1][1], part[0], kind, _NOBODY))
        filled.append(part)
    return filled


class WaitTracer:
    """Records the waits of one call.

    Args:
        members: ranks of the group.
        track: track of the calling thread.
    """

    __slots__ = ("_members", "_track")

    def __init__(self, members: GroupInfo, track: Track) -> None:
        self._members = members
        self._track = track

    def waited(self, began: int, messages: Sequence[PendingMessage]) -> None:
        """Record a wait for messages."""
        # Only inside a call: a wait without a span belongs to no call.
        if messages and self._track.open:
            # A part shows one rank, the first of the wait.
            peers = messages[0].peers
            rank = self._members.world[peers[0]] if peers else _NOBODY
            self._add(began, NETWORK, rank)

    def exchanged(self, began: int) -> None:
        """Record an exchange among all ranks."""
        # A group of one rank waits for none.
        if len(self._members.world) > 1:
            self._add(began, WAIT, _NOBODY)

    def algorithm_chosen(self, algorithm: str) -> None:
        """Record the algorithm."""
        if self._track.open:
            self._track.open[-1].algorithm = algorithm

    def _add(self, began: int, kind: int, rank: int) -> None:
        if self._track.open:
            parts = self._track.open[-1].parts
            # Bounded, because an operation of thousands of slices would fill the memory.
            if len(parts) < _MOST_PARTS:
                parts.append((began, time.monotonic_ns(), kind, rank))
