"""Last operation of the other ranks of a node, for timeouts that name the missing rank.

A missing rank is busy elsewhere and cannot answer. So each rank writes a note to node-shared memory
when it enters or leaves an operation: operation, line of the program, and time
(`collectives.node.control_block.STATUS_ENTRY`). A rank that has waited too long reads the notes of
the ranks that it waits for. All processes of a node use one clock.

Cost: about 0.3 us per operation, 128 bytes per rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple

from collectives.arrays.host_arrays import Array, address
from collectives.core import compile_time
from collectives.core.errors import some
from collectives.node.control_block import STATUS_ENTRY
from collectives.tracing.call_sites import Site
from collectives.tracing.recorder import Record

__all__ = ["StatusBoard"]

_TEXT_BYTES = STATUS_ENTRY["text"].itemsize

# Most cached texts; a notebook creates new lines of code without end.
_TEXTS = 1024


class StatusBoard:
    """Notes of the ranks of one group on one node.

    Args:
        entries: shape (size,), dtype `STATUS_ENTRY`, initially zero, shared by all ranks.
        rank: number of this rank on the node.
        names: names of the ranks in warnings.
    """

    # `collectives.calls.fast_path` also writes these two.
    __slots__ = ("__dict__", "__weakref__", "caller", "operation")

    operation: str
    caller: tuple[CodeType, int] | None

    def __init__(self, entries: Array, rank: int, names: Sequence[str]) -> None:
        self._entries = entries
        self._rank = rank
        self._names = names
        self._size = len(entries)
        own = entries[rank : rank + 1]
        # Memoryviews, because they store numbers faster than arrays do.
        self._number, self._length = own["number"].data, own["length"].data
        self._time: Any = own["time"].data
        self._compiles: Any = own["compiles"].data
        self._text = own["text"]
        # Operation and line of the text in the own note, and a cache of all texts.
        self.operation = ""
        self.caller = None
        self._texts: dict[tuple[str, int, int], tuple[bytes, CodeType]] = {}
        compile_time.keep_noted(self)

    def enter(self, record: Record) -> None:
        """Record that this rank enters an operation."""
        if record.caller is not self.caller or record.operation != self.operation:
            self.write_text(record)
        # After the text: a reader that sees the new number finds the operation that belongs to it.
        self._number[0] = record.number
        self._time[0] = record.began

    def write_text(self, record: Record) -> None:
        """Write operation and call site to the own note."""
        text = self.text_of(record.operation, record.caller)
        self._length[0] = len(text)
        self._text[0] = text
        self.operation, self.caller = record.operation, record.caller

    def text_of(self, operation: str, caller: tuple[CodeType, int]) -> bytes:
        """Return operation and call site as the own note has them."""
        code, instruction = caller
        # Key by identity, because hashing a code object takes 1 us; the cache keeps the code alive.
        key = (operation, id(code), instruction)
        known = self._texts.get(key)
        if known is None:
            if len(self._texts) >= _TEXTS:
                self._texts.clear()
            text = f"{operation} at {Site(code, instruction)}".encode()[:_TEXT_BYTES]
            known = self._texts[key] = text, code
        return known[0]

    def in_memory(self) -> tuple[int, int]:
        """Return the addresses of length and text of the own note, for `calls.fast_path`."""
        own = address(self._entries) + self._rank * STATUS_ENTRY.itemsize
        fields: Any = STATUS_ENTRY.fields
        return own + fields["length"][1], own + fields["text"][1]

    def leave(self, record: Record) -> None:
        """Record that this rank has left an operation."""
        # Negative after the end; the text stays, so that errors name the last call.
        self._number[0] = -record.number
        self._time[0] = record.ended or 0.0

    def note_preparation(self, since: float) -> None:
        """Record the time at which this rank began to compile; 0.0 once it has compiled."""
        self._compiles[0] = since

    def missing(self) -> str:
        """Describe the ranks that have not entered this rank's current operation.

        Example: "rank 3 left barrier #11 at train.py:80 61 s ago". Also names ranks that compile
        inside the operation. Empty if all ranks have entered it and no other rank compiles.
        """
        # The number that this rank is in, or has left.
        current = abs(self._note(self._rank).number)
        notes = [(rank, self._note(rank)) for rank in range(self._size)]
        late = [
            # Behind this rank, or in the same call and compiling.
            (rank, note)
            for rank, note in notes
            if abs(note.number) < current
            or (note.number == current and note.compiles and rank != self._rank)
        ]
        return some([_describe(self._names[rank], note) for rank, note in late])

    def last(self, rank: int) -> str:
        """Describe the last operation of a rank: "after allreduce #2 at train.py:5"."""
        note = self._note(rank)
        if note.number == 0:
            return "before its first call"
        return f"{'in' if note.number > 0 else 'after'} {note}"

    def _note(self, rank: int) -> _Entry:
        # The other rank may be writing. A note is short, so the result is old, new or, at worst,
        # the name of one operation with the number of the next.
        # `item` copies the entry at once.
        number, since, compiles, length, text = self._entries[rank].item()
        return _Entry(number, since, compiles, text[:length].decode(errors="replace"))


class _Entry(NamedTuple):
    number: int
    since: float
    compiles: float
    text: str

    def __str__(self) -> str:
        operation, _, site = self.text.partition(" at ")
        return f"{operation} #{abs(self.number)} at {site}"


def _describe(name: str, note: _Entry) -> str:
    if note.compiles:
        return f"{name} has compiled loops for {time.monotonic() - note.compiles:.0f} s"
    if note.number == 0:
        return f"{name} has called nothing yet"
    # The clocks of one node agree, but the other rank may write between both reads.
    ago = max(0.0, time.monotonic() - note.since)
    if note.number < 0:
        return f"{name} left {note} {ago:.0f} s ago"
    return f"{name} has been in {note} for {ago:.0f} s"
