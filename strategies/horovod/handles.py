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
    """A call under way; made by the operations that end in `_async`.

    Args:
        bound: among whom.
        pending: the call.
        finish: makes what is returned of its results.
    """

    def __init__(
        self, bound: Bound, pending: PendingRequest, finish: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._bound, self._pending, self._finish = bound, pending, finish
        self._result: Any = None
        self._settled = False  # whether the program has seen the call completed

    def __del__(self) -> None:
        """Let the next wait for a call free the name."""
        if not self._settled and self._bound.controller is not None:
            self._bound.controller.names.drop(self._pending)

    def done(self) -> bool:
        """Tell whether `wait` would return, or raise, at once."""
        if self._pending.done:
            self._settle()
        return self._pending.done

    def wait(self) -> Any:
        """Wait until it is done; returns the result, or raises what has gone wrong."""
        pending = self._pending
        if not pending.done:
            assert self._bound.controller is not None
            self._bound.controller.wait(pending)
        self._settle()
        if pending.error is not None:
            raise pending.error
        if self._finish is not _nothing:
            self._result, self._finish = self._finish(pending.results), _nothing
            pending.results = ()
        return self._result

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            assert self._bound.controller is not None
            self._bound.controller.names.remove(self._pending)
            self._bound.controller.names.sweep()


def _nothing(results: Sequence[Any]) -> None:
    """Stand for what was called already."""


def start(
    operation: str,
    process_set: ProcessSet,
    name: str | None,
    prepare: Callable[[Bound], RequestSpec],
    *,
    alone: bool = True,
) -> Handle:
    """Check a call, and let it begin; or tell the others that this rank has refused it.

    Args:
        operation: for errors.
        process_set: among whom.
        name: by which ranks find each other's calls.
        prepare: checks the arguments, and says what they mean.
        alone: whether nobody waits for it at once.

    Raises:
        TypeError, ValueError: of `prepare`; or the name is in use.
    """
    bound = process_set.bound(operation)
    controller = bound.controller
    assert controller is not None
    key = RequestKey(None, next(controller.unnamed)) if name is None else RequestKey(str(name))
    try:
        if key.name in controller.names:
            raise ValueError(
                f"{operation}: the name is in use, expected synchronize of the earlier call "
                f"first, got {key.name!r} twice"
            )
        call = prepare(bound)
    except (TypeError, ValueError) as error:
        refused = RequestSignature(operation, refused=f"{type(error).__name__}: {error}")
        controller.submit(PendingRequest(key, refused), alone=True)
        raise
    pending = PendingRequest(key, call.description, call.arrays, call.targets, call.splits)
    handle = Handle(bound, pending, call.finish)
    controller.submit(pending, alone=alone)
    controller.names.add(pending)
    return handle


def poll(handle: Handle) -> bool:
    """Tell whether `synchronize` would return at once."""
    return _handle(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait until a call is done; returns its result. A second time it returns the same.

    Raises:
        TypeError: this is not a handle.
        MismatchError: the ranks do not mean the same call, or another rank has refused it.
        CollectiveTimeout: some ranks have not made the call; the error names them.
        PeerFailure: a rank has died.
    """
    return _handle(handle).wait()


def _handle(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(f"synchronize: expected a handle, got {type(handle).__name__}")
    return handle
