"""Queues shared by several tasks.

`shared_queue` makes one or finds it. On other tasks it has a `RemoteStateMachine`, which sends
every attempt to the queue's task, where the functions at the end submit it to the state machine.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
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
from strategies.rpc.registry import Handler, ResourceType, register_type
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.service import Service
from strategies.rpc.wire import dtype_named

__all__ = ["OPERATIONS", "RemoteStateMachine", "shared_queue"]

_log = logging.getLogger(__name__)

Q = TypeVar("Q", bound=Queue)

# What two constructors must agree in, in the order in which a difference is reported.
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
    """Make a queue that lives on a task, or find it there: whichever task asks first makes it.

    The result is a queue like any other, also on other tasks: the same operations, deadlines and
    errors. There, besides, every operation may raise `UnavailableError` (the task is dead, has
    left, or is silent), and after a reset of the container `NotFoundError` or `AbortedError`.

    A row that is on its way to a task that dies goes back to the queue. One that has arrived there
    belongs to that task, and is lost with it.

    Args:
        kind: class of the queue, such as `FIFOQueue`.
        arguments: of the class.
        service: open on all tasks.
        shared_name: of the queue; also its `name`.
        task: where the queue lives: a number, or a device string such as "/job:worker/task:1"; what
            that leaves open, or None, is decided by the `device` blocks around, and at last it is
            task 0 (of a `Cluster`: the chief, else worker 0).
        container: set of names that `shared_name` belongs to; None for the current one.
        properties: keyword arguments of the class, without `name`.

    Returns:
        The queue itself on its task, elsewhere a queue of the same class that works there.

    Raises:
        InvalidArgumentError: the name belongs to a queue of another kind or with another property;
            says which. A seed of None fits any.
        UnavailableError: the task cannot be reached.
        ValueError: no such task, no name, or as the class.
        TypeError: not one of the queues' classes, or as the class.

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
        return found  # type: ignore[no-any-return]
    queue.components.copies = False  # arrays are not needed any more when the call returns
    queue.state_machine = RemoteStateMachine(service, address)  # type: ignore[assignment]
    return queue


def _description(
    kind: type[Queue], arguments: tuple[Any, ...], properties: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a constructor's arguments as msgpack can carry them."""
    given = dict(inspect.signature(kind).bind(*arguments, **properties).arguments)
    if "dtypes" in given:
        dtypes = given["dtypes"]
        listed = dtypes if isinstance(dtypes, (list, tuple)) else [dtypes]
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
    wanted = _make(type(queue), description, queue.name)
    for what in _PROPERTIES:
        has, asked = getattr(queue, what, None), getattr(wanted, what, None)
        if has != asked and not (what == "seed" and asked is None):
            return f"the queue has another {what}, expected {has}, got {asked}"
    return None


class RemoteStateMachine(RemoteAttempts):
    """Client of the state machine of a queue on another task."""

    def __len__(self) -> int:
        return int(self.service.request(self.address, "size").metadata["size"])

    @property
    def closed(self) -> bool:
        """Whether the queue is closed."""
        return bool(self.service.request(self.address, "is_closed").metadata["closed"])

    def close_now(self) -> None:
        """Close and fail all that waits on the enqueue side; rows that are in stay."""
        self.service.request(self.address, "close_now")

    def submit(self, attempt: PendingOperation) -> None:
        """Send an attempt on its way, unless there is nothing to do."""
        if attempt.count == 0:
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
        """Note what came of an attempt."""
        if isinstance(attempt, Dequeue):
            _fill(attempt, answer.metadata["pieces"], answer.values)
        elif isinstance(attempt, Enqueue):
            attempt.entered = attempt.count or 1

    def give_back(self, attempt: PendingOperation) -> None:
        """Return rows that have come and that nobody will take."""
        if not isinstance(attempt, Dequeue) or not (attempt.row or attempt.pieces):
            return
        pieces, values = _rows_of(attempt)
        attempt.row, attempt.pieces, attempt.taken = (), None, 0
        try:
            given = {"pieces": pieces}
            self.service.start(self.address, "give_back", lambda _: None, given, values)
        except OpError as error:
            _log.warning("queue: rows could not be given back: %s", error)


def _rows_of(attempt: Dequeue) -> tuple[int, list[Any]]:
    """Return what a dequeue has taken, as it travels: a number of batches, 0 for a single row."""
    pieces = attempt.pieces or []
    return len(pieces), [column for piece in pieces for column in piece] or list(attempt.row)


def _fill(attempt: Dequeue, pieces: int, values: Sequence[Any]) -> None:
    """Undo `_rows_of`."""
    if attempt.count is None:
        attempt.row = tuple(values)
        return
    width = max(len(values) // max(pieces, 1), 1)
    attempt.pieces = [tuple(values[at : at + width]) for at in range(0, len(values), width)]
    attempt.taken = sum(len(piece[0]) for piece in attempt.pieces)


# Operations, at the task where the queue is.


def _enqueue(queue: Queue, work: ServerRequest) -> None:
    rows, count = tuple(work.values), work.arguments["count"]
    fits = count is None or all(np.shape(column)[:1] == (count,) for column in rows)
    if len(rows) != len(queue.dtypes) or not fits:
        raise InvalidArgumentError(f"enqueue: expected {len(queue.dtypes)} columns of {count} rows")
    serve(queue.state_machine, Enqueue(rows, count), work, lambda done: work.reply())


def _dequeue(queue: Queue, work: ServerRequest) -> None:
    def answer(attempt: Dequeue) -> None:
        pieces, values = _rows_of(attempt)
        work.reply(values, confirm=True, pieces=pieces)

    wanted = Dequeue(work.arguments["count"], up_to=work.arguments["up_to"])
    serve(queue.state_machine, wanted, work, answer)


def _close(queue: Queue, work: ServerRequest) -> None:
    serve(queue.state_machine, Close(), work, lambda done: work.reply())


def _close_now(queue: Queue, work: ServerRequest) -> None:
    queue.state_machine.close_now()
    work.reply()


def _give_back(queue: Queue, work: ServerRequest) -> None:
    """Take back rows of a finished dequeue whose caller was interrupted."""
    pieces = work.arguments["pieces"]
    attempt = Dequeue(len(work.values) if pieces else None)
    _fill(attempt, pieces, work.values)
    attempt.complete()
    queue.state_machine.abandon(attempt)
    work.reply()


OPERATIONS: dict[str, Handler] = {
    "close": _close,
    "close_now": _close_now,
    "dequeue": _dequeue,
    "enqueue": _enqueue,
    "give_back": _give_back,
    "is_closed": lambda queue, work: work.reply(closed=queue.is_closed()),
    "size": lambda queue, work: work.reply(size=queue.size()),
}


def _kind(queue: type[Queue]) -> ResourceType:
    make: Callable[[Mapping[str, Any], str], Queue] = partial(_make, queue)
    return register_type(
        ResourceType(queue.__name__, make, _difference, OPERATIONS, queue.cancel_pending)
    )


_KINDS: dict[type[Queue], ResourceType] = {
    queue: _kind(queue)
    for queue in (FIFOQueue, PaddingFIFOQueue, PriorityQueue, RandomShuffleQueue)
}
