"""Watch the other ranks of a node during a wait: pause, and raise where one has died or left.

Ranks that share memory exchange no messages, so MPI does not report a death. Each rank holds a file
lock that the kernel releases when the process ends (`collectives.transport.liveness`).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from collectives.core.errors import PeerFailure
from collectives.node import segment, temporary_directories
from collectives.transport import liveness
from collectives.transport.backoff import Backoff, CompletedWait, Deadline, this_thread
from collectives.transport.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PeerWatch", "start"]

# Nap of a background thread while its rank computes and cores are scarce: about the synchronization
# share of the time in which a bucket of 4 MiB is reduced.
_BACKGROUND_NAP_SECONDS = 0.0002


def start(transport: Transport, directory: str, deadline: Deadline) -> PeerWatch:
    """Start to watch the ranks of a group on one node; *collective*.

    If file locks fail on one rank, no rank uses them.
    """
    path, own, problem = "", None, ""
    with contextlib.ExitStack() as stack:
        if transport.rank == 0:
            with contextlib.suppress(OSError):
                path = liveness.create(
                    stack.enter_context(temporary_directories.temporary(directory))
                )
        path = segment.broadcast_text(transport, path, deadline)
        try:
            own = liveness.Liveness(path, transport.rank, transport.size) if path else None
        except OSError as error:
            problem = str(error)
        problem = segment.first_error(transport, problem, deadline)
    if own is not None and problem:
        own.close()
        own = None
    return PeerWatch(transport, own)


class PeerWatch:
    """Detection of ranks of a node that have died or left, for the waits of one rank.

    Args:
        transport: the ranks. Errors name ranks by their numbers in its parent group.
        living: file locks of the ranks; None if unavailable.

    Attributes:
        last_call: returns a rank's last call, for errors: "after allreduce #2 at train.py:5".
    """

    def __init__(self, transport: Transport, living: liveness.Liveness | None) -> None:
        self._transport = transport
        self._is_part = transport.parent is not transport
        self._living = living
        self._gone: tuple[int, Backoff] | None = None  # rank that has left, and the wait
        self.last_call: Callable[[int], str] = str
        # Whether the ranks have too few cores for a second busy thread each.
        self._two_are_many = 2 * transport.size > (os.cpu_count() or 1)

    def backoff(self) -> Backoff:
        """Begin a wait; a background thread naps if its rank's other thread needs the core."""
        in_background = self._two_are_many and this_thread.stop is not None
        return Backoff(_BACKGROUND_NAP_SECONDS if in_background else 0.0)

    def pause(self, missing: int, deadline: Deadline, wait: Backoff) -> None:
        """Pause once during a wait for a rank.

        Raises:
            CollectiveTimeout: the deadline has passed.
            PeerFailure: a rank has died, or the missing one has left.
        """
        whole = self._transport.parent
        number = self._transport.parent_rank(missing)
        absent = CompletedWait(
            f"{whole.name([number])} to enter the call", (number,), has_come=False
        )
        deadline.check(whole, [absent])
        if self._is_part:  # other nodes may wait for messages that MPI still holds
            self._transport.progress()
        if wait.pause():
            self._check(missing, deadline.operation, wait)

    def dead(self) -> list[int]:
        """Return the ranks that have died, by their numbers in the parent group."""
        dead = [] if self._living is None else self._living.dead()
        if dead:
            liveness.arm()
        return [self._transport.parent_rank(rank) for rank in dead]

    def _check(self, missing: int, operation: str, wait: Backoff) -> None:
        """Raise `PeerFailure` if a rank has died, or if the missing rank has left."""
        whole = self._transport.parent
        if dead := self.dead():  # works under any launcher
            raise PeerFailure(f"{operation}: {whole.name(dead)} died ({whole.where})")
        self._transport.check_peers(operation, [missing])
        gone = "" if self._living is None else self._living.exited(missing)
        if gone and self._gone == (missing, wait):
            how = f"{gone} ({self.last_call(missing)})"
            self._transport.propagate_failure(missing, how)
            name = whole.name([self._transport.parent_rank(missing)])
            raise PeerFailure(f"{operation}: {name} {how} ({whole.where})")
        # Raise only at the second look: the rank may have entered and left since the last poll.
        self._gone = (missing, wait) if gone else None

    def close(self) -> None:
        """Release this rank's file lock."""
        if self._living is not None:
            self._living.close()
