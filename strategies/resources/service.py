"""Named things that live on one task and are used from all of them.

A *task* is a rank of the communicator on which the service was opened. One thread of each task
serves the others. A request that cannot be answered yet is kept by the thing that it concerns, as
an attempt in a queue, and holds no thread.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import collectives as cc
from strategies.errors import OpError
from strategies.resources.container import (
    Containers,
    Place,
    ResourceKind,
    current_container,
)
from strategies.resources.exchange import Exchange
from strategies.resources.requests import Answer

__all__ = ["Service"]


# All ranks are the tasks of one job.
_JOB = "worker"
_DEVICE = re.compile(
    rf"(?:/job:{_JOB})?(?:/replica:0)?/task:(\d+)(?:/(?:device:)?cpu:0)?", re.ASCII | re.I
)


class Service:
    """Named things of all tasks of a communicator; open it with `with` on all of them.

    Args:
        comm: its ranks are the tasks. *Collective*: all of them open the service together, and
            leave the block together: a task serves until all have left, or are dead. One that
            leaves because of an exception does not wait.
        timeout: seconds without a sign of life after which a task that owes an answer counts as
            unreachable. Waiting itself, as for an empty queue, has no such limit.

    Raises:
        ValueError: the timeout is no time.
        LaunchError: MPI was started without support for several threads.

    Attributes:
        task: number of this task.
        size: number of tasks.

    Example:
        >>> import collectives as cc
        >>> with Service(cc.init()) as service:
        ...     service.task < service.size
        True
    """

    def __init__(self, comm: cc.Communicator, *, timeout: float = 60.0) -> None:
        if not timeout > 0:
            raise ValueError(f"Service: timeout must be seconds > 0, got {timeout}")
        self.task = comm.rank
        self.size = comm.size
        self._containers = Containers(self.task)
        self._exchange = Exchange(comm, timeout, self._containers.perform)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._exchange.abandon(f"{type(error).__name__}: {error}")
            self._containers.reset()

    def open(
        self,
        kind: ResourceKind,
        description: Mapping[str, Any],
        *,
        name: str,
        task: int | str = 0,
        container: str | None = None,
    ) -> tuple[Place, Any]:
        """Find or make a named thing.

        Args:
            kind: of the thing.
            description: its properties, as its kind understands them.
            name: in the container.
            task: where it is: a number, or a device string such as "/job:worker/task:1".
            container: None for the current one.

        Returns:
            Where it is, and the thing itself if that is here, else None.

        Raises:
            InvalidArgumentError: the name belongs to something else.
            UnavailableError: the task cannot be reached.
            CancelledError: the service is closed.
            ValueError: no such task, or no name.
        """
        task = self._number(task)
        if not name:
            raise ValueError("open: a thing that tasks share needs a name, got ''")
        place = Place(task, current_container() if container is None else container, name)
        thing = None
        if task == self.task:
            self._exchange.requests.check_open()
            serial, thing = self._containers.open(kind, place, description)
        else:
            arguments = {"kind": kind.name, "is": dict(description)}
            serial = self.request(place, "open", arguments).metadata["serial"]
        return Place(task, place.container, name, serial), thing

    def _number(self, task: int | str) -> int:
        """Return a task's number; a device string names it, and perhaps the one job there is."""
        number = task
        if isinstance(task, str):
            found = _DEVICE.fullmatch(task)
            if found is None:
                raise ValueError(
                    "open: no task in this device string, expected one such as /task:1 or "
                    f"/job:{_JOB}/task:1/cpu:0, got {task!r}"
                )
            number = int(found[1])
        if not isinstance(number, int) or not 0 <= number < self.size:
            raise ValueError(f"open: no such task, expected 0 .. {self.size - 1}, got {task}")
        return number

    def reset(self, containers: Iterable[str] | None = None, *, task: int | str = 0) -> None:
        """Forget the named things of a task; what waits on them ends with `CancelledError`.

        Args:
            containers: which ones; None for all.
            task: whose, as for `open`.
        """
        task = self._number(task)
        chosen = None if containers is None else list(containers)
        if task == self.task:
            self._containers.reset(chosen)
        else:
            self.request(Place(task, "", ""), "reset", {"containers": chosen})

    def start(
        self,
        place: Place,
        operation: str,
        on_answer: Callable[[Answer], None],
        arguments: Mapping[str, Any] | None = None,
        values: Sequence[Any] = (),
    ) -> int:
        """Ask another task for an operation, without waiting; return the request's number.

        Args:
            place: the thing.
            operation: what to do with it.
            on_answer: called once, in any thread; must not block.
            arguments: what msgpack can carry.
            values: arrays, numbers and text; arrays must not change before the answer.

        Raises:
            CancelledError: the service is closed.
            UnavailableError: the task is dead or has left.
        """
        return self._exchange.requests.start(place, operation, arguments or {}, values, on_answer)

    def request(
        self,
        place: Place,
        operation: str,
        arguments: Mapping[str, Any] | None = None,
        values: Sequence[Any] = (),
    ) -> Answer:
        """As `start`, but wait for the answer, and raise its error."""
        if self._exchange.is_here():
            raise RuntimeError(f"{operation}: called where answers arrive, which must not wait")
        answers: list[Answer] = []
        asleep = threading.Lock()
        asleep.acquire()

        def take(answer: Answer) -> None:
            answers.append(answer)
            asleep.release()

        number = self.start(place, operation, take, arguments, values)
        try:
            asleep.acquire()  # ends: a task that does not answer is given up after `timeout`
        except BaseException:
            self.disown(number)
            raise
        if answers[0].error is not None:
            raise answers[0].error
        return answers[0]

    def withdraw(self, number: int, error: OpError) -> None:
        """Ask that a request that waits ends with this error; the answer still comes."""
        self._exchange.requests.withdraw(number, error)

    def disown(self, number: int) -> bool:
        """Ask that a request is undone, and forget it; False if its answer has come."""
        return self._exchange.requests.disown(number)

    def close(self) -> None:
        """Wait until all tasks have left; *collective*, harmless when repeated.

        Requests of other threads that still wait end with `CancelledError`.

        Raises:
            InternalError: the service's thread has failed.
        """
        try:
            self._exchange.close()
        finally:
            self._containers.reset()
