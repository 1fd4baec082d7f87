"""From a queue of file names to records: a reader opens one file after the other.

A reader is a generator of (key, value) pairs for one file, inside the bookkeeping that is the same
for all formats. A key names the record for people, such as `data/train-0.csv:17`.
"""

from __future__ import annotations

import gzip
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import IO, Generic, TypeVar

from strategies.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    UnknownError,
)
from strategies.input.queues import Queue

__all__ = ["MAX_RECORD_BYTES", "Reader", "TextLineReader"]

MAX_RECORD_BYTES = 16 << 20
"""Longest record in bytes unless the user says otherwise: memory that a damaged file can take."""

Value = TypeVar("Value")
Records = Generator[tuple[str, Value], None, None]


class Reader(ABC, Generic[Value]):
    """Records of the files whose names come from a queue.

    Several threads may read from one reader; their reads are done one after the other. To read
    files side by side, give each thread a reader of its own and all the same queue.

    A file that is missing or damaged is an error of the read that meets it. The rest of that file
    is given up, and the next read goes on with the next file.
    """

    def __init__(self) -> None:
        # A read holds the turn from beginning to end, also while it waits for the queue. The state
        # is only held while there is something to do, so that `reset` never waits for a queue.
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._records: Records[Value] | None = None
        self._failure: OpError | None = None
        self._produced = 0
        self._completed = 0

    @abstractmethod
    def _open(self, work: str) -> Records[Value]:
        """The records of one file; it is closed when the generator ends or is closed."""

    def read(self, queue: Queue) -> tuple[str, Value]:
        """Return the next record, from the next file if one has ended.

        Args:
            queue: of file names; asked only when no file is open.

        Returns:
            Key and value.

        Raises:
            OutOfRangeError: no file is open, and the queue is closed and empty.
            NotFoundError: the next file does not exist; its name is consumed.
            DataLossError: the file is damaged here.
            InvalidArgumentError: the queue does not hold single strings.
        """
        keys, values = self.read_up_to(queue, 1)
        return keys[0], values[0]

    def read_up_to(self, queue: Queue, count: int) -> tuple[list[str], list[Value]]:
        """Return the next 1 to `count` records, all of one file.

        Args:
            queue: of file names; asked only when no file is open.
            count: most records to return, at least 1.

        Returns:
            Keys and values, as many of each.

        Raises:
            ValueError: a count below 1.
            OpError: as `read`. What precedes a damaged record is returned first, the error comes
                with the next read.
        """
        if count < 1:
            raise ValueError(f"read_up_to: count must be at least 1, got {count}")
        if queue.dtypes != (str,) or queue.names or queue.shapes not in (None, ((),)):
            raise InvalidArgumentError(
                "read: the queue must have exactly one component, a single string, "
                f"got dtypes {queue.dtypes} with shapes {queue.shapes} (queue: {queue.name})"
            )
        with self._turn:
            while True:
                with self._state:
                    pairs = self._next_records(count)
                    if pairs:
                        return [key for key, _ in pairs], [value for _, value in pairs]
                work = queue.dequeue()
                if not isinstance(work, str):
                    raise InvalidArgumentError(
                        f"read: a file name must be a single string, got shape {work.shape} "
                        f"(queue: {queue.name})"
                    )
                with self._state:
                    self._records = self._open(work)

    def num_records_produced(self) -> int:
        """Return the number of records since the beginning or the last reset."""
        return self._produced

    def num_work_units_completed(self) -> int:
        """Return the number of files whose end was met, by the read after the last record."""
        return self._completed

    def reset(self) -> None:
        """Close the open file, forget its position and set the counters to 0."""
        with self._state:
            self._drop()
            self._failure = None
            self._produced = 0
            self._completed = 0

    def _drop(self) -> None:
        if self._records is not None:
            self._records.close()
            self._records = None

    def _next_records(self, count: int) -> list[tuple[str, Value]]:
        """Up to `count` records of the open file; none if no file is open or it has ended."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        pairs: list[tuple[str, Value]] = []
        if self._records is None:
            return pairs
        try:
            for pair in self._records:
                pairs.append(pair)
                if len(pairs) == count:
                    break
            else:
                if not pairs:
                    self._drop()
                    self._completed += 1
        except OpError as error:
            self._drop()
            if not pairs:
                raise
            self._failure = error
        self._produced += len(pairs)
        return pairs


class TextLineReader(Reader[str]):
    r"""The lines of text files, without their ends `\n` or `\r\n`.

    A path that ends in `.gz` is unpacked. Keys are `file:line`, where lines count from 1 and
    include the header. Empty lines are records, and so is a last line without an end. The text
    must be UTF-8.

    Args:
        skip_header_lines: lines to skip at the beginning of each file.
        max_record_bytes: longest line, without its end, that is not damage.

    Raises:
        InvalidArgumentError: a negative number of header lines, or no room for a record.
    """

    def __init__(
        self, skip_header_lines: int = 0, *, max_record_bytes: int = MAX_RECORD_BYTES
    ) -> None:
        if skip_header_lines < 0 or max_record_bytes < 1:
            raise InvalidArgumentError(
                "TextLineReader: skip_header_lines must be at least 0 and max_record_bytes at "
                f"least 1, got {skip_header_lines} and {max_record_bytes}"
            )
        super().__init__()
        self._skip = skip_header_lines
        self._limit = max_record_bytes

    def _open(self, work: str) -> Records[str]:
        number = 0
        try:
            with _open_file(work) as file:
                # Two more, for the end of the line.
                while line := file.readline(self._limit + 2):
                    number += 1
                    line = _without_end(line)
                    if len(line) > self._limit:
                        raise DataLossError(
                            f"read: line is longer than {self._limit} bytes ({work}:{number})"
                        )
                    if number > self._skip:
                        yield f"{work}:{number}", line.decode()
        except UnicodeDecodeError as error:
            raise DataLossError(f"read: line is no UTF-8: {error} ({work}:{number})") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            # The line after the last good one is where people have to look.
            raise DataLossError(
                f"read: compressed file is damaged: {error} ({work}:{number + 1})"
            ) from error
        except FileNotFoundError:
            raise NotFoundError(f"read: no such file ({work})") from None
        except OSError as error:
            raise UnknownError(f"read: {error} ({work}:{number + 1})") from error


def _open_file(path: str) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _without_end(line: bytes) -> bytes:
    if line.endswith(b"\n"):
        return line[:-2] if line.endswith(b"\r\n") else line[:-1]
    return line
