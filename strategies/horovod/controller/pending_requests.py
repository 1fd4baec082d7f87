"""The calls of this rank that are not complete, and the names in use."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strategies.horovod.controller.request_signature import RequestKey, RequestSignature

__all__ = ["NamesInUse", "PendingRequest"]


@dataclass(eq=False, slots=True)  # compared by identity
class PendingRequest:
    """A call of this rank, and its outcome.

    Attributes:
        key: identifies the call on all ranks.
        description: properties that must agree on all ranks.
        arrays: this rank's arrays.
        targets: output arrays; None for new arrays.
        splits: rows per rank of an all-to-all.
        since: time of the call, by `time.monotonic`.
        warned: whether a warning has named the call.
        done: whether the call has a result or an error.
        results: one result per array.
        error: error of the call, or None.
    """

    key: RequestKey
    description: RequestSignature
    arrays: Sequence[Any] = ()
    targets: Sequence[Any] | None = None
    splits: Sequence[int] | None = None
    since: float = 0.0
    warned: bool = False
    done: bool = False
    results: Sequence[Any] = ()
    error: Exception | None = None

    def succeed(self, results: Sequence[Any]) -> None:
        """Store results, in the targets if there are any."""
        if self.targets is not None:
            for target, result in zip(self.targets, results, strict=True):
                # The operation may have written into the target itself.
                if target is not result:
                    _copy(result, target)
            results = self.targets
        # Released: a kept handle must not keep the inputs.
        self.arrays = ()
        self.results = results
        # Set last, because other threads read `done` without a lock.
        self.done = True

    def fail(self, error: Exception) -> None:
        """Store an error."""
        self.arrays = ()
        self.error = error
        self.done = True


class NamesInUse:
    """Names of this rank's calls whose completion the program has not seen.

    A name is free again after `synchronize`, or after a `poll` that returns True. If the program
    drops the handle, the name is freed once the call is complete and the program has then waited
    for another call. Using a name twice in a row is therefore an error, regardless of the speed of
    other ranks.

    Handles are dropped in any thread, so each step is one atomic operation of a dict or a deque.
    """

    def __init__(self) -> None:
        self._calls: dict[str, PendingRequest] = {}
        # `append` and `popleft` of a deque are atomic in CPython.
        self._dropped: deque[PendingRequest] = deque()  # calls without a handle

    def __contains__(self, name: str | None) -> bool:
        return name in self._calls

    def add(self, pending: PendingRequest) -> None:
        """Add the name of a call, if it has one."""
        if pending.key.name is not None:
            self._calls[pending.key.name] = pending

    def remove(self, pending: PendingRequest) -> None:
        """Free the name of a call."""
        if pending.key.name is not None:
            self._calls.pop(pending.key.name, None)

    def drop(self, pending: PendingRequest) -> None:
        """Record that the handle of a call was dropped before the program saw its completion."""
        name = pending.key.name
        # Another call may have the name by now.
        if name is not None and self._calls.get(name) is pending:
            self._dropped.append(pending)

    def sweep(self) -> None:
        """Free the names of completed calls whose handles were dropped."""
        with contextlib.suppress(IndexError):  # another thread sweeps
            # The present length: calls that are not done return to the queue.
            for _ in range(len(self._dropped)):
                pending = self._dropped.popleft()
                (self.remove if pending.done else self._dropped.append)(pending)


def _copy(result: Any, target: Any) -> None:
    if hasattr(target, "copy_"):
        # `copy_` of a leaf that requires gradients raises.
        target.detach().copy_(result)
    else:
        target[...] = result
