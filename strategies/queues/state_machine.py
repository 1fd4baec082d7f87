"""State machine of a queue: pending enqueues and dequeues.

Each side of a queue has a line of pending operations: enqueues and plain closes on one side,
dequeues on the other. Only the head of a line runs. After any change both heads run in turn until
neither can progress::

    enqueue side   [ close | enqueue 5 rows | enqueue_many, 7 of 10 rows still outside ]--> rows
    dequeue side   [ dequeue | dequeue_many(4), has 3 already ]<--------------------------- rows

A waiting operation holds no thread and no lock. The thread that makes it possible completes it and
calls its `on_done`. A blocked local caller sleeps on its own lock, which `on_done` releases. A
caller on another rank gets a message instead.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from strategies.errors import CancelledError, OpError, OutOfRangeError
from strategies.queues.components import Components
from strategies.queues.store import Columns, RowStore
from strategies.rpc.operation import OperationOwner, PendingOperation

__all__ = ["Close", "Dequeue", "QueueStateMachine", "Enqueue"]


@dataclass(eq=False)  # compared by identity
class Enqueue(PendingOperation):
    """Add rows as room becomes available, until all are added.

    Args:
        rows: one value per component, or columns if `count` is set, checked by `Components`; the
            caller must not change them before the operation completes.
        count: number of rows in the columns; None for a single row.
    """

    rows: tuple[Any, ...]
    count: int | None = None


class Close(PendingOperation):
    """Close the queue after all operations before it in the line."""


class Dequeue(PendingOperation):
    """Remove rows as they become available, until there are enough.

    Args:
        count: number of rows; None for a single row.
        up_to: whether fewer are enough once the queue is closed.

    Attributes:
        row: the row of a single dequeue, once it has one.
        pieces: columns removed so far by a dequeue of several rows.
        taken: number of rows in the pieces.
    """

    row: tuple[Any, ...] = ()
    pieces: list[Columns] | None = None
    taken = 0

    def __init__(self, count: int | None = None, *, up_to: bool = False) -> None:
        self.count = count
        self.up_to = up_to


class QueueStateMachine(OperationOwner):
    """The state of one queue. No other code changes it.

    Args:
        store: storage of the rows.
        components: description of the rows.
        capacity: maximum number of rows; negative for no limit.
        min_after_dequeue: rows that must stay while the queue is open.
        name: name of the queue, for errors.
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
        # Completed under the lock, notified without it: `_notify` may run in several threads at
        # once, and each operation is popped by one of them.
        self._finished: deque[PendingOperation] = deque()  # completed, `on_done` not called yet
        self._enqueues: deque[PendingOperation] = deque()
        self._dequeues: deque[Dequeue] = deque()

    def __len__(self) -> int:
        # Without the lock: reading one integer is atomic in CPython.
        return self._store.size

    def waiting(self) -> tuple[list[PendingOperation], list[PendingOperation]]:
        """Return the waiting operations of the enqueue side and of the dequeue side, in order."""
        with self._lock:
            return list(self._enqueues), list(self._dequeues)

    def submit(self, attempt: PendingOperation) -> None:
        """Run a new operation, now or when its turn comes up."""
        with self._lock:
            enqueues, dequeues = self._enqueues, self._dequeues
            # Even on a closed queue, as in TensorFlow.
            if attempt.count == 0:
                self._finish(attempt)
            elif isinstance(attempt, Dequeue):
                # Tried at once if no dequeue waits. A batch that has got only some of its rows
                # stays at the head and collects the rest.
                if dequeues or not self._advance_dequeues(attempt) or not attempt.done:
                    dequeues.append(attempt)
                if enqueues:
                    # The dequeue has made room for a waiting enqueue.
                    self._run()
            elif self.closed or (enqueues and isinstance(enqueues[-1], Close)):
                # After a close no enqueue can succeed, so there is no reason to wait for the close.
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
        """Close and fail all waiting enqueues and closes; rows in the queue stay."""
        with self._lock:
            self.closed = True
            for attempt in self._enqueues:
                self._finish(attempt, CancelledError(f"{self._name}: enqueue was cancelled"))
            self._enqueues.clear()
            # Waiting dequeues now get the last rows, or an error.
            self._run()
        self._notify()

    def cancel_pending(self) -> None:
        """Fail all waiting operations; rows that dequeues have collected return."""
        with self._lock:
            # Both lines are emptied first, so that no operation takes rows that another one
            # returns.
            pending = [*self._enqueues, *self._dequeues]
            self._enqueues.clear()
            self._dequeues.clear()
            for attempt in pending:
                if isinstance(attempt, Dequeue):
                    self._restore(attempt)
                self._finish(attempt, CancelledError(f"{self._name}: the operation was cancelled"))
        self._notify()

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End a waiting operation with `error`; rows that it has collected return."""
        with self._lock:
            if attempt.done:
                return
            if isinstance(attempt, Dequeue):
                self._dequeues.remove(attempt)
                # Its rows return to the store, at the front if the order has one.
                self._restore(attempt)
            else:
                self._enqueues.remove(attempt)
            self._finish(attempt, error)
            # An operation behind this one may run now.
            self._run()
        self._notify()

    def abandon(self, attempt: PendingOperation) -> None:
        """End an operation whose caller is gone, even if it has completed."""
        self.withdraw(attempt, CancelledError(f"{self._name}: the caller was interrupted"))
        if isinstance(attempt, Dequeue):
            with self._lock:
                self._restore(attempt)  # no rows if it was withdrawn
                self._run()
            self._notify()

    def _run(self) -> None:
        """Run the heads of both lines in turn until neither can progress."""
        enqueues, dequeues = self._enqueues, self._dequeues
        progress = True
        while progress:
            progress = False
            while enqueues and self._advance_enqueues(enqueues[0]):
                # Rows were added. Without a waiting dequeue another round would change nothing.
                progress = bool(dequeues)
                if not enqueues[0].done:
                    # Partly added: it keeps its place at the head of the line.
                    break
                enqueues.popleft()
            while dequeues and self._advance_dequeues(dequeues[0]):
                progress = bool(enqueues)
                if not dequeues[0].done:
                    break
                dequeues.popleft()

    def _advance_enqueues(self, attempt: PendingOperation) -> bool:
        """Run the head of the enqueue side; return whether anything changed."""
        if not isinstance(attempt, Enqueue):
            # A close waits in the line, so that earlier enqueues still succeed.
            self.closed = True
            self._finish(attempt)
            return True
        store = self._store
        room = self._capacity - store.size
        # A negative capacity means no limit, and makes `room` negative.
        if room <= 0 <= self._capacity:
            return False
        if attempt.count is None:
            # A single row has no partial state, so it needs no counters.
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
        """Run the head of the dequeue side; return whether anything changed."""
        store = self._store
        # May be negative while the queue has fewer rows than must stay.
        allowed = store.size if self.closed else store.size - self._keep
        if attempt.count is None and allowed > 0:  # the most common case
            attempt.row = store.take_row()
            self._finish(attempt)
            return True
        # None is a single row that found no row at its first try.
        missing = (attempt.count or 1) - attempt.taken
        now = max(0, min(allowed, missing))
        # On an open queue `up_to` waits for all rows, as in TensorFlow.
        enough = now == missing or (self.closed and attempt.up_to and attempt.taken + now > 0)
        # No row can follow, so a partial batch returns and the error reports the full size.
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
        # In reverse order, because each piece goes before the rows that are already there.
        for piece in reversed(attempt.pieces or ()):
            self._store.put_back(piece)
        attempt.pieces, attempt.taken = None, 0

    def _finish(self, attempt: PendingOperation, error: OpError | None = None) -> None:
        attempt.error = error  # inlines `complete`, because this is the hot path
        attempt.done = True
        if attempt.on_done is not None:
            # Without a callback nothing waits: the caller looks at `done` after `submit`.
            self._finished.append(attempt)

    def _notify(self) -> None:
        """Call `on_done` of completed operations; without the lock, as it may submit new ones."""
        while True:
            try:
                # `popleft` of a deque is atomic, so no lock is needed.
                attempt = self._finished.popleft()
            except IndexError:
                return
            attempt.notify()
