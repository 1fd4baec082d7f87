"""Remote functions: run a function on another task."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from typing import Any

from strategies.cluster.local_devices import selected
from strategies.errors import CancelledError, DeadlineExceededError, OpError, UnknownError
from strategies.rpc import pool, wire
from strategies.rpc.client import Reply
from strategies.rpc.function_names import function_named, name_of
from strategies.rpc.registry import Address, register_handler
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.service import Service

__all__ = ["RemoteTraceback", "Task", "TaskFuture"]

_log = logging.getLogger(__name__)

_MOST_TRACE = 1 << 16  # characters of a traceback that travel, the last ones


class RemoteTraceback(Exception):
    """Where an error was raised on another task, as text; the cause of the error that is raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class TaskFuture(Future[Any]):
    """The result of a function that runs on a task.

    Callbacks are called by the thread that takes messages, and must not block.
    """

    def __init__(self, withdraw: Callable[[], object]) -> None:
        super().__init__()
        self._withdraw = withdraw

    def cancel(self) -> bool:
        """Want the result no more; False if it is there.

        A function that has not begun yet is not called. One that has runs to its end.
        """
        cancelled = super().cancel()
        if cancelled:
            self._withdraw()
        return cancelled

    def finish(self, act: Callable[[], Any]) -> None:
        """Take over what a function returns or raises, if anybody wants it."""
        result, raised = None, None
        try:
            result = act()
        except BaseException as error:
            raised = error
        if not self.set_running_or_notify_cancel():
            return
        if raised is None:
            self.set_result(result)
        else:
            self.set_exception(raised)


class Task:
    """One task of a service, as a place where functions run.

    Functions are known by name: each task imports them by itself. What a function needs beside its
    arguments it finds in its module.

    Args:
        service: open on all tasks.
        task: a number, or a device string such as "/job:worker/task:1/gpu:0"; what that leaves
            open, or None, is decided by the `device` blocks around. Where one of these names a
            device, functions run with it selected: CuPy and CUDA under PyTorch have it as their
            current device, JAX as its default one, of what the task has imported.

    Attributes:
        service: as given.
        number: of the task.
        device: on which functions run there, such as "/gpu:0"; None if nobody has said.

    Example:
        >>> import collectives as cc
        >>> with Service(cc.init()) as service:
        ...     Task(service, 0).run("math:hypot", 3, 4)
        5.0
    """

    def __init__(self, service: Service, task: int | str | None) -> None:
        self.service = service
        self.number, self.device = service.device_for(task, "function")

    def __repr__(self) -> str:
        return f"Task({self.number}{self.device or ''})"

    def run(
        self,
        function: Callable[..., Any] | str,
        *arguments: Any,
        timeout: float | None = None,
        depends_on: Sequence[Future[Any]] = (),
        **named: Any,
    ) -> Any:
        """Call a function on the task, and return its result; see `submit`.

        Args:
            function: at the top of a module, or its name, such as "package.module:function".
            arguments: for the function.
            timeout: in seconds; None waits as long as the task lives.
            depends_on: as for `submit`.
            named: arguments for the function.

        Raises:
            DeadlineExceededError: it was not done in time; one that has begun runs to its end.
            Exception: what the function has raised, with its traceback as `__cause__`.
        """
        if not self.service.may_wait:
            raise RuntimeError("run: called where answers arrive, which must not wait")
        future = self.submit(function, *arguments, depends_on=depends_on, **named)
        try:
            # `Future.result` would say by a TimeoutError that the time is over, which the function
            # or a signal handler may raise as well.
            wait([future], timeout)
        except BaseException:
            future.cancel()
            raise
        if not future.done() and future.cancel():
            raise DeadlineExceededError(
                f"run: not done within {timeout} s (function: {function}, task {self.number})"
            )
        return future.result()

    def submit(
        self,
        function: Callable[..., Any] | str,
        *arguments: Any,
        depends_on: Sequence[Future[Any]] = (),
        **named: Any,
    ) -> TaskFuture:
        """Let a function run on the task, in a thread of its own.

        Args:
            function: at the top of a module, or its name.
            arguments: numbers, text, None, arrays, and tuples, lists and dicts of these. Arrays
                must not change before the result is there. On the own task anything goes.
            depends_on: futures of functions, on whatever tasks, that have to be done before this
                one begins. If one of them fails, this one is not called, and has its error.
            named: the same by name.

        Returns:
            A future. Its result is such a thing, too. Its error is what the function has raised;
            `UnavailableError` if the task is dead, has left or is silent; `CancelledError` if the
            service was closed; `InvalidArgumentError` if the result is too long for a message.

        Raises:
            ValueError: the function cannot be imported by its name.
            TypeError: an argument cannot be sent, or what it depends on is not a future.
            UnavailableError: the task is known to be gone.
        """
        if bad := [other for other in depends_on if not isinstance(other, Future)]:
            raise TypeError(f"submit: a function depends on futures of others, got {bad[0]!r}")
        name = name_of(function, "submit")
        if self.number == self.service.task:
            begin = partial(_begin_here, name, self.device, arguments, named)
        else:
            values = wire.pack([list(arguments), named], "submit")
            begin = partial(self._begin_there, name, values)
        under_way: list[Callable[[], object]] = []
        future = TaskFuture(lambda: [withdraw() for withdraw in under_way])
        if depends_on:
            _when_done(depends_on, future, lambda: under_way.append(begin(future)))
        else:
            under_way.append(begin(future))
        return future

    def _begin_there(
        self, name: str, values: wire.Packed, future: TaskFuture
    ) -> Callable[[], object]:
        """Send the call, and return what takes it back."""

        def take(answer: Reply) -> None:
            future.finish(lambda: _result(answer))

        address = Address(self.number, "", name)
        told = {"function": name, "device": self.device}
        number = self.service.start(address, "call", take, told, values)
        return lambda: self.service.disown(number)


def _begin_here(
    name: str,
    device: str | None,
    arguments: Sequence[Any],
    named: dict[str, Any],
    future: TaskFuture,
) -> Callable[[], object]:
    """Let a thread of this task make the call, and return what takes it back."""

    def job() -> None:
        future.finish(lambda: _call_on_device(name, device, arguments, named))

    pool.CALLS.submit(job)
    return lambda: pool.CALLS.withdraw(job)


def _when_done(
    others: Sequence[Future[Any]], future: TaskFuture, begin: Callable[[], object]
) -> None:
    """Begin when all others are done, unless one has failed, or nobody wants it any more."""
    lock, left = threading.Lock(), len(others)

    def one_is_done(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = not left
        if not last or future.cancelled():
            return
        try:
            for other in others:
                if other.cancelled():
                    raise CancelledError(
                        "submit: a function that this one depends on was cancelled"
                    )
                other.result()
            begin()
        except BaseException as error:
            future.finish(partial(_raise, error))
        else:
            if future.cancelled():  # just now, when there was nothing to take back yet
                future.cancel()

    for other in others:
        other.add_done_callback(one_is_done)


def _raise(error: BaseException) -> None:
    raise error


def _result(answer: Reply) -> Any:
    if answer.error is not None:
        raise answer.error
    (result,) = answer.values
    if "raised" in answer.metadata:
        raised = answer.metadata["raised"]
        raise _error(raised["kind"], result) from RemoteTraceback(raised["trace"])
    return result


def _error(name: str, arguments: Any) -> BaseException:
    """Return an error of the class that the other task has named, if that is known here."""
    try:
        kind: Any = function_named(name)
        error = kind(*arguments)
        if isinstance(error, BaseException):
            return error
    except Exception:
        _log.info("an error of another task cannot be made here: %s", name)
    return UnknownError(f"{name}: {' '.join(str(argument) for argument in arguments)}")


# At the task that runs the function.


def _call_on_device(
    name: str, device: str | None, arguments: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Call a function with its device selected."""
    function = function_named(name)  # which may import the library that has the device
    with nullcontext() if device is None else selected(device):
        return function(*arguments, **named)


def _call(work: ServerRequest) -> None:
    def job() -> None:
        try:
            arguments, named = work.values
            name, device = work.arguments["function"], work.arguments["device"]
            values = wire.pack([_call_on_device(name, device, arguments, named)], "run")
        except BaseException as error:
            work.reply(_arguments(error), raised=_words(error))
        else:
            work.reply(values)

    def withdraw(error: OpError) -> None:
        if pool.CALLS.withdraw(job):
            work.fail(error)

    work.wait(withdraw, lambda: withdraw(CancelledError("given up")))
    pool.CALLS.submit(job)


def _arguments(error: BaseException) -> wire.Packed:
    try:
        return wire.pack([error.args], "run")
    except TypeError:
        return wire.pack([(str(error),)], "run")


def _words(error: BaseException) -> dict[str, str]:
    kind = type(error)
    trace = "".join(traceback.format_exception(error))
    return {"kind": f"{kind.__module__}:{kind.__qualname__}", "trace": trace[-_MOST_TRACE:]}


register_handler("call", _call)
