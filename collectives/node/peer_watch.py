"""Watch the other ranks of a node during a wait: pause, and raise where one has died or left.

Ranks that share memory send nothing, so each keeps a sign of life that the kernel of the system
takes back when its process ends (`collectives.transport.liveness`).
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

# The nap of a thread that waits in the background while its rank computes, and cores are few: about
# a meeting's share of the time in which a bucket of 4 MiB is reduced.
_BACKGROUND_NAP_SECONDS = 0.0002


def start(transport: Transport, directory: str, deadline: Deadline) -> PeerWatch:
    """Watch the ranks of a group on one node; *collective*.

    Where signs of life are not possible for one rank, no rank has them.
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
    """The other ranks of a node, as far as a rank that waits for them can tell.

    Args:
        transport: the ranks. Where it is a part of a larger group, errors name ranks by their
            numbers there.
        living: signs of life; None where they are not possible.

    Attributes:
        last_call: tells what a rank did last, for errors: "after allreduce #2 at train.py:5".
    """

    def __init__(self, transport: Transport, living: liveness.Liveness | None) -> None:
        self._transport = transport
        self._is_part = transport.parent is not transport
        self._living = living
        self._gone: tuple[int, Backoff] | None = None  # rank that has left, and in which wait
        self.last_call: Callable[[int], str] = str
        # Whether the ranks have too few cores for a second busy thread each.
        self._two_are_many = 2 * transport.size > (os.cpu_count() or 1)

    def backoff(self) -> Backoff:
        """Begin a wait: where a thread of the same rank computes, it needs a core."""
        in_background = self._two_are_many and this_thread.stop is not None
        return Backoff(_BACKGROUND_NAP_SECONDS if in_background else 0.0)

    def pause(self, missing: int, deadline: Deadline, wait: Backoff) -> None:
        """Pause in a wait for a rank.

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
        if self._is_part:  # other nodes may wait for what this rank has sent
            self._transport.progress()
        if wait.pause():
            self._check(missing, deadline.operation, wait)

    def dead(self) -> list[int]:
        """Return the ranks that have died, by their numbers in the whole group."""
        dead = [] if self._living is None else self._living.dead()
        if dead:
            liveness.arm()
        return [self._transport.parent_rank(rank) for rank in dead]

    def _check(self, missing: int, operation: str, wait: Backoff) -> None:
        """Raise `PeerFailure` if a rank has died, or one that has not come has left."""
        whole = self._transport.parent
        if dead := self.dead():  # however the job was launched
            raise PeerFailure(f"{operation}: {whole.name(dead)} died ({whole.where})")
        self._transport.check_peers(operation, [missing])
        gone = "" if self._living is None else self._living.exited(missing)
        if gone and self._gone == (missing, wait):
            how = f"{gone} ({self.last_call(missing)})"
            self._transport.propagate_failure(missing, how)
            name = whole.name([self._transport.parent_rank(missing)])
            raise PeerFailure(f"{operation}: {name} {how} ({whole.where})")
        # Not before the next look: it may have come, and left, since the kernel last looked.
        self._gone = (missing, wait) if gone else None

    def close(self) -> None:
        """Take back this rank's sign of life."""
        if self._living is not None:
            self._living.close()
