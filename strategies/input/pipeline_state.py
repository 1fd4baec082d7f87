"""Position of a pipeline inside an epoch, for resuming.

Threads read ahead of the batches, so their position is not that of the program. A pipeline is
repeatable if one thread reads, or several take turns, and shuffling has a seed. To resume, it
starts again and skips the batches that were taken. So rows in its queues need not be saved, and the
order is that of an uninterrupted run. For a `ShardedInput` the position after the last taken row is
saved instead, and any number of ranks can resume from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import collectives as cc
from strategies.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from strategies.input.sharded import ShardedInput

__all__ = ["BatchCounter", "ShardedRows", "batches_of_rank"]


class ShardedRows:
    """Reads the records of a `ShardedInput` for a pipeline and tracks the position after each.

    Args:
        records: the input.
        keep: returns whether to return a record.
    """

    def __init__(
        self, records: ShardedInput[Any], keep: Callable[[Any], bool] = lambda record: True
    ) -> None:
        self.records = records
        self._keep = keep
        # Before any row is taken: the position at the start of the epoch, or of a loaded state.
        self._taken = records.position()
        self._ahead: deque[Any] = deque()  # positions after the rows that are read but not taken

    def __call__(self) -> Any:
        """Return the next record.

        Raises:
            OutOfRangeError: the input has ended.
        """
        for record in self.records:
            if self._keep(record):
                # Rows and positions are appended in the thread that reads, in the same order.
                self._ahead.append(self.records.position())
                return record
        raise OutOfRangeError("read: the input has ended")

    def take(self, rows: int) -> None:
        """Record that the program has taken `rows` more rows."""
        # Popped in the consumer's thread; `deque` needs no lock for that.
        for _ in range(rows):
            self._taken = self._ahead.popleft()

    def state(self, comm: cc.Communicator | None) -> dict[str, Any]:
        """Return the position of all ranks after their last taken row; *collective*."""
        return self.records.state(comm, self._taken)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        self.records.load_state(state)
        self._taken = self.records.position()
        self._ahead.clear()


class BatchCounter:
    """Counts the batches that a rank has taken."""

    def __init__(self, *, readers: int, repeatable: bool) -> None:
        self.taken = 0
        self.readers = readers
        self._repeatable = repeatable

    def state(self, comm: cc.Communicator | None) -> dict[str, Any]:
        """Return the counts of all ranks; *collective*.

        Raises:
            FailedPreconditionError: the order of the batches is not repeatable.
        """
        if not self._repeatable:
            raise FailedPreconditionError(
                "batch: the order of the batches is not repeatable, expected one thread that "
                "reads, or several with turns, and a seed where rows are shuffled"
            )
        own = (self.taken, self.readers)
        ranks = [own] if comm is None else comm.allgather_object(own)
        # The number of readers is saved, because the order of the batches depends on it.
        return {"batches": [n for n, _ in ranks], "readers": [n for _, n in ranks]}


def batches_of_rank(state: Mapping[str, Any], comm: cc.Communicator | None, readers: int) -> int:
    """Return the number of batches that this rank had taken.

    Raises:
        InvalidArgumentError: the state is invalid, or from another number of ranks or reader
            threads.
    """
    counts = state.get("batches")
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    # The counts may be from a damaged file, so their types are checked.
    if not isinstance(counts, list) or not all(type(n) is int and n >= 0 for n in counts):
        raise InvalidArgumentError(f"batch: not the state of a pipeline, got {str(state)[:200]}")
    if len(counts) != size:
        raise InvalidArgumentError(
            f"batch: wrong number of ranks in the state, expected {size}, got {len(counts)}. "
            f"Use `batch` of a ShardedInput to resume with any number"
        )
    # States saved before `turns` existed have no "readers": they are from pipelines of one thread.
    before = state.get("readers", [1] * size)
    if not isinstance(before, list) or len(before) != size or before[rank] != readers:
        raise InvalidArgumentError(
            f"batch: wrong number of reader threads in the state, expected {readers} on rank "
            f"{rank}, got {str(before)[:200]}"
        )
    return int(counts[rank])
