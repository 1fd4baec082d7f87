"""Remote functions: run a function on another task."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any

from strategies.cluster.local_devices import selected
from strategies.core.thread_pool import ThreadPool
from strategies.errors import CancelledError, DeadlineExceededError, OpError, UnknownError
from strategies.rpc import wire
from strategies.rpc.client import Reply
from strategies.rpc.function_names import function_named, name_of
from strategies.rpc.registry import Address, register_handler
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.service import Service
from strategies.rpc.wait_limits import current_settings

__all__ = ["CALLS", "RemoteTraceback", "Task", "TaskFuture"]

_log = logging.getLogger(__name__)

# A function rather than a number: the environment is read at the first call, not at import.
CALLS = ThreadPool("calls", lambda: current_settings().call_threads)
"""Threads that run functions for other tasks."""

_MOST_TRACE = 1 << 16  # characters; longer tracebacks keep their end


class RemoteTraceback(Exception):
    """Traceback of an error on another task, as text; set as `__cause__` of the local error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class TaskFuture(Future[Any]):
    """Result of a function that runs on a task.

    Callbacks run in the thread that receives messages, and must not block.
    """

    def __init__(self, withdraw: Callable[[], object]) -> None:
        super().__init__()
        self._withdraw = withdraw

    def cancel(self) -> bool:
        """Cancel the call; return False if the result has arrived.

        A function that has not started is not called. A running function runs to its end.
        """
        cancelled = super().cancel()
        if cancelled:
            self._withdraw()
        return cancelled

    def finish(self, act: Callable[[], Any]) -> None:
        """Run `act` and store its result or exception, unless the future was cancelled."""
        # The call runs first, and its outcome is dropped if the future was cancelled meanwhile: a
        # running function cannot be stopped.
        try:
            result = act()
        except BaseException as error:
            # Includes SystemExit of the function, which must reach the caller and not end the
            # thread.
            if self.set_running_or_notify_cancel():
                self.set_exception(error)
        else:
            if self.set_running_or_notify_cancel():
                self.set_result(result)


class Task:
    """A task of a service, as a place to run functions.

    Functions are sent by name, and each task imports them from its own modules. A function that
    needs more than its arguments reads it from its module.

    Args:
        service: open on all tasks.
        task: number, or a device string such as "/job:worker/task:1/gpu:0". The enclosing `device`
            blocks fill in missing parts, or all of it for None. If the result names a device,
            functions run with that device selected: as the current device of CuPy and of CUDA under
            PyTorch, and as the default device of JAX, for each of these that the task has imported.

    Attributes:
        service: the service.
        number: number of the task.
        device: device that functions use on the task, such as "/gpu:0"; None if unspecified.

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
        """Call a function on the task and return its result; see `submit`.

        Args:
            function: function at the top level of a module, or its name, "package.module:function".
            arguments: positional arguments.
            timeout: seconds to wait; None waits until the task returns or is lost.
            depends_on: see `submit`.
            named: keyword arguments.

        Raises:
            DeadlineExceededError: the timeout has passed; a running function runs to its end.
            Exception: the exception of the function, with its remote traceback as `__cause__`.
        """
        if not self.service.may_wait:
            raise RuntimeError("run: called where answers arrive, which must not wait")
        future = self.submit(function, *arguments, depends_on=depends_on, **named)
        try:
            # Not `Future.result(timeout)`: its TimeoutError looks like one that the function or a
            # signal handler raises.
            wait([future], timeout)
        except BaseException:
            future.cancel()
            raise
        # A reply that arrives now makes `cancel` return False; its result then counts.
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
        """Start a function on the task, in a thread of its own.

        Args:
            function: function at the top level of a module, or its name, "package.module:function".
            arguments: numbers, text, None, arrays, and tuples, lists and dicts of these. Arrays
                must not change until the result is available. On the own task any object is
                allowed.
            depends_on: futures of functions on any task that must finish before this function
                starts. If one fails, the function is not called and the future gets the same error.
            named: keyword arguments, with the same types.

        Returns:
            A future. Its result has the types of the arguments. Its exception is the exception of
            the function; `UnavailableError` if the task is dead, has left or is silent;
            `CancelledError` if the service was closed; `InvalidArgumentError` if the result is too
            long for a message.

        Raises:
            ValueError: the function cannot be imported by name.
            TypeError: an argument cannot be sent, or an element of `depends_on` is not a future.
            UnavailableError: the task is known to be lost.
        """
        if bad := [other for other in depends_on if not isinstance(other, Future)]:
            raise TypeError(f"submit: a function depends on futures of others, got {bad[0]!r}")
        name = name_of(function, "submit")
        own = self.number == self.service.task
        # Packed now, so that `submit` raises for bad arguments even if the call starts later.
        # Nothing is packed for the own task, so any object may be an argument.
        values = () if own else wire.pack([list(arguments), named], "submit")
        # Filled when the call starts, which may be in a callback of `depends_on`.
        under_way: list[Callable[[], object]] = []
        future = TaskFuture(lambda: [withdraw() for withdraw in under_way])

        def here() -> None:
            future.finish(lambda: _call_on_device(name, self.device, arguments, named))

        def there(answer: Reply) -> None:
            future.finish(lambda: _result(answer))

        def begin() -> None:
            if own:
                CALLS.submit(here)
                under_way.append(lambda: CALLS.withdraw(here))
            else:
                # `call` needs no resource; the name only makes errors readable.
                address = Address(self.number, "", name)
                told = {"function": name, "device": self.device}
                number = self.service.start(address, "call", there, told, values)
                under_way.append(lambda: self.service.disown(number))

        if depends_on:
            _when_done(depends_on, future, begin)
        else:
            begin()
        return future


def _when_done(
    others: Sequence[Future[Any]], future: TaskFuture, begin: Callable[[], object]
) -> None:
    """Call `begin` when all `others` are done, unless one has failed or `future` was cancelled."""
    # Callbacks run in the threads that finish the futures, possibly in parallel.
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
                # Raises the error of a failed dependency, which becomes the error of this future.
                other.result()
            begin()
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.cancelled():  # cancelled before `begin` registered a cancel function
                future.cancel()

    for other in others:
        other.add_done_callback(one_is_done)


def _result(answer: Reply) -> Any:
    if answer.error is not None:
        raise answer.error
    (result,) = answer.values
    if "raised" in answer.metadata:
        raised = answer.metadata["raised"]
        raise _error(raised["kind"], result) from RemoteTraceback(raised["trace"])
    return result


def _error(name: str, arguments: Any) -> BaseException:
    """Return an error of the named class; `UnknownError` if this task cannot create it."""
    try:
        # A class that was defined inside a function has no name that this task can import.
        kind: Any = function_named(name)
        # First: a reply may name any object, and must not call a function here.
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"not an exception class, got {name}")
        return kind(*arguments)
    except Exception:
        # The class is missing on this task, or its constructor takes other arguments.
        _log.info("an error of another task cannot be made here: %s", name)
    return UnknownError(f"{name}: {' '.join(str(argument) for argument in arguments)}")


# Server side: the task that runs the function.


def _call_on_device(
    name: str, device: str | None, arguments: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Call a function with its device selected."""
    function = function_named(name)  # first: may load the library that has the device
    with nullcontext() if device is None else selected(device):
        return function(*arguments, **named)


def _call(work: ServerRequest) -> None:
    def job() -> None:
        try:
            arguments, named = work.values
            name, device = work.arguments["function"], work.arguments["device"]
            # Packed inside the `try`, so that a result that cannot be sent is an error of the call.
            values = wire.pack([_call_on_device(name, device, arguments, named)], "run")
        except BaseException as error:
            # The exception is a successful reply, because `fail` keeps only classes of `OpError`.
            work.reply(_arguments(error), raised=_words(error))
        else:
            work.reply(values)

    def withdraw(error: OpError) -> None:
        # A running function cannot be interrupted; it replies when it ends.
        if CALLS.withdraw(job):
            work.fail(error)

    work.wait(withdraw, lambda: withdraw(CancelledError("given up")))
    CALLS.submit(job)


def _arguments(error: BaseException) -> wire.Packed:
    try:
        # The arguments rather than the exception: the caller creates it again from them.
        return wire.pack([error.args], "run")
    except TypeError:
        # Arguments that cannot be encoded become text.
        return wire.pack([(str(error),)], "run")


def _words(error: BaseException) -> dict[str, str]:
    kind = type(error)
    trace = "".join(traceback.format_exception(error))
    return {"kind": f"{kind.__module__}:{kind.__qualname__}", "trace": trace[-_MOST_TRACE:]}


register_handler("call", _call)
