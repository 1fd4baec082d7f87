"""Base of all readers: files from a queue, counters, errors and position.

A reader of a format is a generator of (key, value) pairs for one file, inside this bookkeeping. A
key names the record for people, such as `data/train-0.csv:17`.
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
    """Records of the files whose names come from a queue.

    Several threads may read from one reader; their reads are done one after the other. To read
    files side by side, give each thread a reader of its own and all the same queue.

    A file that is missing or damaged is an error of the read that meets it. The rest of that file
    is given up, and the next read goes on with the next file. Used with `with`, or by `reset`, a
    reader closes the file that is open.

    Args:
        on_damage: what to do about damaged data: "raise" `DataLossError`; or "skip" the record, or
            the rest of the file where no next record can be found, log the first of each file and
            count it. A missing file is always an error.

    Raises:
        ValueError: `on_damage` is neither.
    """

    def __init__(self, *, on_damage: Damage = "raise") -> None:
        choice(type(self).__name__, "on_damage", on_damage, Damage)
        # A read holds the turn from beginning to end, also while it waits for the queue. The state
        # is only held while there is something to do, so that `reset` never waits for a queue.
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._skips = on_damage == "skip"
        self._produced = self._completed = self._skipped = 0
        self._begin(None)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *error: object) -> None:
        self.reset()

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
        """Return the number of records since the beginning or the last reset."""
        return self._produced

    def num_work_units_completed(self) -> int:
        """Return the number of files whose end was met, by the read after the last record.

        Files whose rest was skipped as damaged are counted, too.
        """
        return self._completed

    def num_skipped(self) -> int:
        """Return the number of damaged records, and damaged rests of files, that were skipped."""
        return self._skipped

    def reset(self) -> None:
        """Close the open file, forget its position and set the counters to 0."""
        with self._state:
            self._produced = self._completed = self._skipped = 0
            self._drop()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the counters, to be kept in a checkpoint between two reads.

        The names that are still in the queue are not part of it.

        Returns:
            Numbers and strings only: `reader` (class), `work` (name of the open file or None),
            `records` returned of it, and totals up to the beginning of that file or, for
            `produced`, up to now.
        """
        with self._state:
            return {
                "reader": type(self).__name__,
                "work": self._work,
                "records": self._returned,
                "produced": self._produced,
                "completed": self._completed,
                "skipped": self._skipped_before,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; the file is opened by the next read.

        Costs: the records of the open file that were returned already are read again.

        Raises:
            InvalidArgumentError: this is not the state of such a reader; the reader is then reset.
        """
        self.reset()
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
        """Take up a file from a record on; nothing is opened before it is needed."""
        self._work = work
        self._returned = returned
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
        """The records of a file after those that were returned."""
        records = self._open(work)
        passed = sum(1 for _ in itertools.islice(records, self._returned))
        if passed < self._returned:
            raise DataLossError(
                f"read: the file has fewer records than were read of it before, "
                f"expected at least {self._returned}, got {passed} ({work})"
            )
        return records

    def _next_records(self, count: int) -> list[tuple[str, Value]]:
        """Up to `count` records of the open file; none if no file is open or it has ended."""
        if self._failure is not None:
            failure = self._failure
            self._drop()
            raise failure
        pairs: list[tuple[str, Value]] = []
        if self._work is None:
            return pairs
        try:
            if self._records is None:
                self._records = self._open_at(self._work)
            # Not a list comprehension: what precedes an exception stays in the list.
            pairs.extend(itertools.islice(self._records, min(count, sys.maxsize)))
            if not pairs:
                self._end()
        except OpError as error:
            self._give_up(error, pairs)
        except BaseException:
            # Such as an interrupt: the next read begins again after what was returned.
            self._records = None
            raise
        if self._work is not None:
            self._returned += len(pairs)
        self._produced += len(pairs)
        return pairs

    def _give_up(self, error: OpError, pairs: list[tuple[str, Value]]) -> None:
        """No more can be read of the open file."""
        if self._skips and isinstance(error, DataLossError):
            self._handle_damage(error)
            self._end()
        elif pairs:
            self._failure = error
        else:
            self._drop()
            raise error

    def _handle_damage(self, error: DataLossError) -> None:
        """Raise, or count and return, because of a record that can be passed over."""
        if not self._skips:
            raise error
        if self._skipped == self._skipped_before:
            _log.warning("skipped, as perhaps more of this file: %s", error)
        self._skipped += 1
