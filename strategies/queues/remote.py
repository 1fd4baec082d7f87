"""Queues shared by several tasks.

`shared_queue` creates or finds one. On other tasks the queue has a `RemoteStateMachine`, which
sends each operation to the queue's task. The functions at the end of this module submit it there.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from strategies.errors import InvalidArgumentError, OpError
from strategies.queues.dtypes import as_dtype
from strategies.queues.queue_types import (
    FIFOQueue,
    PaddingFIFOQueue,
    PriorityQueue,
    Queue,
    RandomShuffleQueue,
)
from strategies.queues.state_machine import Close, Dequeue, Enqueue
from strategies.rpc.client import Reply
from strategies.rpc.operation import PendingOperation, RemoteAttempts, serve
from strategies.rpc.registry import Handler, ResourceType, describe_difference, register_type
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.service import Service
from strategies.rpc.wire import dtype_named

__all__ = ["OPERATIONS", "RemoteStateMachine", "shared_queue"]

_log = logging.getLogger(__name__)

Q = TypeVar("Q", bound=Queue)

# Properties that all constructors must agree on, in the order of reports.
_PROPERTIES = ("capacity", "min_after_dequeue", "dtypes", "shapes", "names", "seed")


def shared_queue(
    kind: type[Q],
    *arguments: Any,
    service: Service,
    shared_name: str,
    task: int | str | None = None,
    container: str | None = None,
    **properties: Any,
) -> Q:
    """Create a queue on a task, or find it there; the first task to call creates it.

    The result works like any other queue on all tasks: the same operations, deadlines and errors.
    On other tasks, operations may also raise `UnavailableError` (the task is dead, has left, or
    does not respond), and `NotFoundError` or `AbortedError` after a reset of the container.

    If a task dies before a row arrives there, the row returns to the queue. Rows that have arrived
    are lost with the task.

    Args:
        kind: class of the queue, such as `FIFOQueue`.
        arguments: arguments of the class.
        service: service that is open on all tasks.
        shared_name: name of the queue; also its `name`.
        task: task of the queue: a number, or a device string such as "/job:worker/task:1". The
            enclosing `device` blocks supply missing parts, or all of it for None. The default is
            task 0 (of a `Cluster`: the chief, otherwise worker 0).
        container: namespace of `shared_name`; None for the current one.
        properties: keyword arguments of the class, without `name`.

    Returns:
        The queue itself on its task; on other tasks a queue of the same class that works there.

    Raises:
        InvalidArgumentError: the name belongs to a queue of another kind or with another property,
            which the message names. A seed of None matches any.
        UnavailableError: the task cannot be reached.
        ValueError: the task does not exist, the name is empty, or as the class.
        TypeError: `kind` is not a queue class of this package, or as the class.

    Example:
        >>> import collectives as cc
        >>> with Service(cc.init()) as service:
        ...     queue = shared_queue(FIFOQueue, 8, str, [()], service=service, shared_name="files")
        ...     queue.enqueue("a.csv")
        ...     queue.dequeue()
        'a.csv'
    """
    if kind not in _KINDS:
        raise TypeError(
            f"shared_queue: expected one of {' '.join(sorted(k.__name__ for k in _KINDS))}, "
            f"got {kind!r}"
        )
    queue = kind(*arguments, **properties, name=shared_name)  # also checks the arguments
    address, found = service.open(
        _KINDS[kind],
        _description(kind, arguments, properties),
        name=shared_name,
        task=task,
        container=container,
    )
    if found is not None:
        # The queue that the first caller has made, on this task or another, not the one above.
        return found  # type: ignore[no-any-return]
    queue.components.copies = False  # enqueued arrays are sent before the call returns
    queue.state_machine = RemoteStateMachine(service, address)  # type: ignore[assignment]
    return queue


def _description(
    kind: type[Queue], arguments: tuple[Any, ...], properties: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a constructor's arguments in types that msgpack supports."""
    # By name, so that all tasks may pass them by position or by keyword.
    given = dict(inspect.signature(kind).bind(*arguments, **properties).arguments)
    if "dtypes" in given:
        dtypes = given["dtypes"]
        listed = dtypes if isinstance(dtypes, (list, tuple)) else [dtypes]
        # Dtypes as names and shapes as lists, because msgpack has neither dtypes nor tuples.
        known = [as_dtype(dtype) for dtype in listed]
        given["dtypes"] = [d.__name__ if isinstance(d, type) else d.name for d in known]
    if given.get("shapes") is not None:
        given["shapes"] = [list(shape) for shape in given["shapes"]]
    if given.get("names") is not None:
        given["names"] = list(given["names"])
    return given


def _make(kind: type[Queue], description: Mapping[str, Any], name: str) -> Queue:
    given = dict(description)
    if "dtypes" in given:
        text = {"str": str, "bytes": bytes}
        given["dtypes"] = [text.get(d) or dtype_named(d) for d in given["dtypes"]]
    return kind(**given, name=name)


def _difference(queue: Queue, description: Mapping[str, Any]) -> str | None:
    # Made again, so that defaults and spellings of dtypes compare equal.
    wanted = _make(type(queue), description, queue.name)
    has, asked = ({what: getattr(of, what, None) for what in _PROPERTIES} for of in (queue, wanted))
    return describe_difference("queue", has, asked, optional=["seed"])


class RemoteStateMachine(RemoteAttempts):
    """Client of the state machine of a queue on another task."""

    def __len__(self) -> int:
        return int(self.service.request(self.address, "size").metadata["size"])

    @property
    def closed(self) -> bool:
        """Whether the queue is closed."""
        return bool(self.service.request(self.address, "is_closed").metadata["closed"])

    def close_now(self) -> None:
        """Close and fail all waiting enqueues and closes; rows in the queue stay."""
        self.service.request(self.address, "close_now")

    def submit(self, attempt: PendingOperation) -> None:
        """Send an operation, or complete it if it has nothing to do."""
        if attempt.count == 0:
            # Saves a message: nothing happens on the queue's task either.
            attempt.complete()
            attempt.notify()
        else:
            super().submit(attempt)

    def request_of(self, attempt: PendingOperation) -> tuple[str, dict[str, Any], list[Any]]:
        """Return operation, arguments and values."""
        if isinstance(attempt, Enqueue):
            return "enqueue", {"count": attempt.count}, list(attempt.rows)
        if isinstance(attempt, Dequeue):
            return "dequeue", {"count": attempt.count, "up_to": attempt.up_to}, []
        assert isinstance(attempt, Close)
        return "close", {}, []

    def answered(self, attempt: PendingOperation, answer: Reply) -> None:
        """Store the result of an operation."""
        if isinstance(attempt, Dequeue):
            _fill(attempt, answer.metadata["pieces"], answer.values)
        elif isinstance(attempt, Enqueue):
            attempt.entered = attempt.count or 1

    def give_back(self, attempt: PendingOperation) -> None:
        """Send back rows that have arrived although the caller does not wait any more."""
        if not isinstance(attempt, Dequeue) or not (attempt.row or attempt.pieces):
            return
        pieces, values = _rows_of(attempt)
        # Emptied first, so that rows are sent back once.
        attempt.row, attempt.pieces, attempt.taken = (), None, 0
        try:
            given = {"pieces": pieces}
            # Without waiting, because the thread that receives replies may run this.
            self.service.start(self.address, "give_back", lambda _: None, given, values)
        except OpError as error:
            _log.warning("queue: rows could not be given back: %s", error)


def _rows_of(attempt: Dequeue) -> tuple[int, list[Any]]:
    """Return the rows of a dequeue as sent: a number of batches (0 for a single row), values."""
    pieces = attempt.pieces or []
    return len(pieces), [column for piece in pieces for column in piece] or list(attempt.row)


def _fill(attempt: Dequeue, pieces: int, values: Sequence[Any]) -> None:
    """Undo `_rows_of`."""
    if attempt.count is None:
        attempt.row = tuple(values)
        return
    # All pieces have the same number of columns, so their number gives the width.
    width = max(len(values) // max(pieces, 1), 1)
    attempt.pieces = [tuple(values[at : at + width]) for at in range(0, len(values), width)]
    attempt.taken = sum(len(piece[0]) for piece in attempt.pieces)


# Operations on the queue's task.


def _enqueue(queue: Queue, work: ServerRequest) -> None:
    rows, count = tuple(work.values), work.arguments["count"]
    # Checked again here: a damaged request must not break the store, which assumes equal lengths.
    fits = count is None or all(np.shape(column)[:1] == (count,) for column in rows)
    if len(rows) != len(queue.dtypes) or not fits:
        raise InvalidArgumentError(f"enqueue: expected {len(queue.dtypes)} columns of {count} rows")
    serve(queue.state_machine, Enqueue(rows, count), work, lambda done: work.reply())


def _dequeue(queue: Queue, work: ServerRequest) -> None:
    def answer(attempt: Dequeue) -> None:
        pieces, values = _rows_of(attempt)
        # Confirmed, so that the rows return to the queue if the caller's task dies before they
        # arrive.
        work.reply(values, confirm=True, pieces=pieces)

    wanted = Dequeue(work.arguments["count"], up_to=work.arguments["up_to"])
    serve(queue.state_machine, wanted, work, answer)


def _close_now(queue: Queue, work: ServerRequest) -> None:
    queue.state_machine.close_now()
    work.reply()


def _give_back(queue: Queue, work: ServerRequest) -> None:
    """Take back the rows of a finished dequeue whose caller was interrupted."""
    pieces = work.arguments["pieces"]
    # A finished dequeue with these rows, so that `abandon` puts them back.
    attempt = Dequeue(len(work.values) if pieces else None)
    _fill(attempt, pieces, work.values)
    attempt.complete()
    queue.state_machine.abandon(attempt)
    work.reply()


OPERATIONS: dict[str, Handler] = {
    "close": lambda queue, work: serve(queue.state_machine, Close(), work, lambda _: work.reply()),
    "close_now": _close_now,
    "dequeue": _dequeue,
    "enqueue": _enqueue,
    "give_back": _give_back,
    "is_closed": lambda queue, work: work.reply(closed=queue.is_closed()),
    "size": lambda queue, work: work.reply(size=queue.size()),
}


# One type per class, so that opening a name as another class fails.
_KINDS: dict[type[Queue], ResourceType] = {
    kind: register_type(
        ResourceType(
            kind.__name__, partial(_make, kind), _difference, OPERATIONS, kind.cancel_pending
        )
    )
    for kind in (FIFOQueue, PaddingFIFOQueue, PriorityQueue, RandomShuffleQueue)
}
