"""Names of pending requests.

A name is free again after `synchronize`, or after a `poll` that returns True. A program that drops
the handle can call neither: the name is then free when the call is complete and the program has
waited for another call after that. So using a name twice in a row is an error regardless of how
fast the other ranks are.
"""

from __future__ import annotations

import contextlib
from collections import deque

from strategies.horovod.controller.execution import PendingRequest

__all__ = ["NamesInUse"]


class NamesInUse:
    """The names of this rank's pending calls.

    Handles are dropped in any thread, so each step is one atomic operation of a dict or a deque.
    """

    def __init__(self) -> None:
        self._calls: dict[str, PendingRequest] = {}
        self._dropped: deque[PendingRequest] = deque()  # calls whose a handle

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
