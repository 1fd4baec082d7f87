"""One line of file names for all ranks: whoever is free takes the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from strategies.queues.engine import Close, Enqueue
from strategies.queues.kinds import FIFOQueue
from strategies.queues.remote import OPERATIONS, RemoteEngine
from strategies.remote.containers import Handler, ResourceKind, register
from strategies.remote.service import Service

__all__ = ["shared_files"]


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
    if num_epochs is not None and num_epochs < 1:
        raise ValueError(f"shared_files: num_epochs must be at least 1 or None, got {num_epochs}")
    if num_epochs is None and capacity < 0:
        raise ValueError(
            f"shared_files: an endless line needs a capacity, expected at least 1, got {capacity}"
        )
    description = {
        "files": [str(file) for file in files],
        "num_epochs": num_epochs,
        "shuffle": shuffle,
        "seed": seed,
        "capacity": capacity,
    }
    address, found = service.open(
        _KIND, description, name=shared_name, task=task, container=container
    )
    if found is not None:
        return found.queue  # type: ignore[no-any-return]
    queue = FIFOQueue(capacity, str, [()], name=shared_name)
    queue.engine = RemoteEngine(service, address)  # type: ignore[assignment]
    return queue


class _Files(NamedTuple):
    """The queue, and what it was made of."""

    queue: FIFOQueue
    description: Mapping[str, Any]


def _make(description: Mapping[str, Any], name: str) -> _Files:
    queue = FIFOQueue(description["capacity"], str, [()], name=name)
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
            queue.engine.submit(attempt)
            if queue.engine.when_done(attempt, partial(go_on, attempt)) or attempt.error:
                return
        queue.engine.submit(Close())

    def go_on(attempt: Enqueue) -> None:
        # What is in the line of a queue that is closed or reset ends here.
        if attempt.error is None:
            fill()

    fill()
    return _Files(queue, dict(description))


def _difference(files: _Files, description: Mapping[str, Any]) -> str | None:
    for what, asked in description.items():
        has = files.description[what]
        if has != asked and not (what == "seed" and asked is None):
            return f"the queue has other {what}, expected {has!r:.200}, got {asked!r:.200}"
    return None


def _on_queue(operation: Handler) -> Handler:
    return lambda files, work: operation(files.queue, work)


_KIND = register(
    ResourceKind(
        "shared_files",
        _make,
        _difference,
        {name: _on_queue(operation) for name, operation in OPERATIONS.items()},
        lambda files: files.queue.cancel_pending(),
    )
)
