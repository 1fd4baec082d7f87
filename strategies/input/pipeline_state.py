"""Position of a pipeline inside an epoch, for resuming.

Threads read ahead of the batches, so where they are is not where the program is. A pipeline whose
batches come in the same order again, because one thread reads or several do so by turns, and the
shuffling has a seed, begins anew and passes over as many batches as were taken: rows that lie in
its queues need not be saved, and the order is that of a run that was not interrupted. Of a
`ShardedInput` the position after the last row that was taken is known, from which any number of
ranks goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import collectives as cc
from strategies.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from strategies.input.sharded import ShardedInput

__all__ = ["BatchCounter", "ShardedRows", "batches_of_rank"]


class ShardedRows:
    """Reads the records of a `ShardedInput` for a pipeline, and knows where each of them stood."""

    def __init__(self, records: ShardedInput[Any]) -> None:
        self.records = records
        self._taken = records.position()
        self._ahead: deque[Any] = deque()  # positions after the rows that nobody has taken yet

    def __call__(self) -> Any:
        """Return the next record.

        Raises:
            OutOfRangeError: there is none.
        """
        try:
            record = next(self.records)
        except StopIteration:
            raise OutOfRangeError("read: the input has ended") from None
        self._ahead.append(self.records.position())
        return record

    def take(self, rows: int) -> None:
        """Note that the program has so many more rows."""
        for _ in range(rows):
            self._taken = self._ahead.popleft()

    def state(self, comm: cc.Communicator | None) -> dict[str, Any]:
        """Return the position of all ranks after what they have taken; *collective*."""
        return self.records.state(comm, self._taken)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.records.load_state(state)
        self._taken = self.records.position()
        self._ahead.clear()


class BatchCounter:
    """How many batches a rank has taken."""

    def __init__(self, *, readers: int, repeatable: bool) -> None:
        self.taken = 0
        self.readers = readers
        self._repeatable = repeatable

    def state(self, comm: cc.Communicator | None) -> dict[str, Any]:
        """Return the numbers of all ranks; *collective*.

        Raises:
            FailedPreconditionError: another time the batches may come in another order.
        """
        if not self._repeatable:
            raise FailedPreconditionError(
                "batch: the order of the batches is not the same another time, expected one thread "
                "that reads, or several with turns, and a seed where rows are shuffled"
            )
        own = (self.taken, self.readers)
        ranks = [own] if comm is None else comm.allgather_object(own)
        # The order of the batches is one of this number of readers.
        return {"batches": [n for n, _ in ranks], "readers": [n for _, n in ranks]}


def batches_of_rank(state: Mapping[str, Any], comm: cc.Communicator | None, readers: int) -> int:
    """Return how many batches this rank had taken.

    Raises:
        InvalidArgumentError: the state is none of a pipeline, or of another number of ranks, or of
            threads that read.
    """
    counts = state.get("batches")
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    if not isinstance(counts, list) or not all(type(n) is int and n >= 0 for n in counts):
        raise InvalidArgumentError(f"batch: not the state of a pipeline, got {str(state)[:200]}")
    if len(counts) != size:
        raise InvalidArgumentError(
            f"batch: the state is one of another number of ranks, expected {size}, got "
            f"{len(counts)}. With `batch` of a ShardedInput any number goes on"
        )
    # States that were saved before several threads could go on have no such number.
    before = state.get("readers", [1] * size)
    if not isinstance(before, list) or len(before) != size or before[rank] != readers:
        raise InvalidArgumentError(
            f"batch: the state is one of another number of threads that read, expected {readers} "
            f"on rank {rank}, got {str(before)[:200]}"
        )
    return int(counts[rank])
