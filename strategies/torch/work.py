"""`Work` objects of the torch.distributed backend.

PyTorch calls two methods of a `Work`, also from C++: `wait` and `get_future`. Errors take two
paths::

    raised by the operation, in this or another thread
      |-- wait()        raises the same exception
      `-- get_future()  waiting for the future raises a RuntimeError with the same text
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed.algorithms.join import Join

import collectives as cc

__all__ = ["DONE", "CompletedWork", "WorkSource", "PendingWork", "keep_join_works", "translated"]


class _MismatchError(cc.MismatchError, distributed.DistBackendError):
    """`MismatchError` that is also an error of a torch.distributed backend."""


class _CollectiveTimeout(cc.CollectiveTimeout, distributed.DistBackendError):
    """`CollectiveTimeout` that is also an error of a backend."""


class _PeerFailure(cc.PeerFailure, distributed.DistBackendError):
    """`PeerFailure` that is also an error of a backend."""


class _CollectiveError(cc.CollectiveError, distributed.DistBackendError):
    """`CollectiveError` that is also an error of a backend; for all other classes."""


class _ValueError(ValueError, RuntimeError):
    """`ValueError` that is also a `RuntimeError`, which Gloo raises and programs may catch."""


class _TypeError(TypeError, RuntimeError):
    """`TypeError` that is also a `RuntimeError`."""


# The first match counts, so subclasses are listed before `CollectiveError`.
_KINDS: tuple[tuple[type[Exception], type[Exception]], ...] = (
    (cc.MismatchError, _MismatchError),
    (cc.CollectiveTimeout, _CollectiveTimeout),
    (cc.PeerFailure, _PeerFailure),
    (cc.CollectiveError, _CollectiveError),
    (ValueError, _ValueError),
    (TypeError, _TypeError),
)
_OURS = tuple(ours for _, ours in _KINDS)
for _, _kind in _KINDS:  # tracebacks show the public name
    _kind.__name__ = _kind.__qualname__ = _kind.__name__.removeprefix("_")


def translated(error: BaseException) -> BaseException:
    """Return an error that programs for other backends also catch.

    Communication errors are also a `DistBackendError` of PyTorch, argument errors also a
    `RuntimeError`. The text of a timeout contains "timed out".
    """
    # Translated already, in the thread that ran the operation.
    if isinstance(error, _OURS):
        return error
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), None)
    if kind is None:
        return error
    made = kind(_timed_out(str(error))) if kind is _CollectiveTimeout else kind(*error.args)
    # Facts such as `ranks` are attributes, which the new error keeps.
    vars(made).update(vars(error))
    # The cause of the original explains it; the original itself says the same.
    made.__cause__, made.__suppress_context__ = error.__cause__, True
    return made.with_traceback(error.__traceback__)


def _timed_out(text: str) -> str:
    """Return the text of a timeout with "timed out", which launchers and loggers search for."""
    operation, _, rest = text.partition(": ")
    return f"{operation}: timed out, {rest}"


class CompletedWork(distributed.Work):
    """A completed operation.

    Args:
        tensors: tensors of the result.
        source: source rank of a message.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = (), source: int = -1) -> None:
        super().__init__()
        self._tensors = tensors
        self._source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> Any:
        """Return a completed future with the tensors."""
        future: Any = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return list(self._tensors)

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Return at once: host tensors have no stream."""

    def _source_rank(self) -> int:
        """Return the source of a message, as a rank in the group."""
        return self._source

    source_rank = _source_rank


# Shared by all synchronous calls, because creating a `Work` takes a microsecond.
DONE = CompletedWork()


class WorkSource(Protocol):
    """An operation that another thread or MPI runs."""

    @property
    def error(self) -> BaseException | None:
        """Error of the finished operation, or None."""

    @property
    def source(self) -> int:
        """Source rank of a message; otherwise -1."""

    def done(self) -> bool:
        """Return whether the operation has succeeded or failed."""

    def finish(self, timeout: float | None) -> bool:
        """Wait for the operation; return whether it has finished."""

    def call_back(self, function: Any) -> None:
        """Call a function without arguments when the operation has finished."""


class PendingWork(distributed.Work):
    """An operation in progress.

    Args:
        job: the operation.
        operation: name of the operation.
        tensors: tensors that receive the result.
    """

    def __init__(
        self, job: WorkSource, operation: str, tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self._job = job
        self._operation = operation
        self._tensors = tensors
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operation.

        Args:
            timeout: limit of this wait; zero or less uses only the operation's own limit.

        Raises:
            CollectiveTimeout: the timeout has passed; the operation continues.
            Exception: error of the operation.
        """
        seconds = timeout.total_seconds()
        # PyTorch passes 0 for no limit.
        if not self._job.finish(seconds if seconds > 0 else None):
            raise _CollectiveTimeout(
                f"wait: {self._operation} timed out, it is not complete within {seconds:g} s, "
                "and continues"
            )
        if self._job.error is not None:
            raise self._job.error
        return True

    def get_future(self) -> Any:
        """Return a future that receives the tensors when the operation has finished."""
        if self._future is None:
            over: Any = torch.futures.Future()
            # C++ keeps Python errors only if a callback raises them.
            self._future = over.then(self._outcome)
            # After `then`: an operation that is complete already calls back at once.
            self._job.call_back(lambda: over.set_result(None))
        return self._future

    def _outcome(self, over: Any) -> list[torch.Tensor]:
        if self._job.error is not None:
            raise self._job.error
        return list(self._tensors)

    def is_completed(self) -> bool:
        """Return whether the operation has finished."""
        return self._job.done()

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return self._job.done() and self._job.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation; None if it succeeded or has not finished."""
        return self._job.error if self._job.done() else None

    def result(self) -> list[torch.Tensor]:
        """Wait for the operation and return the tensors."""
        self.wait()
        return list(self._tensors)

    def synchronize(self) -> None:
        """Wait for the operation."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait for the operation: host tensors have no stream."""
        self.wait()

    def _source_rank(self) -> int:
        """Return the source of a message, as a rank in the group; after `wait`."""
        return self._job.source

    source_rank = _source_rank


@functools.cache
def keep_join_works() -> None:
    """Keep the `Work` with which DDP's `join` counts the ranks with data; harmless when repeated.

    DDP's reducer holds the last `Work` of `Join.notify_join_context` in C++ only, which does not
    keep its Python object alive. Without the Python object, the C++ object waits for ever.
    """
    notify = Join.notify_join_context
    # Weak keys: the works end with the model.
    works: weakref.WeakKeyDictionary[Any, distributed.Work] = weakref.WeakKeyDictionary()

    @functools.wraps(notify)
    def notify_join_context(joinable: Any) -> Any:
        work = notify(joinable)
        if isinstance(work, (CompletedWork, PendingWork)):
            works[joinable] = work
        return work

    Join.notify_join_context = staticmethod(notify_join_context)
