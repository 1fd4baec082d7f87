"""The calls of this rank that are not complete, and the names in use."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from strategies.horovod.controller.request_signature import RequestKey, RequestSignature

__all__ = ["NamesInUse", "PendingRequest"]


class PendingRequest:
    """A call of this rank, and what became of it.

    Attributes:
        key: by what it is found on the other ranks.
        description: what it means.
        arrays: what this rank brings.
        targets: where results go; new arrays where there are none.
        splits: of an all-to-all.
        since: when it was made, of `time.monotonic`.
        warned: whether a warning has named it.
        done: whether there is a result, or an error.
        results: one for each array.
        error: why there are none.
    """

    __slots__ = (
        "arrays", "description", "done", "error", "key", "results", "since", "splits", "targets",
        "warned",
    )  # fmt: skip

    def __init__(
        self,
        key: RequestKey,
        description: RequestSignature,
        arrays: Sequence[Any] = (),
        targets: Sequence[Any] | None = None,
        splits: Sequence[int] | None = None,
    ) -> None:
        self.key, self.description = key, description
        self.arrays, self.targets, self.splits = arrays, targets, splits
        self.since = 0.0
        self.warned = self.done = False
        self.results: Sequence[Any] = ()
        self.error: Exception | None = None

    def succeed(self, results: Sequence[Any]) -> None:
        """Hand over results, in their targets if there are some."""
        if self.targets is not None:
            for target, result in zip(self.targets, results, strict=True):
                if target is not result:
                    _copy(result, target)
            results = self.targets
        self.arrays = ()
        self.results = results
        self.done = True

    def fail(self, error: Exception) -> None:
        """Hand over an error."""
        self.arrays = ()
        self.error = error
        self.done = True


class NamesInUse:
    """The names of this rank's calls that the program has not seen completed.

    A name is free again after `synchronize`, or after a `poll` that returns True. A program that
    drops the handle can call neither: the name is then free when the call is complete and the
    program has waited for another call after that. So using a name twice in a row is an error
    regardless of how fast the other ranks are.

    Handles are dropped in any thread, so each step is one atomic operation of a dict or a deque.
    """

    def __init__(self) -> None:
        self._calls: dict[str, PendingRequest] = {}
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
        """Note that the handle of a call was dropped before the program saw the call completed."""
        name = pending.key.name
        if name is not None and self._calls.get(name) is pending:
            self._dropped.append(pending)

    def sweep(self) -> None:
        """Free the names of completed calls whose handles were dropped."""
        with contextlib.suppress(IndexError):  # another thread sweeps
            for _ in range(len(self._dropped)):
                pending = self._dropped.popleft()
                (self.remove if pending.done else self._dropped.append)(pending)


def _copy(result: Any, target: Any) -> None:
    if hasattr(target, "copy_"):
        target.detach().copy_(result)
    else:
        target[...] = result
