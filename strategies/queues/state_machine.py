"""State machine of a queue: pending enqueues and dequeues.

Each side of a queue has a line of *attempts*: enqueues and plain closes on one, dequeues on the
other. Only the head of a line runs. After any change the two heads work in turn until neither gets
further::

    enqueue side   [ close | enqueue 5 rows | enqueue_many, 7 of 10 rows still outside ]--> rows
    dequeue side   [ dequeue | dequeue_many(4), has 3 already ]<--------------------------- rows

An attempt that cannot finish holds no thread and no lock. It finishes later, in the thread of
whoever made that possible, by a call of its `on_done`. A blocked local caller sleeps on a lock of
its own that `on_done` releases; a caller on another rank gets a message instead.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from strategies.errors import CancelledError, OpError, OutOfRangeError
from strategies.queues.components import Components
from strategies.queues.store import Columns, RowStore
from strategies.rpc.operation import OperationOwner, PendingOperation

__all__ = ["Close", "Dequeue", "QueueStateMachine", "Enqueue"]


class Enqueue(PendingOperation):
    """Put rows in, as many as there is room for, until all are in.

    Args:
        rows: one value per component, or columns if `count` is given, as `Components` checked them;
            not to be changed by the caller before the attempt has finished.
        count: number of rows in the columns; None for a single row.
    """

    def __init__(self, rows: tuple[Any, ...], count: int | None = None) -> None:
        self.rows = rows
        self.count = count


class Close(PendingOperation):
    """Close the queue when everything before it in the line is in."""


class Dequeue(PendingOperation):
    """Take rows out, as many as are allowed, until there are enough.

    Args:
        count: number of rows; None for a single row.
        up_to: whether fewer are enough once the queue is closed.

    Attributes:
        row: the row, if a single one was wanted and has come.
        pieces: the columns taken so far, if several were wanted.
        taken: number of rows in the pieces.
    """

    row: tuple[Any, ...] = ()
    pieces: list[Columns] | None = None
    taken = 0

    def __init__(self, count: int | None = None, *, up_to: bool = False) -> None:
        self.count = count
        self.up_to = up_to


class QueueStateMachine(OperationOwner):
    """The state of one queue, and the only code that changes it.

    Args:
        store: where rows are.
        components: what they consist of.
        capacity: most rows that an enqueue may fill up to; negative for no limit.
        min_after_dequeue: rows that must stay while the queue is open.
        name: of the queue, for errors.
    """

    def __init__(
        self,
        store: RowStore,
        components: Components,
        *,
        capacity: int,
        min_after_dequeue: int = 0,
        name: str,
    ) -> None:
        self.closed = False
        self._store = store
        self._components = components
        self._capacity = capacity
        self._keep = min_after_dequeue
        self._name = name
        self._lock = threading.Lock()
        self._finished: deque[PendingOperation] = deque()  # those that somebody is to be told of
        self._enqueues: deque[PendingOperation] = deque()
        self._dequeues: deque[Dequeue] = deque()

    def __len__(self) -> int:
        return self._store.size

    def waiting(self) -> tuple[list[PendingOperation], list[PendingOperation]]:
        """Return the attempts that wait on the enqueue side and on the dequeue side, in line."""
        with self._lock:
            return list(self._enqueues), list(self._dequeues)

    def submit(self, attempt: PendingOperation) -> None:
        """Let a new attempt run, now or when its turn comes."""
        with self._lock:
            enqueues, dequeues = self._enqueues, self._dequeues
            if attempt.count == 0:
                self._finish(attempt)
            elif isinstance(attempt, Dequeue):
                if dequeues or not self._advance_dequeues(attempt) or not attempt.done:
                    dequeues.append(attempt)
                if enqueues:
                    self._run()
            elif self.closed or (enqueues and isinstance(enqueues[-1], Close)):
                # Behind a close nothing can succeed any more, so it need not wait for that close.
                already = "already " if isinstance(attempt, Close) else ""
                self._finish(attempt, CancelledError(f"{self._name}: the queue is {already}closed"))
            else:
                if enqueues or not self._advance_enqueues(attempt) or not attempt.done:
                    enqueues.append(attempt)
                if dequeues:
                    self._run()
        if self._finished:
            self._notify()

    def close_now(self) -> None:
        """Close and fail all that waits on the enqueue side; rows that are in stay."""
        with self._lock:
            self.closed = True
            for attempt in self._enqueues:
                self._finish(attempt, CancelledError(f"{self._name}: enqueue was cancelled"))
            self._enqueues.clear()
            self._run()
        self._notify()

    def cancel_pending(self) -> None:
        """Fail all that waits on both sides; what dequeues had taken goes back."""
        with self._lock:
            pending = [*self._enqueues, *self._dequeues]
            self._enqueues.clear()
            self._dequeues.clear()
            for attempt in pending:
                if isinstance(attempt, Dequeue):
                    self._restore(attempt)
                self._finish(attempt, CancelledError(f"{self._name}: the operation was cancelled"))
        self._notify()

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End an attempt that waits, with `error`; what it had taken goes back."""
        with self._lock:
            if attempt.done:
                return
            if isinstance(attempt, Dequeue):
                self._dequeues.remove(attempt)
                self._restore(attempt)
            else:
                self._enqueues.remove(attempt)
            self._finish(attempt, error)
            self._run()
        self._notify()

    def abandon(self, attempt: PendingOperation) -> None:
        """End an attempt for which nobody waits any more, also if it has finished by now."""
        self.withdraw(attempt, CancelledError(f"{self._name}: the caller was interrupted"))
        if isinstance(attempt, Dequeue):
            with self._lock:
                self._restore(attempt)  # nothing, if it was withdrawn
                self._run()
            self._notify()

    def _run(self) -> None:
        """Let the heads of both lines work in turn until neither gets further."""
        enqueues, dequeues = self._enqueues, self._dequeues
        progress = True
        while progress:
            progress = False
            while enqueues and self._advance_enqueues(enqueues[0]):
                progress = bool(dequeues)
                if not enqueues[0].done:
                    break
                enqueues.popleft()
            while dequeues and self._advance_dequeues(dequeues[0]):
                progress = bool(enqueues)
                if not dequeues[0].done:
                    break
                dequeues.popleft()

    def _advance_enqueues(self, attempt: PendingOperation) -> bool:
        """Let the head of the enqueue side work; return whether anything changed."""
        if not isinstance(attempt, Enqueue):
            self.closed = True
            self._finish(attempt)
            return True
        store = self._store
        room = self._capacity - store.size
        if room <= 0 <= self._capacity:
            return False
        if attempt.count is None:
            store.append_row(attempt.rows)
            self._finish(attempt)
            return True
        entered = attempt.entered
        stop = attempt.count if self._capacity < 0 else min(attempt.count, entered + room)
        store.append(attempt.rows, entered, stop)
        attempt.entered = stop
        if stop == attempt.count:
            self._finish(attempt)
        return True

    def _advance_dequeues(self, attempt: Dequeue) -> bool:
        """Let the head of the dequeue side work; return whether anything changed."""
        store = self._store
        allowed = store.size if self.closed else store.size - self._keep
        if attempt.count is None and allowed > 0:  # the commonest case
            attempt.row = store.take_row()
            self._finish(attempt)
            return True
        missing = (attempt.count or 1) - attempt.taken
        now = max(0, min(allowed, missing))
        enough = now == missing or (self.closed and attempt.up_to and attempt.taken + now > 0)
        if self.closed and not enough:
            self._restore(attempt)
            why = f"(requested {attempt.count or 1}, current size {store.size})"
            error = f"{self._name}: the queue is closed and has insufficient elements {why}"
            self._finish(attempt, OutOfRangeError(error))
            return True
        if now:
            attempt.pieces = attempt.pieces or []
            attempt.pieces.append(store.take(now))
            attempt.taken += now
        if enough:
            self._finish(attempt)
        return now > 0 or enough

    def _restore(self, attempt: Dequeue) -> None:
        if attempt.row:
            attempt.pieces = [self._components.as_columns(attempt.row)]
            attempt.row = ()
        for piece in reversed(attempt.pieces or ()):
            self._store.put_back(piece)
        attempt.pieces, attempt.taken = None, 0

    def _finish(self, attempt: PendingOperation, error: OpError | None = None) -> None:
        attempt.error = error  # as `settle` does, without a call: this is the hot path
        attempt.done = True
        if attempt.on_done is not None:
            self._finished.append(attempt)

    def _notify(self) -> None:
        """Call those whose attempts have finished; without the lock, as they may come back."""
        while True:
            try:
                attempt = self._finished.popleft()
            except IndexError:
                return
            attempt.notify()
