"""Base of all readers: files from a queue, counters, errors and position.

A subclass provides a generator of (key, value) pairs for one file. The key identifies the record
for people, such as `data/train-0.csv:17`.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, Generic, Literal, TypeVar

from strategies.core.validation import choice
from strategies.errors import DataLossError, InvalidArgumentError, OpError
from strategies.queues.queue import Queue

__all__ = ["Damage", "Reader", "Records", "Value"]

_log = logging.getLogger(__name__)

Value = TypeVar("Value")
Own = TypeVar("Own", bound="Reader[Any]")
Records = Generator[tuple[str, Value], None, None]
Damage = Literal["raise", "skip"]


class Reader(ABC, Generic[Value]):
    """Reads the records of files whose names it takes from a queue.

    Several threads may share a reader; their reads are serialized. To read files in parallel, give
    each thread its own reader and the same queue.

    If a file is missing or damaged, the read that finds it raises. The rest of the file is skipped,
    and the next read continues with the next file. Leaving the `with` block, or `reset`, closes the
    open file.

    Args:
        on_damage: handling of damaged data: "raise" `DataLossError`; or "skip" the record, or the
            rest of the file if the next record cannot be found. Skipping logs the first of each
            file and counts all of them. A missing file is always an error.

    Raises:
        ValueError: `on_damage` is unknown.
    """

    def __init__(self, *, on_damage: Damage = "raise") -> None:
        choice(type(self).__name__, "on_damage", on_damage, Damage)
        # A read holds `_turn` from beginning to end, also while it waits for the queue. It holds
        # `_state` only while it works on the file, so that `reset` never waits for a queue.
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._skips = on_damage == "skip"
        self._produced = self._completed = self._skipped = 0
        # No file: the first read takes one from the queue.
        self._begin(None)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *error: object) -> None:
        self.reset()

    @abstractmethod
    def _open(self, work: str) -> Records[Value]:
        """Return the records of one file; the file is closed with the generator."""

    def read(self, queue: Queue) -> tuple[str, Value]:
        """Return the next record, from the next file if the current one has ended.

        Args:
            queue: queue of file names; used only when no file is open.

        Returns:
            Key and value.

        Raises:
            OutOfRangeError: no file is open, and the queue is closed and empty.
            NotFoundError: the next file does not exist; its name is consumed.
            DataLossError: the file is damaged at this record.
            InvalidArgumentError: the queue does not hold single strings.
        """
        keys, values = self.read_up_to(queue, 1)
        return keys[0], values[0]

    def read_up_to(self, queue: Queue, count: int) -> tuple[list[str], list[Value]]:
        """Return the next 1 to `count` records, all of one file.

        Args:
            queue: queue of file names; used only when no file is open.
            count: maximum number of records, at least 1.

        Returns:
            Keys, and the same number of values.

        Raises:
            ValueError: a count below 1.
            OpError: as `read`. Records before a damaged one are returned first; the next read
                raises the error.
        """
        if count < 1:
            raise ValueError(f"read_up_to: count must be at least 1, got {count}")
        # Checked in each call, because a reader may read from several queues.
        if queue.dtypes != (str,) or queue.names or queue.shapes not in (None, ((),)):
            raise InvalidArgumentError(
                "read: the queue must have exactly one component, a single string, "
                f"got dtypes {queue.dtypes} with shapes {queue.shapes} (queue: {queue.name})"
            )
        # For the whole read: records of one file are returned to one caller at a time.
        with self._turn:
            while True:
                with self._state:
                    pairs = self._next_records(count)
                    if pairs:
                        keys, values = zip(*pairs, strict=True)
                        return list(keys), list(values)
                work = queue.dequeue()
                if not isinstance(work, str):
                    raise InvalidArgumentError(
                        f"read: a file name must be a single string, got shape {work.shape} "
                        f"(queue: {queue.name})"
                    )
                with self._state:
                    self._begin(work)

    def num_records_produced(self) -> int:
        """Return the number of records since the start or the last reset."""
        return self._produced

    def num_work_units_completed(self) -> int:
        """Return the number of files that were read to their end.

        Files whose damaged rest was skipped count as well. A file counts with the first read after
        its last record.
        """
        return self._completed

    def num_skipped(self) -> int:
        """Return the number of damaged records, and damaged rests of files, that were skipped."""
        return self._skipped

    def reset(self) -> None:
        """Close the open file, discard its position and set the counters to 0."""
        with self._state:
            self._produced = self._completed = self._skipped = 0
            self._drop()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the counters, for a checkpoint between two reads.

        The file names in the queue are not included.

        Returns:
            Numbers and strings only: `reader` (class), `work` (name of the open file or None) and
            `records` returned from it. Totals count up to the start of that file; `produced` counts
            up to now.
        """
        with self._state:
            return {
                "reader": type(self).__name__,
                "work": self._work,
                "records": self._returned,
                "produced": self._produced,
                "completed": self._completed,
                # Counted up to the start of the file, because reading it again repeats its skips.
                "skipped": self._skipped_before,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state; the next read opens the file.

        Cost: the next read reads and discards the records of the open file that were returned
        before.

        Raises:
            InvalidArgumentError: the state is not from a reader of this class; it is then reset.
        """
        self.reset()
        # The state may be from a damaged file, so its form is checked completely.
        values = dict(state) if isinstance(state, Mapping) else {}
        names = ("records", "produced", "completed", "skipped")
        counts: list[Any] = [values.get(name) for name in names]
        work = values.get("work")
        if (
            values.keys() != self.state_dict().keys()
            or values["reader"] != type(self).__name__
            or not (work is None or isinstance(work, str))
            or not all(type(count) is int and 0 <= count <= sys.maxsize for count in counts)
        ):
            raise InvalidArgumentError(
                f"load_state_dict: could not parse state of a {type(self).__name__}, "
                f"got {state!r:.200}"
            )
        with self._state:
            self._produced, self._completed, self._skipped = counts[1:]
            self._begin(work, counts[0])

    def _begin(self, work: str | None, returned: int = 0) -> None:
        """Set the file and the record to continue at; the next read opens the file."""
        self._work = work
        self._returned = returned
        # Skips of the open file are counted again when it is reopened.
        self._skipped_before = self._skipped
        self._records: Records[Value] | None = None
        self._failure: OpError | None = None

    def _drop(self) -> None:
        if self._records is not None:
            self._records.close()
        self._begin(None)

    def _end(self) -> None:
        self._drop()
        self._completed += 1

    def _open_at(self, work: str) -> Records[Value]:
        """Return the records of a file after the ones that were returned before."""
        records = self._open(work)
        # Discarded in order: only the reader knows where a record ends.
        passed = sum(1 for _ in itertools.islice(records, self._returned))
        if passed < self._returned:
            raise DataLossError(
                f"read: the file has fewer records than before, "
                f"expected at least {self._returned}, got {passed} ({work})"
            )
        return records

    def _next_records(self, count: int) -> list[tuple[str, Value]]:
        """Return up to `count` records of the open file; [] if no file is open or it has ended."""
        if self._failure is not None:
            # A failure after records that were returned already.
            failure = self._failure
            self._drop()
            raise failure
        pairs: list[tuple[str, Value]] = []
        if self._work is None:
            return pairs
        try:
            if self._records is None:
                self._records = self._open_at(self._work)
            # Not a list comprehension: the list keeps the records before an exception.
            pairs.extend(itertools.islice(self._records, min(count, sys.maxsize)))
            if not pairs:
                self._end()
        except OpError as error:
            self._give_up(error, pairs)
        except BaseException:
            # For example an interrupt: the next read reopens the file after the returned records.
            self._records = None
            raise
        # A file that has ended has no position.
        if self._work is not None:
            self._returned += len(pairs)
        self._produced += len(pairs)
        return pairs

    def _give_up(self, error: OpError, pairs: list[tuple[str, Value]]) -> None:
        """End the open file after an error; raise it now, or after `pairs` are returned."""
        if self._skips and isinstance(error, DataLossError):
            self._handle_damage(error)
            self._end()
        elif pairs:
            # Records before the damage are good, and are returned first.
            self._failure = error
        else:
            self._drop()
            raise error

    def _handle_damage(self, error: DataLossError) -> None:
        """Raise the error of a damaged record, or count it if damage is skipped."""
        if not self._skips:
            raise error
        # The first of this file only, so that a damaged file does not fill the log.
        if self._skipped == self._skipped_before:
            _log.warning("skipped, perhaps with more of this file: %s", error)
        self._skipped += 1
