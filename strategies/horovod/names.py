"""Names in use: those of calls whose end the program has not seen.

A name is free again after `synchronize`, or a `poll` that tells that the call is done. Where the
program has dropped the handle, it can do neither: the name is free when the call is done and the
program has waited for another call meanwhile. So a name that is used twice in a row is an error
however fast the other ranks are.
"""

from __future__ import annotations

from collections import deque

from strategies.horovod.execution import Pending

__all__ = ["Names"]


class Names:
    """The names that calls of this rank have in use."""

    def __init__(self) -> None:
        self._calls: dict[str, Pending] = {}
        self._dropped: deque[Pending] = deque()  # their handles are gone

    def __contains__(self, name: str | None) -> bool:
        return name in self._calls

    def use(self, pending: Pending) -> None:
        """Take the name of a call, if it has one."""
        if pending.key.name is not None:
            self._calls[pending.key.name] = pending

    def free(self, pending: Pending) -> None:
        """Give back the name of a call."""
        if pending.key.name is not None:
            self._calls.pop(pending.key.name, None)

    def drop(self, pending: Pending) -> None:
        """Note that the handle of a call is gone before the program has seen its end."""
        name = pending.key.name
        if name is not None and self._calls.get(name) is pending:
            self._dropped.append(pending)

    def sweep(self) -> None:
        """Give back the names of the calls without handles that are done."""
        for _ in range(len(self._dropped)):
            pending = self._dropped.popleft()
            (self.free if pending.done else self._dropped.append)(pending)
