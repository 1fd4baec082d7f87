"""Base of all queues: blocking operations over the state machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strategies.errors import InvalidArgumentError
from strategies.queues.components import Components
from strategies.queues.state_machine import Close, Dequeue, Enqueue, QueueStateMachine
from strategies.queues.store import RowStore
from strategies.rpc.operation import perform
from strategies.rpc.wait_limits import is_unlimited

__all__ = ["Queue", "RunnerStatus"]


@dataclass
class RunnerStatus:
    """Status of a `QueueRunner` for its queue, which would otherwise form a reference cycle.

    Attributes:
        started: whether a thread of the runner was ever started.
    """

    started: bool = False


class Queue:
    """What all queues have in common; make one of the kinds of `strategies.queues.queue_types`.

    Values are given and returned per element: bare if there is one component, a tuple if there are
    several, a dict if the queue has names. A list or tuple that is given holds components. Every
    blocking method takes `timeout` in seconds, None to wait as long as it takes.

    Attributes:
        name: for errors and threads.
        capacity: number of elements at which enqueues begin to wait; negative for no limit.
        dtypes: a NumPy dtype, `str` or `bytes` per component.
        shapes: shape of each component of one element, or None if elements may differ; a size is
            None where elements may differ and are padded.
        names: keys of the elements if they are dicts, or None.
        components: what elements consist of; checks and converts values.
        state_machine: for callers that submit attempts instead of waiting in a thread.
        runners: the status of each `QueueRunner` that fills the queue.
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
        self.state_machine = QueueStateMachine(
            store, components, capacity=capacity, min_after_dequeue=min_after_dequeue, name=name
        )
        self.runners: list[RunnerStatus] = []
        self._context = f" (queue: {name}, capacity: {capacity})"  # of errors

    @staticmethod
    def from_list(index: int, queues: list[Queue]) -> Queue:
        """Return one of several queues of the same kind of elements.

        Raises:
            TypeError: not a list of queues, or their dtypes or names differ.
            InvalidArgumentError: the index is not in the list.
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
        """Put one element in, waiting while the queue is full.

        Args:
            values: one value per component. Python's numbers and lists take the dtype of the queue,
                arrays must have it.
            timeout: seconds to wait.

        Raises:
            CancelledError: the queue is closed, or is closed meanwhile with cancelling.
            DeadlineExceededError: still full after `timeout`.
            InvalidArgumentError: a component has another dtype or shape.
            ValueError: wrong number of components or wrong keys.
        """
        attempt = Enqueue(self.components.row(values))
        perform(self.state_machine, attempt, "enqueue", timeout, self._context, self._stall_reason)

    def enqueue_many(self, values: Any, *, timeout: float | None = None) -> None:
        """Put several elements in, in order and not mixed with those of other callers.

        They enter as room appears, so that there may be more than the capacity. None at all is
        fine, even on a closed queue.

        Args:
            values: per component an array whose dimension 0 counts the elements.
            timeout: seconds until all must be in; those that are in by then stay.

        Raises:
            CancelledError: as `enqueue`; elements that are in already stay.
            DeadlineExceededError: not all in after `timeout`.
            InvalidArgumentError: a component has another dtype or shape, or sizes differ.
            ValueError: wrong number of components or wrong keys.
        """
        attempt = Enqueue(*self.components.columns(values))
        perform(
            self.state_machine, attempt, "enqueue_many", timeout, self._context, self._stall_reason
        )

    def dequeue(self, *, timeout: float | None = None) -> Any:
        """Take one element out, waiting until there is one.

        Returns:
            The element; components of shape () are NumPy scalars or Python's `str` or `bytes`.

        Raises:
            OutOfRangeError: the queue is closed and empty.
            DeadlineExceededError: nothing came within `timeout`.
        """
        attempt = Dequeue()
        perform(self.state_machine, attempt, "dequeue", timeout, self._context, self._stall_reason)
        return self.components.result(attempt.row)

    def dequeue_many(self, count: int, *, timeout: float | None = None) -> Any:
        """Take several elements out as one batch, in order and not mixed with other callers'.

        They are collected as they come, so that there may be more than the capacity.

        Args:
            count: how many.
            timeout: seconds to wait.

        Returns:
            Per component an array with `count` as dimension 0.

        Raises:
            OutOfRangeError: the queue is closed and has fewer; they can still be dequeued.
            DeadlineExceededError: fewer came within `timeout`; they go back to the front.
            InvalidArgumentError: the shapes of the queue are not specified.
            ValueError: a negative count.
        """
        return self._dequeue_batch("dequeue_many", count, timeout, up_to=False)

    def dequeue_up_to(self, count: int, *, timeout: float | None = None) -> Any:
        """As `dequeue_many`, but from a closed queue return the 1 to `count` elements left."""
        return self._dequeue_batch("dequeue_up_to", count, timeout, up_to=True)

    def close(self, *, cancel_pending_enqueues: bool = False, timeout: float | None = None) -> None:
        """Say that nothing more will be put in; what is in can still be taken out.

        Args:
            cancel_pending_enqueues: fail enqueues and closes that wait, with `CancelledError`, and
                close at once; may be repeated. Otherwise wait until pending enqueues are in.
            timeout: seconds to wait for pending enqueues.

        Raises:
            CancelledError: closed already (unless cancelling), or cancelled by another close.
            DeadlineExceededError: enqueues still pending after `timeout`; the queue stays open.
        """
        if cancel_pending_enqueues:
            self.state_machine.close_now()
            return
        perform(self.state_machine, Close(), "close", timeout, self._context, self._stall_reason)

    def cancel_pending(self) -> None:
        """Fail all operations that wait, of any thread, with `CancelledError`.

        What belongs to a process that ends; the queue stays open and keeps its elements.
        """
        self.state_machine.cancel_pending()

    def size(self) -> int:
        """Return the number of elements that are in; what a waiting dequeue holds is out."""
        return len(self.state_machine)

    def is_closed(self) -> bool:
        """Return whether the queue is closed; False while a close waits for pending enqueues."""
        return self.state_machine.closed

    def _stall_reason(self, operation: str) -> str | None:
        """Return why an operation may be waiting; None where a long wait is no fault."""
        if operation.startswith("dequeue"):
            if any(not runner.started for runner in self.runners):
                return (
                    "the queue's QueueRunner was not started, expected create_threads(start=True) "
                    "or start_queue_runners([runner])"
                )
            why = "too few elements are put in"
        else:
            why = "nothing is taken out"
        return None if is_unlimited() else why

    def _dequeue_batch(
        self, operation: str, count: int, timeout: float | None, *, up_to: bool
    ) -> Any:
        if self.shapes is None:
            raise InvalidArgumentError(
                f"{operation}: requires a queue with specified shapes (queue: {self.name})"
            )
        if count < 0:
            raise ValueError(f"{operation}: count must not be negative, got {count}")
        attempt = Dequeue(count, up_to=up_to)
        perform(self.state_machine, attempt, operation, timeout, self._context, self._stall_reason)
        return self.components.result(self.components.join(attempt.pieces or ()))
