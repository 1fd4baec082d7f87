"""Record splitting: quoted fields may contain line ends.

::

    1  a,"the cat          a quoted field is open at the end of line 1 ...
    2  sat",7              ... and closed in line 2: one record with the number 1
    3  b,"lost,8           open, but no line closes it: a malformed record of its own
    4  c,"mat",9           the quote before `mat` cannot end a field, so line 3 is not joined
"""

from __future__ import annotations

from enum import Enum

__all__ = ["RecordJoiner"]


class _QuoteState(Enum):
    """State of the record at the end of a line."""

    CLOSED = "no quoted field is open"
    OPEN = "a quoted field is open"
    MALFORMED = "a closing quote is followed by something other than a delimiter"


class RecordJoiner:
    """Joins the lines of a file into records.

    Args:
        delimiter: the character between fields.
        limit: maximum length of a joined record in characters; the lines of a longer record are
            returned as single records.
    """

    def __init__(self, delimiter: str, limit: int) -> None:
        self._delimiter = delimiter
        self._limit = limit
        self._pending: list[tuple[int, str]] = []  # numbers and lines of the open record
        self._length = 0

    @property
    def is_open(self) -> bool:
        """Whether the next line continues a record."""
        return bool(self._pending)

    def add(self, number: int, line: str | None) -> list[tuple[int, str]]:
        """Add the next line, or None for a damaged one.

        Returns:
            The records that are now complete: number of the first line, and text.
        """
        # A damaged line inside a quoted field: the text around it cannot be one record.
        if line is None:
            return self.flush()
        was_open = self.is_open
        state = _QuoteState.CLOSED
        # Most lines have no quote, and need no scan.
        if was_open or '"' in line:
            state = _state_after(line, self._delimiter, was_open)
        is_too_long = self._length + len(line) > self._limit
        if was_open and (state is _QuoteState.MALFORMED or is_too_long):
            # No line closed the open record, so its lines are returned as single records.
            return self.flush() + self.add(number, line)
        self._pending.append((number, line))
        # The line end counts, as it becomes part of the record.
        self._length += len(line) + 1
        if state is _QuoteState.OPEN:
            return []
        lines = self.flush()
        return [(lines[0][0], "\n".join(line for _, line in lines))]

    def flush(self) -> list[tuple[int, str]]:
        """Return the lines of the open record as single records, and drop it."""
        lines = self._pending
        self._pending, self._length = [], 0
        return lines


def _state_after(line: str, delimiter: str, is_open: bool) -> _QuoteState:
    """Return the state at the end of a line. `is_open`: a quoted field is open at its start."""
    at = 0
    while True:
        if not is_open and line.startswith('"', at):
            is_open, at = True, at + 1
        if is_open:
            quote = line.find('"', at)
            if quote < 0:
                return _QuoteState.OPEN
            after = line[quote + 1 : quote + 2]
            # Past the quote and the character after it.
            at = quote + 2
            if after == '"':  # an escaped quote
                continue
            if after not in ("", delimiter):
                return _QuoteState.MALFORMED
            is_open = False
        else:
            # 0 without a further delimiter.
            at = line.find(delimiter, at) + 1
            after = delimiter if at else ""
        if not after:
            return _QuoteState.CLOSED
