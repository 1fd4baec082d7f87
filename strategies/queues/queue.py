"""Base of all queues: blocking operations over the state machine."""

from __future__ import annotations

import threading
from typing import Any

from strategies.errors import InvalidArgumentError
from strategies.queues.components import Components
from strategies.queues.state_machine import Close, Dequeue, Enqueue, QueueStateMachine
from strategies.queues.store import RowStore
from strategies.rpc.operation import perform
from strategies.rpc.wait_limits import is_unlimited

__all__ = ["Queue", "check_capacity"]


def check_capacity(operation: str, capacity: int, *, endless: bool = False) -> None:
    """Check the capacity of a queue that a source fills.

    Args:
        operation: beginning of the error.
        capacity: capacity of the queue.
        endless: whether the source would fill a queue without limit forever.

    Raises:
        ValueError: no row could enter, or rows without end.
    """
    if capacity == 0 or (endless and capacity < 0):
        wanted = "at least 1" if endless else "at least 1, or below 0 for no limit"
        raise ValueError(f"{operation}: bad capacity, expected {wanted}, got {capacity}")


class Queue:
    """Base of all queues; make one of the kinds of `strategies.queues.queue_types`.

    Values are passed and returned per element: bare if there is one component, a tuple if there are
    several, a dict if the queue has names. A list or tuple argument contains components. Every
    blocking method takes `timeout` in seconds; None waits without limit.

    Attributes:
        name: name for errors and threads.
        capacity: number of elements at which enqueues start to wait; negative for no limit.
        dtypes: a NumPy dtype, `str` or `bytes` per component.
        shapes: shape of each component of one element; None if elements may differ. A size of None
            means that elements may differ there and are padded.
        names: keys of the elements if they are dicts, or None.
        components: description of the elements, which checks and converts values.
        state_machine: for callers that submit operations instead of blocking a thread.
        runners: for each `QueueRunner` that fills the queue, whether any of its threads was
            started. Not the runner itself, which refers to the queue.
    """

    def __init__(
        self,
        store: RowStore,
        components: Components,
        *,
        capacity: int,
        name: str,
        min_after_dequeue: int = 0,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.components = components
        self.dtypes = components.dtypes
        self.shapes = components.shapes
        self.names = components.names
        # Replaced by a client of the machine if the queue is on another task.
        self.state_machine = QueueStateMachine(
            store, components, capacity=capacity, min_after_dequeue=min_after_dequeue, name=name
        )
        self.runners: list[threading.Event] = []
        self._context = f" (queue: {name}, capacity: {capacity})"  # suffix of errors

    @staticmethod
    def from_list(index: int, queues: list[Queue]) -> Queue:
        """Return one of several queues with the same kind of elements.

        Raises:
            TypeError: the argument is not a list of queues, or their dtypes or names differ.
            InvalidArgumentError: the index is out of range.
        """
        if (
            not isinstance(queues, list)
            or not queues
            or not all(isinstance(queue, Queue) for queue in queues)
        ):
            raise TypeError(f"from_list: expected a list of queues, got {queues!r:.200}")
        for what in ("dtypes", "names"):
            found = {getattr(queue, what) for queue in queues}
            if len(found) > 1:
                raise TypeError(f"from_list: queues must have the same {what}, got {found}")
        if not 0 <= index < len(queues):
            raise InvalidArgumentError(f"from_list: index {index} is not in [0, {len(queues)})")
        return queues[index]

    def enqueue(self, values: Any, *, timeout: float | None = None) -> None:
        """Add one element; wait while the queue is full.

        Args:
            values: one value per component. Python's numbers and lists take the dtype of the queue;
                arrays must have it.
            timeout: seconds to wait.

        Raises:
            CancelledError: the queue is closed, or a close cancels the call.
            DeadlineExceededError: still full after `timeout`.
            InvalidArgumentError: a component has another dtype or shape.
            ValueError: wrong number of components or wrong keys.
        """
        attempt = Enqueue(self.components.row(values))
        perform(self.state_machine, attempt, "enqueue", timeout, self._context, self._stall_reason)

    def enqueue_many(self, values: Any, *, timeout: float | None = None) -> None:
        """Add several elements in order, without elements of other callers in between.

        Elements are added as space becomes free, so there may be more than the capacity. Zero
        elements are allowed, even on a closed queue.

        Args:
            values: per component an array whose dimension 0 counts the elements.
            timeout: seconds until all must be added; elements added by then stay.

        Raises:
            CancelledError: as `enqueue`; elements added before stay.
            DeadlineExceededError: not all added after `timeout`.
            InvalidArgumentError: a component has another dtype or shape, or sizes differ.
            ValueError: wrong number of components or wrong keys.
        """
        attempt = Enqueue(*self.components.columns(values))
        perform(
            self.state_machine, attempt, "enqueue_many", timeout, self._context, self._stall_reason
        )

    def dequeue(self, *, timeout: float | None = None) -> Any:
        """Remove and return one element; wait while the queue is empty.

        Returns:
            The element; components of shape () are NumPy scalars or Python's `str` or `bytes`.

        Raises:
            OutOfRangeError: the queue is closed and empty.
            DeadlineExceededError: the queue stayed empty for `timeout`.
        """
        attempt = Dequeue()
        perform(self.state_machine, attempt, "dequeue", timeout, self._context, self._stall_reason)
        return self.components.result(attempt.row)

    def dequeue_many(self, count: int, *, timeout: float | None = None) -> Any:
        """Remove several elements as one batch, in order and without gaps from other callers.

        Elements are collected as they are added, so `count` may be more than the capacity.

        Args:
            count: number of elements.
            timeout: seconds to wait.

        Returns:
            Per component an array with `count` as dimension 0.

        Raises:
            OutOfRangeError: the queue is closed and has fewer; they can still be dequeued.
            DeadlineExceededError: fewer were added within `timeout`; they return to the front.
            InvalidArgumentError: the shapes of the queue are not specified.
            ValueError: a negative count.
        """
        return self._dequeue_batch("dequeue_many", count, timeout, up_to=False)

    def dequeue_up_to(self, count: int, *, timeout: float | None = None) -> Any:
        """As `dequeue_many`, but return the last 1 to `count` elements of a closed queue."""
        return self._dequeue_batch("dequeue_up_to", count, timeout, up_to=True)

    def close(self, *, cancel_pending_enqueues: bool = False, timeout: float | None = None) -> None:
        """Close the queue for enqueues; its elements can still be dequeued.

        Args:
            cancel_pending_enqueues: whether to fail waiting enqueues and closes with
                `CancelledError` and close at once; may be repeated. Otherwise wait for them.
            timeout: seconds to wait for pending enqueues.

        Raises:
            CancelledError: closed already (unless cancelling), or cancelled by another close.
            DeadlineExceededError: enqueues still pending after `timeout`; the queue stays open.
        """
        if cancel_pending_enqueues:
            # Not an operation in the line: it must overtake the enqueues that it cancels.
            self.state_machine.close_now()
            return
        perform(self.state_machine, Close(), "close", timeout, self._context, self._stall_reason)

    def cancel_pending(self) -> None:
        """Fail all waiting operations of all threads with `CancelledError`.

        For the end of the process: the queue stays open and keeps its elements.
        """
        self.state_machine.cancel_pending()

    def size(self) -> int:
        """Return the number of elements, without those that waiting dequeues have collected."""
        return len(self.state_machine)

    def is_closed(self) -> bool:
        """Return whether the queue is closed; False while a close waits for pending enqueues."""
        return self.state_machine.closed

    def _stall_reason(self, operation: str) -> str | None:
        """Return why an operation may be waiting; None if a long wait is expected."""
        if operation.startswith("dequeue"):
            # In pipelines of TensorFlow 1 this mistake looks like a hang, so it gets a hint.
            if any(not started.is_set() for started in self.runners):
                return (
                    "the queue's QueueRunner was not started, expected create_threads(start=True) "
                    "or start_queue_runners([runner])"
                )
            why = "too few elements are enqueued"
        else:
            why = "nothing is dequeued"
        return None if is_unlimited() else why

    def _dequeue_batch(
        self, operation: str, count: int, timeout: float | None, *, up_to: bool
    ) -> Any:
        if self.shapes is None:
            # Rows of unknown shape cannot be joined into one array.
            raise InvalidArgumentError(
                f"{operation}: requires a queue with specified shapes (queue: {self.name})"
            )
        if count < 0:
            raise ValueError(f"{operation}: count must not be negative, got {count}")
        attempt = Dequeue(count, up_to=up_to)
        perform(self.state_machine, attempt, operation, timeout, self._context, self._stall_reason)
        # Batches are joined in the caller's thread, not in the one that completes the operation.
        return self.components.result(self.components.join(attempt.pieces or ()))
