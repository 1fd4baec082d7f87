"""Shared queues of file names or numbers, from which each task takes the next when it is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from strategies.core.validation import integer
from strategies.queues.queue import check_capacity
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

    A slow task, or one with long files, takes fewer files. Pass the queue to a reader like a local
    one. No thread fills the queue: removing a name makes room for the next. The assignment of files
    to tasks is not reproducible. If a reader dies, the rest of its file is lost to the epoch.

    Args:
        files: names; the same on all tasks.
        service: service that is open on all tasks.
        shared_name: name of the queue.
        task: task of the queue, as for `shared_queue`.
        container: as for `shared_queue`.
        num_epochs: number of epochs before the queue is closed; None repeats forever.
        shuffle: whether to reshuffle the names in each epoch; epochs are never mixed.
        seed: seed of the shuffling; None for a different order each time.
        capacity: capacity of the queue; negative for no limit, which needs `num_epochs`.

    Raises:
        InvalidArgumentError: another task passed other files or options.
        UnavailableError: the task cannot be reached.
        ValueError: no files, `num_epochs` below 1, a capacity of 0, or neither `num_epochs` nor a
            capacity.
    """
    if isinstance(files, str) or not len(files):
        raise ValueError(f"shared_files: expected a sequence of file names, got {files!r}")
    # The names travel with the description: the first task fills the queue, and all tasks compare.
    described = {
        "files": [str(file) for file in files],
        **_checked("shared_files", num_epochs, shuffle, seed, capacity),
    }
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

    If every task has, or maps, the same arrays, `x[numbers], y[numbers]` are rows that belong
    together. In each epoch one task takes each row.

    Args:
        limit: number of numbers per epoch, at least 1.
        service: as for `shared_files`.
        shared_name: name of the queue.
        task: task of the queue.
        container: namespace of the name.
        num_epochs: number of epochs before the queue is closed; None repeats forever.
        shuffle: whether to reshuffle the numbers in each epoch.
        seed: seed of the shuffling.
        capacity: capacity of the queue; a `dequeue_many` may be larger.
        rows: descriptions of the rows, which must be equal on all tasks.

    Raises:
        InvalidArgumentError: another task passed another limit, other rows or other options.
        UnavailableError: the task cannot be reached.
        ValueError: `limit` or `num_epochs` below 1, a capacity of 0, or neither `num_epochs` nor a
            capacity.

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
    options = _checked("shared_range", num_epochs, shuffle, seed, capacity)
    described = {"limit": int(limit), "rows": list(rows), **options}
    return _open(described, service, shared_name, task, container)


def _checked(
    operation: str, num_epochs: int | None, shuffle: bool, seed: int | None, capacity: int
) -> dict[str, Any]:
    """Check the options of a shared queue; return them for its description."""
    if seed is not None:
        integer(operation, "seed", seed, least=0)
    if num_epochs is not None and num_epochs < 1:
        raise ValueError(f"{operation}: num_epochs must be at least 1 or None, got {num_epochs}")
    check_capacity(operation, capacity, endless=num_epochs is None)
    return {"num_epochs": num_epochs, "shuffle": shuffle, "seed": seed, "capacity": capacity}


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
    """A shared queue and its description."""

    queue: FIFOQueue
    description: Mapping[str, Any]


def _make(description: Mapping[str, Any], name: str) -> _SharedQueue:
    queue = _empty(description, name)
    names: Any
    if "limit" in description:
        names = np.arange(description["limit"])
    else:
        # Objects, so that names of any length are kept as Python text.
        names = np.empty(len(description["files"]), object)
        names[:] = description["files"]
    # One generator for all epochs, so that each epoch has another order.
    order = np.random.default_rng(description["seed"])
    left = description["num_epochs"]

    def fill() -> None:
        """Enqueue epochs until one waits for room; its completion continues."""
        nonlocal left
        while left != 0:
            # None stays None: epochs without end.
            left = left and left - 1
            epoch = names[order.permutation(len(names))] if description["shuffle"] else names
            # One operation per epoch, whatever the capacity: it waits in the queue, not in a
            # thread.
            attempt = Enqueue((epoch,), len(epoch))
            queue.state_machine.submit(attempt)
            # `when_done` returns False for an epoch that fits at once; the loop then continues
            # without recursion.
            if queue.state_machine.when_done(attempt, partial(go_on, attempt)) or attempt.error:
                return
        # All names are in the queue by now, and readers still get them.
        queue.state_machine.submit(Close())

    def go_on(attempt: Enqueue) -> None:
        # If the queue was closed or reset, the waiting epoch ends here.
        if attempt.error is None:
            fill()

    fill()
    return _SharedQueue(queue, dict(description))


def _difference(files: _SharedQueue, description: Mapping[str, Any]) -> str | None:
    # Files and numbers share one type of resource, so a name may belong to the other kind.
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
