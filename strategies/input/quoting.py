"""Lines of CSV files to records: a field in quotes may hold line ends.

::

    1  a,"the cat          a field in quotes is open at the end of line 1 ...
    2  sat",7              ... and closed here: one record, with the number 1
    3  b,"lost,8           open, but nothing closes it: a record by itself, which is an error
    4  c,"mat",9           after the quote before `mat` no field can end: line 3 is taken back
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Quoting"]


class _End(Enum):
    """What the end of a line is to a record."""

    CLOSED = "no field in quotes goes on"
    OPEN = "a field in quotes goes on"
    MALFORMED = "a quote is followed by something else than a delimiter"


class Quoting:
    """Joins the lines of one file to records.

    Args:
        delimiter: what ends a field.
        limit: characters of a record, from which on it is not joined but an error of its first
            line.
    """

    def __init__(self, delimiter: str, limit: int) -> None:
        self._delimiter = delimiter
        self._limit = limit
        self._held: list[tuple[int, str]] = []  # lines of a record that is open
        self._length = 0

    @property
    def is_open(self) -> bool:
        """Whether the next line belongs to a record that has begun."""
        return bool(self._held)

    def add(self, number: int, line: str | None) -> list[tuple[int, str]]:
        """Take the next line; None stands for one that cannot be used.

        Returns:
            Records that end with it: the number of the first line, and the text.
        """
        if line is None:
            return self.end()
        was_open = self.is_open
        end = _end(line, self._delimiter, was_open) if was_open or '"' in line else _End.CLOSED
        if was_open and (end is _End.MALFORMED or self._length + len(line) > self._limit):
            return self.end() + self.add(number, line)
        self._held.append((number, line))
        self._length += len(line) + 1
        if end is _End.OPEN:
            return []
        record = self._held[0][0], "\n".join(line for _, line in self._held)
        self._clear()
        return [record]

    def end(self) -> list[tuple[int, str]]:
        """Return the lines of a record that is not closed, each by itself."""
        lines = self._held
        self._clear()
        return lines

    def _clear(self) -> None:
        self._held, self._length = [], 0


def _end(line: str, delimiter: str, is_open: bool) -> _End:
    """Return whether a field in quotes is open after a line; `is_open` says so of its beginning."""
    at = 0
    while True:
        if not is_open and line.startswith('"', at):
            is_open, at = True, at + 1
        if is_open:
            quote = line.find('"', at)
            if quote < 0:
                return _End.OPEN
            after = line[quote + 1 : quote + 2]
            at = quote + 2
            if after == '"':  # a quote inside of the field
                continue
            if after not in ("", delimiter):
                return _End.MALFORMED
            is_open = False
        else:
            at = line.find(delimiter, at) + 1
            after = delimiter if at else ""
        if not after:
            return _End.CLOSED
