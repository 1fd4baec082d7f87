"""Input pipelines: reader threads, a queue of rows, and batches.

::

    runners --> read() in threads --> rows (FIFO or shuffled) --> batch thread --> ready --> for

All threads share one coordinator, so the end of the `with` block, or an exception in one thread,
stops all of them. The ready queue holds a few batches, so that the consumer rarely waits.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np

import collectives as cc
from strategies.core.validation import integer
from strategies.errors import FailedPreconditionError, OutOfRangeError
from strategies.input.coordinator import Coordinator
from strategies.input.pipeline_state import BatchCounter, ShardedRows, batches_of_rank
from strategies.input.round_robin import ReaderRoundRobin
from strategies.input.runners import QueueRunner, start_queue_runners
from strategies.queues.dtypes import dtype_of
from strategies.queues.queue_types import FIFOQueue, Queue

__all__ = ["Batches", "BatchOptions", "Read"]

_log = logging.getLogger(__name__)

Read: TypeAlias = Callable[[], Any]

_READY_BATCHES = 4  # batches prepared ahead of the consumer, to hide a slow read
_STOP_SECONDS = 10.0  # threads end in milliseconds unless `read` blocks


class BatchOptions(TypedDict, total=False):
    """Options of all pipelines; see `batch`."""

    enqueue_many: bool
    allow_smaller_final_batch: bool
    runners: Sequence[QueueRunner]
    turns: ReaderRoundRobin | None


class Batches:
    """An iterable of batches, with the threads that make them; returned by `batch` and variants.

    Open it with `with`; the threads run inside the block. The iteration ends after the last batch.
    If a thread failed, it raises the thread's exception with its traceback.

    If an input ends before its first batch is full, a warning is logged.

    Attributes:
        rows_read: rows returned by `read` so far.
        rows_skipped: skipped records: damaged ones, and damaged rests of files.
        wait_seconds: seconds that the consumer has waited for batches.
    """

    def __init__(
        self,
        reads: Sequence[Read],
        batch_size: int,
        make_queue: Callable[[Any, Any, Any], Queue],
        *,
        enqueue_many: bool = False,
        allow_smaller_final_batch: bool = False,
        runners: Sequence[QueueRunner] = (),
        turns: ReaderRoundRobin | None = None,
        repeatable: bool = False,
    ) -> None:
        integer("batch", "batch_size", batch_size)
        if not reads:
            raise ValueError("batch: expected at least one function that reads, got none")
        # Different functions: a shared one would break the order of turns.
        if turns is not None and not turns.count == len(reads) == len({id(read) for read in reads}):
            raise ValueError(
                f"batch: turns need different functions, expected {turns.count}, got "
                f"{len({id(read) for read in reads})} in {len(reads)} threads"
            )
        self.rows_read = self.rows_skipped = 0
        self.wait_seconds = 0.0
        self._reads = reads
        self._batch_size = batch_size
        self._make_queue = make_queue
        self._many = enqueue_many
        self._smaller = allow_smaller_final_batch
        self._runners = runners
        self._lock = threading.Lock()
        # One coordinator for all threads, so that an error anywhere ends all of them.
        self._coord = Coordinator()
        self._threads: list[threading.Thread] = []
        self._ready: FIFOQueue | None = None
        self._closed = False
        self._counted = BatchCounter(
            readers=len(reads), repeatable=repeatable and (len(reads) == 1 or turns is not None)
        )
        self._turns = turns
        self._sharded = reads[0] if isinstance(reads[0], ShardedRows) else None
        self._skip = 0  # batches to discard, because an earlier run has taken them
        self._gave = False  # whether a batch was returned or the warning logged
        self._raised: BaseException | None = None

    def __enter__(self) -> Batches:
        # The queues are closed at the end, so a second opening would find no rows.
        if self._ready is not None or self._closed:
            raise RuntimeError("batch: a pipeline can be opened only once")
        try:
            self._start()
        except BaseException as error:
            # A runner's thread that feeds `read` may be the cause.
            self._raised = self._coord.error or error
            self.close()
            # `from None`: `_raised` has its own traceback.
            raise self._raised from None
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch, in the structure that `read` returns.

        Raises:
            StopIteration: after the last batch, or after the end of the block.
            RuntimeError: the pipeline is not open.
            BaseException: the exception of a thread.
        """
        if self._closed:
            raise StopIteration
        if self._ready is None:
            raise RuntimeError("batch: the pipeline is not open, use it in a `with` statement")
        began = time.perf_counter()
        try:
            # An error of a thread comes before batches that are still in the queue.
            self._raise_error()
            # Discarded here and not while reading: the batch thread forms the same batches again.
            while self._skip:
                self._ready.dequeue()
                self._skip -= 1
                self._gave = True
            batch = self._ready.dequeue()
            self._gave = True
            self._counted.taken += 1
            if self._sharded is not None:
                # The rows of this batch were read first, so their positions are the oldest.
                self._sharded.take(len(_parts(batch)[0]))
            return batch
        except OutOfRangeError:
            # The queue is closed at the end of the input, and also when a thread has failed.
            self._raise_error()
            self._warn_of_nothing()
            raise StopIteration from None
        finally:
            self.wait_seconds += time.perf_counter() - began

    def state(self, comm: cc.Communicator | None = None) -> dict[str, Any]:
        """Return the position in the batches; *collective*.

        Args:
            comm: the ranks, each with its own pipeline; None for one rank.

        Returns:
            A dict that JSON can represent; the same on all ranks.

        Raises:
            FailedPreconditionError: the order of the batches is not repeatable: several threads
                read without turns, or rows are shuffled without a seed.
        """
        if self._sharded is not None:
            return self._sharded.state(comm)
        return self._counted.state(comm)

    def resume(self, state: Mapping[str, Any], comm: cc.Communicator | None = None) -> None:
        """Continue after the batches that were taken when `state` was saved.

        The next batches are the same as in an uninterrupted run. Earlier batches are read and
        discarded. A `ShardedInput` continues at its saved position, with any number of ranks.

        Args:
            state: state of a pipeline with the same arguments.
            comm: the ranks.

        Raises:
            InvalidArgumentError: the state is from another kind of pipeline, or another number of
                ranks or reader threads.
            FailedPreconditionError: more batches have been taken already, or the pipeline reads a
                `ShardedInput` and is open.
        """
        if self._sharded is not None:
            # Its threads have read ahead of the new position.
            if self._ready is not None:
                raise FailedPreconditionError(
                    "batch: the pipeline is open, expected resume before its `with` statement"
                )
            self._sharded.load_state(state)
            return
        batches = batches_of_rank(state, comm, self._counted.readers)
        if batches < self._counted.taken:
            raise FailedPreconditionError(
                f"batch: expected at most {batches} batches taken before, got "
                f"{self._counted.taken}. Make a new pipeline"
            )
        # Only the difference is skipped, if the program has taken some batches already.
        self._skip = batches - self._counted.taken
        self._counted.taken = batches

    def close(self) -> None:
        """Stop all threads and wait for their end; harmless when repeated.

        Raises:
            RuntimeError: a thread does not end, because `read` blocks.
        """
        if self._closed:
            return
        self._closed = True
        # An error from before this request belongs to a thread.
        error = self._coord.error
        self._coord.request_stop()
        try:
            # Live threads are reported below, with a better message.
            self._coord.join(stop_grace_period_secs=_STOP_SECONDS, ignore_live_threads=True)
        except BaseException as raised:
            if raised is not error and raised is not self._coord.error:
                raise
            error = raised
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if alive:
            raise RuntimeError(
                f"batch: threads are still running {_STOP_SECONDS} s after the request to stop; "
                f"does `read` block (threads: {' '.join(alive)})"
            )
        if error is not None and error is not self._raised:
            # The consumer did not take these rows, so a warning is enough.
            _log.warning("batch: a thread had failed when the pipeline was closed", exc_info=error)

    def count_skipped(self, records: int) -> None:
        """Add to `rows_skipped`, from any thread."""
        with self._lock:
            self.rows_skipped += records

    def _start(self) -> None:
        # The first read below may take names from the queues of these runners.
        self._threads += start_queue_runners(self._runners, self._coord)
        # Without a graph, dtypes and shapes of the queue are known only after a first element.
        first, reads = self._first()
        if not reads:
            self._ready = FIFOQueue(1, np.float64)
            # No reader has any rows: the iteration ends at once.
            self._ready.close()
            return
        rows = self._make_queue(*_description(first, self._many))
        # Without shapes, because the final batch may be smaller.
        ready = FIFOQueue(_READY_BATCHES, rows.dtypes, names=rows.names, name=f"{rows.name}_ready")
        enqueue = rows.enqueue_many if self._many else rows.enqueue
        dequeue = rows.dequeue_up_to if self._smaller else rows.dequeue_many
        turns = self._turns

        def filler(place: int, waiting: list[Any]) -> Callable[[], None]:
            def read() -> Any:
                # The element that was read for its dtype is enqueued once, by its own thread.
                return waiting.pop() if waiting else self._count(self._reads[place]())

            if turns is not None:
                return functools.partial(turns.hand_over, place, read, enqueue)
            return lambda: enqueue(read())

        def cancel() -> None:
            # Turns first: threads that wait for their turn would not see that the queue is closed.
            if turns is not None:
                turns.stop()
            rows.close(cancel_pending_enqueues=True)

        # The element read to determine the dtypes is the first one that its thread enqueues.
        others = [filler(place, []) for place in reads[1:]]
        if turns is not None:
            # After the first read, which happened without turns in this thread.
            turns.begin()
        runners = [
            QueueRunner(rows, [filler(reads[0], [first]), *others], cancel_op=cancel),
            QueueRunner(ready, [lambda: ready.enqueue(dequeue(self._batch_size))]),
        ]
        self._ready = ready
        self._threads += start_queue_runners(runners, self._coord)

    def _first(self) -> tuple[Any, Sequence[int]]:
        """Read until there are rows; return them and the functions that have not ended.

        The rows are from the first of these functions.
        """
        for place, read in enumerate(self._reads):
            try:
                # All records of a read may be damaged. An empty column of text would also give the
                # queue a wrong dtype.
                while not _rows_of(first := self._count(read()), self._many):
                    pass
                return first, range(place, len(self._reads))
            except OutOfRangeError:
                if self._turns is not None:
                    # Leaves the round, as no thread will take turns for it.
                    self._turns.leave(place)
                self._raise_error()
        return None, ()

    def _count(self, values: Any) -> Any:
        rows = _rows_of(values, self._many)
        # Several threads count.
        with self._lock:
            self.rows_read += rows
        return values

    def _warn_of_nothing(self) -> None:
        """Warn once if rows were read but returned no batch, because a loop would just end."""
        if self.rows_read and not self._gave:
            self._gave = True
            _log.warning(
                "batch: the input gave no batch, its %d rows are fewer than batch_size %d; "
                "allow_smaller_final_batch=True gives them as a smaller one",
                self.rows_read,
                self._batch_size,
            )

    def _raise_error(self) -> None:
        if self._coord.error is not None:
            self._raised = self._coord.error
            raise self._raised


def _rows_of(values: Any, many: bool) -> int:
    """Return how many rows a call of `read` has returned."""
    return len(_parts(values)[0]) if many else 1


def _description(values: Any, many: bool) -> tuple[list[Any], list[Any], list[str] | None]:
    """Return dtypes, shapes and names of a queue for elements like this one."""
    names = list(values) if isinstance(values, Mapping) else None
    parts = _parts(values)
    shapes = [np.shape(part)[1:] if many else np.shape(part) for part in parts]
    return [dtype_of(part) for part in parts], shapes, names


def _parts(values: Any) -> Sequence[Any]:
    """Return the components of an element, or of several rows."""
    listed = list(values.values()) if isinstance(values, Mapping) else values
    return listed if isinstance(listed, (list, tuple)) else [listed]
