"""Handles of asynchronous named requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strategies.horovod.controller.pending_requests import PendingRequest
from strategies.horovod.controller.request_signature import RequestKey, RequestSignature
from strategies.horovod.process_sets import Bound, ProcessSet
from strategies.horovod.requests import RequestSpec

__all__ = ["Handle", "poll", "start", "synchronize"]


class Handle:
    """A call in progress; returned by operations whose names end in `_async`.

    Args:
        bound: process set of the call.
        pending: the call.
        finish: converts the results to the return value.
    """

    def __init__(
        self, bound: Bound, pending: PendingRequest, finish: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._bound, self._pending, self._finish = bound, pending, finish
        self._result: Any = None
        self._settled = False  # whether the program has seen the call completed

    def __del__(self) -> None:
        """Free the name at the next wait for a call."""
        # `__del__` may run in any thread and during a round, so it takes no lock.
        if not self._settled and self._bound.controller is not None:
            self._bound.controller.names.drop(self._pending)

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        if self._pending.done:
            self._settle()
        return self._pending.done

    def wait(self) -> Any:
        """Wait for the call; return its result or raise its error."""
        pending = self._pending
        if not pending.done:
            assert self._bound.controller is not None
            self._bound.controller.wait(pending)
        self._settle()
        if pending.error is not None:
            raise pending.error
        # Called once: a second `wait` returns the same objects.
        if self._finish is not _nothing:
            self._result, self._finish = self._finish(pending.results), _nothing
            # The converted result is kept; the raw arrays may be large.
            pending.results = ()
        return self._result

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            assert self._bound.controller is not None
            self._bound.controller.names.remove(self._pending)
            # Names of dropped handles are freed here, in the program's thread.
            self._bound.controller.names.sweep()


def _nothing(results: Sequence[Any]) -> None:
    """Mark `finish` as already called."""


def start(
    operation: str,
    process_set: ProcessSet,
    name: str | None,
    prepare: Callable[[Bound], RequestSpec],
    *,
    alone: bool = True,
) -> Handle:
    """Check a call and start it; announce a rejected call to the other ranks.

    Args:
        operation: name in errors.
        process_set: process set of the call.
        name: name that identifies the call on all ranks; None for a number.
        prepare: checks the arguments and returns the request.
        alone: whether the caller does not wait for the call immediately.

    Raises:
        Exception: from `prepare`.
        ValueError: the name is in use.
    """
    bound = process_set.bound(operation)
    controller = bound.controller
    assert controller is not None
    # Counted for rejected calls as well, since other ranks count theirs.
    key = RequestKey(None, next(controller.unnamed)) if name is None else RequestKey(str(name))
    try:
        if key.name in controller.names:
            raise ValueError(
                f"{operation}: the name is in use, expected synchronize of the earlier call "
                f"first, got {key.name!r} twice"
            )
        call = prepare(bound)
    except Exception as error:
        refused = RequestSignature(operation, refused=f"{type(error).__name__}: {error}")
        # Announced, so that the ranks that make this call raise instead of waiting.
        controller.submit(PendingRequest(key, refused), alone=True)
        raise
    pending = PendingRequest(key, call.description, call.arrays, call.targets, call.splits)
    handle = Handle(bound, pending, call.finish)
    controller.submit(pending, alone=alone)
    # After `submit`: a call that was rejected must not occupy the name.
    controller.names.add(pending)
    return handle


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would return at once."""
    return _handle(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for a call and return its result; repeated calls return the same result.

    Raises:
        TypeError: `handle` is not a handle.
        MismatchError: the call differs among ranks, or another rank has rejected it.
        CollectiveTimeout: some ranks have not made the call; the error names them.
        PeerFailure: a rank has died.
    """
    return _handle(handle).wait()


def _handle(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(f"synchronize: expected a handle, got {type(handle).__name__}")
    return handle
