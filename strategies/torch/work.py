"""`Work` objects of the torch.distributed backend.

PyTorch asks a `Work` for two things, also from C++: to wait, and for a future. What becomes of an
error::

    raised by the operation, here or by another thread
      |-- wait()        raises it, as it is
      `-- get_future()  what waits for the future raises a RuntimeError with its text
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
    """A `MismatchError` that programs of torch.distributed catch as an error of a backend."""


class _CollectiveTimeout(cc.CollectiveTimeout, distributed.DistBackendError):
    """The same for `CollectiveTimeout`."""


class _PeerFailure(cc.PeerFailure, distributed.DistBackendError):
    """The same for `PeerFailure`."""


class _CollectiveError(cc.CollectiveError, distributed.DistBackendError):
    """The same for all others."""


class _ValueError(ValueError, RuntimeError):
    """A wrong argument; Gloo raises a `RuntimeError`, which programs may catch."""


class _TypeError(TypeError, RuntimeError):
    """The same for `TypeError`."""


_KINDS: tuple[tuple[type[Exception], type[Exception]], ...] = (
    (cc.MismatchError, _MismatchError),
    (cc.CollectiveTimeout, _CollectiveTimeout),
    (cc.PeerFailure, _PeerFailure),
    (cc.CollectiveError, _CollectiveError),
    (ValueError, _ValueError),
    (TypeError, _TypeError),
)
_OURS = tuple(ours for _, ours in _KINDS)
for _, _kind in _KINDS:  # in tracebacks the name that users know
    _kind.__name__ = _kind.__qualname__ = _kind.__name__.removeprefix("_")


def translated(error: BaseException) -> BaseException:
    """Return an error that programs for other backends also catch.

    An error of communication is also a `DistBackendError` of PyTorch, a wrong argument also a
    `RuntimeError`. The text of a timeout contains "timed out".
    """
    if isinstance(error, _OURS):
        return error
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), None)
    if kind is None:
        return error
    made = kind(_timed_out(str(error))) if kind is _CollectiveTimeout else kind(*error.args)
    vars(made).update(vars(error))
    made.__cause__, made.__suppress_context__ = error.__cause__, True
    return made.with_traceback(error.__traceback__)


def _timed_out(text: str) -> str:
    """Return the text of a timeout with the words that launchers and loggers search for."""
    operation, _, rest = text.partition(": ")
    return f"{operation}: timed out, {rest}"


class CompletedWork(distributed.Work):
    """An operation that is complete.

    Args:
        tensors: with its result.
        source: the rank that a message came from.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = (), source: int = -1) -> None:
        super().__init__()
        self._tensors = tensors
        self._source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> Any:
        """Return a future that has the tensors."""
        future: Any = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future

    def is_completed(self) -> bool:
        """Tell that it is complete."""
        return True

    def is_success(self) -> bool:
        """Tell that it has succeeded."""
        return True

    def exception(self) -> None:
        """Tell that there was no error."""

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return list(self._tensors)

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Return at once: on a host there are no streams."""

    def _source_rank(self) -> int:
        """Return the rank in the group that a message came from."""
        return self._source

    source_rank = _source_rank


# For all calls that wait: none is made, which would take a microsecond.
DONE = CompletedWork()


class WorkSource(Protocol):
    """An operation that another thread carries out, or MPI."""

    @property
    def error(self) -> BaseException | None:
        """What it has raised, once it is over."""

    @property
    def source(self) -> int:
        """The rank that a message came from; else -1."""

    def done(self) -> bool:
        """Tell whether it is over, one way or the other."""

    def finish(self, timeout: float | None) -> bool:
        """Wait until it is over, and tell whether it is."""

    def call_back(self, function: Any) -> None:
        """Call the function without arguments when it is over."""


class PendingWork(distributed.Work):
    """An operation under way.

    Args:
        job: that carries it out.
        operation: its name.
        tensors: where its result will be.
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
        """Wait until it is complete.

        Args:
            timeout: of this wait; zero, or less, for no limit but that of the operation.

        Raises:
            CollectiveTimeout: it is not complete in time, and goes on.
            Exception: what the operation has raised.
        """
        seconds = timeout.total_seconds()
        if not self._job.finish(seconds if seconds > 0 else None):
            raise _CollectiveTimeout(
                f"wait: {self._operation} timed out, it is not complete within {seconds:g} s, "
                "and goes on"
            )
        if self._job.error is not None:
            raise self._job.error
        return True

    def get_future(self) -> Any:
        """Return a future that has the tensors when the operation is complete."""
        if self._future is None:
            over: Any = torch.futures.Future()
            # A callback that raises is the only way by which an error passes through C++.
            self._future = over.then(self._outcome)
            self._job.call_back(lambda: over.set_result(None))
        return self._future

    def _outcome(self, over: Any) -> list[torch.Tensor]:
        if self._job.error is not None:
            raise self._job.error
        return list(self._tensors)

    def is_completed(self) -> bool:
        """Tell whether the operation is over."""
        return self._job.done()

    def is_success(self) -> bool:
        """Tell whether the operation is over, and has succeeded."""
        return self._job.done() and self._job.error is None

    def exception(self) -> BaseException | None:
        """Return what the operation has raised, None if nothing, or if it is not over."""
        return self._job.error if self._job.done() else None

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors."""
        self.wait()
        return list(self._tensors)

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait: on a host there are no streams."""
        self.wait()

    def _source_rank(self) -> int:
        """Return the rank in the group that a message came from; after `wait`."""
        return self._job.source

    source_rank = _source_rank


@functools.cache
def keep_join_works() -> None:
    """Keep the `Work` by which DDP counts the ranks that have data; harmless when repeated.

    In `join` DDP's reducer holds the last `Work` of `Join.notify_join_context` in C++, which does
    not keep the Python half: without that half the C++ half waits for ever.
    """
    notify = Join.notify_join_context
    works: weakref.WeakKeyDictionary[Any, distributed.Work] = weakref.WeakKeyDictionary()

    @functools.wraps(notify)
    def notify_join_context(joinable: Any) -> Any:
        work = notify(joinable)
        if isinstance(work, (CompletedWork, PendingWork)):
            works[joinable] = work
        return work

    Join.notify_join_context = staticmethod(notify_join_context)
