"""Shared queues of file names or numbers, from which free ranks take the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from strategies.core.validation import integer
from strategies.queues.queue_types import FIFOQueue
from strategies.queues.remote import OPERATIONS, RemoteStateMachine
from strategies.queues.state_machine import Close, Enqueue
from strategies.rpc.registry import Handler, ResourceType, register_type
from strategies.rpc.service import Service

__all__ = ["shared_files", "shared_range"]


def shared_files(
    files: Sequence[str],
    *,
    service: Service,
    shared_name: str,
    task: int | str | None = None,
    container: str | None = None,
    num_epochs: int | None = 1,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
) -> FIFOQueue:
    """Offer file names to all tasks through one queue, all of them in each epoch.

    A task that is slow, or whose files are long, takes fewer of them. It gives the queue to a
    reader as it would one of its own. No thread fills the queue: a name that is taken makes room
    for the next. Which task reads what is not reproducible, and the rest of a file is lost to the
    epoch if its reader dies.

    Args:
        files: names; the same on all tasks.
        service: open on all tasks.
        shared_name: of the queue.
        task: where the queue lives, as for `shared_queue`.
        container: as for `shared_queue`.
        num_epochs: after so many the queue is closed; None to go on for ever.
        shuffle: whether to shuffle the names anew in each epoch; epochs are never mixed.
        seed: of the shuffling; None for a different order each time.
        capacity: of the queue; negative for no limit, if the epochs have an end.

    Raises:
        InvalidArgumentError: another task meant other files or another way to go through them.
        UnavailableError: the task cannot be reached.
        ValueError: no files, `num_epochs` below 1, or neither an end nor a limit.
    """
    if isinstance(files, str) or not len(files):
        raise ValueError(f"shared_files: expected a sequence of file names, got {files!r}")
    line = _EpochPlan(num_epochs, shuffle, seed, capacity)
    line.check("shared_files")
    described = {"files": [str(file) for file in files], **line._asdict()}
    return _open(described, service, shared_name, task, container)


def shared_range(
    limit: int,
    *,
    service: Service,
    shared_name: str,
    task: int | str | None = None,
    container: str | None = None,
    num_epochs: int | None = 1,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 1024,
    rows: Sequence[str] = (),
) -> FIFOQueue:
    """Offer the int64 numbers from 0 to `limit` - 1 to all tasks, as `shared_files` offers names.

    With arrays that every task has, or maps, `x[numbers], y[numbers]` are rows that belong
    together, each taken by one task in an epoch.

    Args:
        limit: how many numbers an epoch has, at least 1.
        service: as for `shared_files`, as are all others.
        shared_name: of the queue.
        task: where the queue lives.
        container: of the name.
        num_epochs: after so many the queue is closed; None to go on for ever.
        shuffle: whether to shuffle the numbers anew in each epoch.
        seed: of the shuffling.
        capacity: of the queue; a `dequeue_many` of more is served as well.
        rows: what the numbers stand for, in words that all tasks must have alike.

    Raises:
        InvalidArgumentError: another task meant another limit, other rows, or another way to go
            through them.
        UnavailableError: the task cannot be reached.
        ValueError: `limit` or `num_epochs` below 1, or neither an end nor a capacity.

    Example:
        >>> import collectives as cc
        >>> x, y = np.arange(6.0), np.arange(6) % 2
        >>> with Service(cc.init()) as service:
        ...     rows = shared_range(6, service=service, shared_name="rows", shuffle=False)
        ...     numbers = rows.dequeue_many(4)
        ...     x[numbers].tolist(), y[numbers].tolist()
        ([0.0, 1.0, 2.0, 3.0], [0, 1, 0, 1])
    """
    integer("shared_range", "limit", limit)
    line = _EpochPlan(num_epochs, shuffle, seed, capacity)
    line.check("shared_range")
    described = {"limit": int(limit), "rows": list(rows), **line._asdict()}
    return _open(described, service, shared_name, task, container)


class _EpochPlan(NamedTuple):
    """How elements are gone through."""

    num_epochs: int | None
    shuffle: bool
    seed: int | None
    capacity: int

    def check(self, operation: str) -> None:
        """Refuse what is of no use."""
        if self.seed is not None:
            integer(operation, "seed", self.seed, least=0)
        if self.num_epochs is not None and self.num_epochs < 1:
            raise ValueError(
                f"{operation}: num_epochs must be at least 1 or None, got {self.num_epochs}"
            )
        if self.num_epochs is None and self.capacity < 0:
            raise ValueError(
                f"{operation}: an endless line needs a capacity, expected at least 1, got "
                f"{self.capacity}"
            )


def _open(
    description: dict[str, Any],
    service: Service,
    name: str,
    task: int | str | None,
    container: str | None,
) -> FIFOQueue:
    address, found = service.open(_KIND, description, name=name, task=task, container=container)
    if found is not None:
        return found.queue  # type: ignore[no-any-return]
    queue = _empty(description, name)
    queue.state_machine = RemoteStateMachine(service, address)  # type: ignore[assignment]
    return queue


def _empty(description: Mapping[str, Any], name: str) -> FIFOQueue:
    kind: Any = np.int64 if "limit" in description else str
    return FIFOQueue(description["capacity"], kind, [()], name=name)


class _SharedQueue(NamedTuple):
    """The queue, and what it was made of."""

    queue: FIFOQueue
    description: Mapping[str, Any]


def _make(description: Mapping[str, Any], name: str) -> _SharedQueue:
    queue = _empty(description, name)
    names: Any
    if "limit" in description:
        names = np.arange(description["limit"])
    else:
        names = np.empty(len(description["files"]), object)
        names[:] = description["files"]
    order = np.random.default_rng(description["seed"])
    left = description["num_epochs"]

    def fill() -> None:
        """Enqueue epochs, until one waits for room; whoever makes that goes on."""
        nonlocal left
        while left != 0:
            left = left and left - 1
            epoch = names[order.permutation(len(names))] if description["shuffle"] else names
            attempt = Enqueue((epoch,), len(epoch))
            queue.state_machine.submit(attempt)
            if queue.state_machine.when_done(attempt, partial(go_on, attempt)) or attempt.error:
                return
        queue.state_machine.submit(Close())

    def go_on(attempt: Enqueue) -> None:
        # What is in the line of a queue that is closed or reset ends here.
        if attempt.error is None:
            fill()

    fill()
    return _SharedQueue(queue, dict(description))


def _difference(files: _SharedQueue, description: Mapping[str, Any]) -> str | None:
    if description.keys() != files.description.keys():
        return "one of file names and numbers is the other"
    for what, asked in description.items():
        has = files.description[what]
        if has != asked and not (what == "seed" and asked is None):
            return f"the queue has other {what}, expected {has!r:.200}, got {asked!r:.200}"
    return None


def _on_queue(operation: Handler) -> Handler:
    return lambda files, work: operation(files.queue, work)


_KIND = register_type(
    ResourceType(
        "shared_files",
        _make,
        _difference,
        {name: _on_queue(operation) for name, operation in OPERATIONS.items()},
        lambda files: files.queue.cancel_pending(),
    )
)
