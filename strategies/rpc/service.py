"""`Service`: named resources of one task, used by all tasks.

A *task* is a rank of the communicator on which the service was opened. One thread of each task
serves the others. A request that cannot be answered yet is kept by the thing that it concerns, as
an attempt in a queue, and holds no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import collectives as cc
from strategies.cluster.device_spec import DeviceSpec
from strategies.cluster.placement import Placer, devices_of
from strategies.cluster.scopes import PlacementRequest, device, requested_device
from strategies.errors import OpError
from strategies.rpc.client import Reply
from strategies.rpc.message_loop import MessageLoop
from strategies.rpc.multi_request import MultiRequest, RequestTo
from strategies.rpc.registry import Address, ResourceRegistry, ResourceType, current_container
from strategies.rpc.wire import dtype_named

__all__ = ["Service"]


class Service:
    """Named things of all tasks of a communicator; open it with `with` on all of them.

    Args:
        comm: its ranks are the tasks. *Collective*: all of them open the service together, and
            leave the block together: a task serves until all have left, or are dead. One that
            leaves because of an exception does not wait.
        timeout: seconds without a sign of life after which a task that owes an answer counts as
            unreachable. Waiting itself, as for an empty queue, has no such limit.
        locate: returns the task where a thing is to be that was not given a number; `Server` has
            that of its cluster. None: all tasks are workers, in the order of their ranks.

    Raises:
        ValueError: the timeout is not positive.
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

    def __init__(
        self,
        comm: cc.Communicator,
        *,
        timeout: float = 60.0,
        locate: Callable[[PlacementRequest], tuple[int, DeviceSpec]] | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"Service: timeout must be seconds > 0, got {timeout}")
        self.task = comm.rank
        self.size = comm.size
        self._locate = locate or _among_workers(self.size)
        self._containers = ResourceRegistry(self.task)
        self._exchange = MessageLoop(comm, timeout, self._containers.perform)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._exchange.abandon(f"{type(error).__name__}: {error}")
            self._containers.reset()

    def open(
        self,
        kind: ResourceType,
        description: Mapping[str, Any],
        *,
        name: str,
        task: int | str | None = None,
        container: str | None = None,
    ) -> tuple[Address, Any]:
        """Find or make a named thing.

        Args:
            kind: of the thing.
            description: its properties, as its kind understands them.
            name: in the container.
            task: where it is: a number, or a device string such as "/job:worker/task:1"; what that
                leaves open, or None, is decided by the `device` blocks around.
            container: None for the current one.

        Returns:
            Where it is, and the thing itself if that is here, else None.

        Raises:
            InvalidArgumentError: the name belongs to something else.
            UnavailableError: the task cannot be reached.
            CancelledError: the service is closed.
            ValueError: no such task, or no name.
        """
        if not name:
            raise ValueError("open: a thing that tasks share needs a name, got ''")
        task = self.task_of(task, kind.name, name, description)
        address = Address(task, current_container() if container is None else container, name)
        thing = None
        if task == self.task:
            self._exchange.requests.check_open()
            serial, thing = self._containers.open(kind, address, description)
        else:
            arguments = {"kind": kind.name, "is": dict(description)}
            serial = self.request(address, "open", arguments).metadata["serial"]
        return Address(task, address.container, name, serial), thing

    def task_of(
        self,
        task: int | str | None,
        kind: str,
        name: str,
        description: Mapping[str, Any] | None = None,
    ) -> int:
        """Return the number of the task where a thing is to be.

        Args:
            task: as for `open`.
            kind: of the thing, by its name.
            name: of the thing.
            description: its properties; device functions see its shape and dtype.

        Raises:
            ValueError: no such task, or no such device on it.
        """
        if task is None or isinstance(task, str):
            shape, dtype = map((description or {}).get, ("shape", "dtype"))
            thing = PlacementRequest(
                name,
                kind,
                task or "",
                shape=None if shape is None else tuple(shape),
                dtype=dtype_named(dtype) if isinstance(dtype, str) else dtype,
            )
            return self._locate(thing)[0]
        if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < self.size:
            raise ValueError(f"open: no such task, expected 0 .. {self.size - 1}, got {task}")
        return task

    def device_for(self, task: int | str | None, name: str) -> tuple[int, str | None]:
        """Return the number of the task where a function is to run, and on which device there.

        Args:
            task: as for `open`.
            name: of the function.

        Returns:
            The task, and such as "/gpu:1"; None if neither `task` nor the `device` blocks around
            say anything of devices.

        Raises:
            ValueError: no such task, or no such device on it.
        """
        if isinstance(task, int):
            return self.task_of(task, "Function", name), None
        thing = PlacementRequest(name, "Function", task or "", device_types=())
        wish = requested_device(thing)  # once: a device function may answer otherwise the next time
        with device(None):
            number, found = self._locate(thing._replace(device=wish.to_string()))
        if wish.device_type is None and wish.device_index is None:
            return number, None
        return number, f"/{str(found.device_type).lower()}:{found.device_index}"

    def departures(
        self, tasks: Collection[int], timeout: float | None = None
    ) -> dict[int, str | None]:
        """Wait until some tasks ask for nothing more.

        Args:
            tasks: their numbers, without this task's.
            timeout: seconds to wait; None for any time.

        Returns:
            Task -> None if it has left in good order, else what has happened to it.

        Raises:
            DeadlineExceededError: some of them are still there.
            CancelledError: the service was closed meanwhile.
            ValueError: one of them is not another task.
        """
        for task in tasks:
            if task not in range(self.size) or task == self.task:
                raise ValueError(
                    f"departures: expected other tasks than {self.task} among 0 .. "
                    f"{self.size - 1}, got {task}"
                )
        return self._exchange.departures(tasks, timeout)

    def reset(self, containers: Iterable[str] | None = None, *, task: int | str = 0) -> None:
        """Forget the named things of a task; what waits on them ends with `CancelledError`.

        Args:
            containers: which ones; None for all.
            task: whose, as for `open`.
        """
        chosen = None if containers is None else list(containers)
        task = self.task_of(task, "Container", ", ".join(chosen or ()))
        if task == self.task:
            self._containers.reset(chosen)
        else:
            self.request(Address(task, "", ""), "reset", {"containers": chosen})

    def start(
        self,
        address: Address,
        operation: str,
        on_answer: Callable[[Reply], None],
        arguments: Mapping[str, Any] | None = None,
        values: Sequence[Any] = (),
    ) -> int:
        """Ask another task for an operation, without waiting; return the request's number.

        Args:
            address: the thing.
            operation: what to do with it.
            on_answer: called once, in any thread; must not block.
            arguments: what msgpack can carry.
            values: arrays, numbers and text; arrays must not change before the answer.

        Raises:
            CancelledError: the service is closed.
            UnavailableError: the task is dead or has left.
        """
        return self._exchange.requests.start(address, operation, arguments or {}, values, on_answer)

    def request(
        self,
        address: Address,
        operation: str,
        arguments: Mapping[str, Any] | None = None,
        values: Sequence[Any] = (),
    ) -> Reply:
        """As `start`, but wait for the answer, and raise its error."""
        (answer,) = self.ask([RequestTo(address, operation, arguments or {}, values)]).answers()
        if answer.error is not None:
            raise answer.error
        return answer

    def ask(self, questions: Sequence[RequestTo]) -> MultiRequest:
        """Send several requests at once; `answers` of the result waits for them.

        Raises:
            RuntimeError: in the thread that takes answers, which must not wait for one.
            CancelledError: the service is closed.
        """
        if questions and not self.may_wait:
            operation = questions[0].operation
            raise RuntimeError(f"{operation}: called where answers arrive, which must not wait")
        return MultiRequest(self._exchange.requests, questions)

    def here(self, kind: ResourceType, address: Address) -> Any:
        """Return a thing of this task.

        Raises:
            CancelledError: the service is closed.
            NotFoundError: its container was reset.
            AbortedError: its container was reset, and the name used anew.
        """
        self._exchange.requests.check_open()
        return self._containers.find(address, kind)[1]

    @property
    def may_wait(self) -> bool:
        """Whether the current thread is any but the one that takes answers."""
        return not self._exchange.is_here()

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


def _among_workers(size: int) -> Callable[[PlacementRequest], tuple[int, DeviceSpec]]:
    """Return where things are if all tasks are those of one job."""
    placer = Placer({("worker", task): devices_of() for task in range(size)})

    def locate(thing: PlacementRequest) -> tuple[int, DeviceSpec]:
        device = placer.place(thing)
        return device.task or 0, device

    return locate
