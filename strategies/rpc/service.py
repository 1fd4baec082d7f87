"""`Service`: named resources of one task, used by all tasks.

A *task* is a rank of the service's communicator. One thread of each task serves the other tasks. A
request that has to wait is queued by its resource, and holds no thread.
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
    """Named resources of all tasks of a communicator; open it with `with` on all of them.

    Args:
        comm: communicator whose ranks are the tasks. *Collective*: all tasks open the service and
            leave the block together. A task serves until all tasks have left or are dead. A task
            that leaves with an exception does not wait.
        timeout: seconds without a sign of life after which a task that owes a reply counts as
            unreachable. Operations that wait, such as on an empty queue, have no such limit.
        locate: returns task and device for a resource without a task number; `Server` passes the
            placement of its cluster. None: all tasks are workers, in rank order.

    Raises:
        ValueError: the timeout is not positive.
        LaunchError: MPI was started without thread support.

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
        """Find or create a named resource.

        Args:
            kind: type of the resource.
            description: properties, as defined by the type.
            name: name in the container.
            task: number, or a device string such as "/job:worker/task:1". The enclosing `device`
                blocks fill in missing parts, or all of it for None.
            container: container of the name; None for the current one.

        Returns:
            The address, and the resource if it is on this task, else None.

        Raises:
            InvalidArgumentError: the name belongs to another resource.
            UnavailableError: the task cannot be reached.
            CancelledError: the service is closed.
            ValueError: the task does not exist, or the name is empty.
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
            # The reply has only the serial number: the resource stays on its task.
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
        """Return the number of the task for a resource.

        Args:
            task: see `open`.
            kind: name of the type.
            name: name of the resource.
            description: properties; device functions receive its shape and dtype.

        Raises:
            ValueError: the task or device does not exist.
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
        """Return task number and device for a function.

        Args:
            task: see `open`.
            name: name of the function.

        Returns:
            The task, and a device such as "/gpu:1"; None if neither `task` nor the enclosing
            `device` blocks name a device.

        Raises:
            ValueError: the task or device does not exist.
        """
        if isinstance(task, int):
            return self.task_of(task, "Function", name), None
        # No device types: a function runs on any device, and prefers an accelerator.
        thing = PlacementRequest(name, "Function", task or "", device_types=())
        wish = requested_device(thing)  # once: device functions may return another one
        # The wish contains the enclosing blocks already. Applied again, a device function would be
        # called twice.
        with device(None):
            number, found = self._locate(thing._replace(device=wish.to_string()))
        # Without a named device the function keeps the current device of its thread.
        if wish.device_type is None and wish.device_index is None:
            return number, None
        return number, f"/{str(found.device_type).lower()}:{found.device_index}"

    def departures(
        self, tasks: Collection[int], timeout: float | None = None
    ) -> dict[int, str | None]:
        """Wait until tasks have left or are lost.

        Args:
            tasks: numbers of other tasks.
            timeout: seconds to wait; None waits without a limit.

        Returns:
            Task -> None after a clean leave, else the reason why it is lost.

        Raises:
            DeadlineExceededError: some of the tasks are still present.
            CancelledError: the service was closed in the meantime.
            ValueError: `tasks` contains this task or a number out of range.
        """
        for task in tasks:
            if task not in range(self.size) or task == self.task:
                raise ValueError(
                    f"departures: expected other tasks than {self.task} among 0 .. "
                    f"{self.size - 1}, got {task}"
                )
        return self._exchange.departures(tasks, timeout)

    def reset(self, containers: Iterable[str] | None = None, *, task: int | str = 0) -> None:
        """Remove named resources of a task; operations that wait on them raise `CancelledError`.

        Args:
            containers: containers to reset; None for all.
            task: task of the resources; see `open`.
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
        """Send a request to another task without waiting; return its number.

        Args:
            address: resource.
            operation: operation on the resource.
            on_answer: called once, in any thread; must not block.
            arguments: mapping that msgpack can encode.
            values: arrays, numbers and text; arrays must not change before the reply.

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
        """Send a request, wait for its reply, and raise its error; see `start`."""
        (answer,) = self.ask([RequestTo(address, operation, arguments or {}, values)]).answers()
        if answer.error is not None:
            raise answer.error
        return answer

    def ask(self, questions: Sequence[RequestTo]) -> MultiRequest:
        """Send several requests at once; `answers` of the result waits for the replies.

        Raises:
            RuntimeError: called in the thread that receives replies, which must not wait for one.
            CancelledError: the service is closed.
        """
        # In the message loop's thread the reply could never arrive while this call waits for it.
        if questions and not self.may_wait:
            operation = questions[0].operation
            raise RuntimeError(f"{operation}: called where answers arrive, which must not wait")
        return MultiRequest(self._exchange.requests, questions)

    def here(self, kind: ResourceType, address: Address) -> Any:
        """Return a resource of this task.

        Raises:
            CancelledError: the service is closed.
            NotFoundError: its container was reset.
            AbortedError: its container was reset, and the name was reused.
        """
        self._exchange.requests.check_open()
        return self._containers.find(address, kind)[1]

    @property
    def may_wait(self) -> bool:
        """Whether the current thread may wait: False only in the thread that receives replies."""
        return not self._exchange.is_current()

    def withdraw(self, number: int, error: OpError) -> None:
        """Ask the server to end a waiting request with `error`; its reply still arrives."""
        self._exchange.requests.withdraw(number, error)

    def disown(self, number: int) -> bool:
        """Ask the server to undo a request, and drop it; False if it was already answered."""
        return self._exchange.requests.disown(number)

    def close(self) -> None:
        """Wait until all tasks have left; *collective*, harmless when repeated.

        Waiting requests of other threads raise `CancelledError`.

        Raises:
            InternalError: the thread of the service has failed.
        """
        try:
            self._exchange.close()
        finally:
            # After all tasks have left, no request can open a resource again. Local threads that
            # still wait get `CancelledError`.
            self._containers.reset()


def _among_workers(size: int) -> Callable[[PlacementRequest], tuple[int, DeviceSpec]]:
    """Return the placement function for tasks that are all workers."""
    placer = Placer({("worker", task): devices_of() for task in range(size)})

    def locate(thing: PlacementRequest) -> tuple[int, DeviceSpec]:
        device = placer.place(thing)
        return device.task or 0, device

    return locate
