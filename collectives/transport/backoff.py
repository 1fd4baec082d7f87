"""Waiting for other ranks: spin, yield, sleep, and a warning or timeout in the end.

All waits follow one pattern. They first poll without a pause, for as long as a small message takes
(`POLLS`; compiled kernels of a node have their own counts). A `Backoff` then yields the core after
each poll for some milliseconds. After that it naps, for longer the longer the wait lasts, and asks
for a check of the other ranks several times a second. A `Deadline` ends the wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from collectives.core import compile_time
from collectives.core.errors import CollectiveError, CollectiveTimeout

__all__ = [
    "IN_RESERVE",
    "POLLS",
    "Deadline",
    "CompletedWait",
    "PendingMessage",
    "BackoffPolicy",
    "RankSet",
    "Backoff",
    "WaitListener",
    "describe_ranks",
    "this_thread",
    "poll_until",
]

log = logging.getLogger(__name__)

# Polls before a wait backs off; about 0.3 us each.
POLLS = 200

# Seconds between two checks for dead ranks.
_LOOK_EVERY = 0.1

# Most ranks that an error names.
_NAMES = 8


class BackoffPolicy(NamedTuple):
    """How often to poll during a long wait; seconds, except `share`.

    A rank that waits for a slow one must not take the core that the slow one needs.
    """

    yields: float  # until then a poll is followed by a yield, then by naps
    share: float  # length of a nap, as a share of the time waited so far
    shortest: float
    longest: float

    def nap(self, waited: float) -> float:
        """Return the seconds to sleep before the next poll."""
        return min(self.longest, max(waited * self.share, self.shortest))


# Delays no operation by more than 2 %; 200 polls a second cost 1 % of a core.
_OPERATIONS = BackoffPolicy(yields=0.02, share=1 / 64, shortest=0.0, longest=0.005)

# For waits that may take days: a poll takes 0.15 ms, so 20 a second cost 0.3 % of a core.
IN_RESERVE = _OPERATIONS._replace(longest=0.05)


class Backoff:
    """Pauses of one wait, which begins now.

    Args:
        first_nap: seconds to sleep instead of yielding, while the wait is short.
        pace: how often to poll.
    """

    def __init__(self, first_nap: float = 0.0, pace: BackoffPolicy = _OPERATIONS) -> None:
        self._first_nap = first_nap
        self._pace = pace
        self._began = time.monotonic()
        self._look_at = self._began + _LOOK_EVERY

    def pause(self) -> bool:
        """Yield or sleep; return whether it is time to check the other ranks."""
        now = time.monotonic()
        waited = now - self._began
        if waited < self._pace.yields:
            if self._first_nap:
                time.sleep(self._first_nap)
            else:
                os.sched_yield()
            return False
        time.sleep(self._pace.nap(waited))
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_EVERY
        return True


def poll_until(found: Callable[[], bool], limit: float, every: float) -> bool:
    """Poll a condition every `every` seconds for at most `limit` seconds; return its value."""
    give_up = time.monotonic() + limit
    while not (answer := found()) and time.monotonic() < give_up:
        time.sleep(every)
    return answer


class _Thread(threading.local):
    """State of the waits of one thread."""

    stop: threading.Event | None = None


# A background thread puts an event here; setting the event aborts the thread's waits.
this_thread = _Thread()


class PendingMessage(Protocol):
    """A pending message, or another event on other ranks that a wait can wait for."""

    def done(self) -> bool:
        """Make progress, and return whether the memory may be reused.

        Raises:
            MismatchError: the other side sent another number of bytes.
            PeerFailure: the other side is dead.
        """

    def describe(self) -> str:
        """Return the event that this waits for: "rank 3 to send 8 bytes"."""

    @property
    def peers(self) -> Sequence[int]:
        """The awaited ranks; some of them if this waits for all ranks."""


class WaitListener(Protocol):
    """Listener that gets the waits of a call and their durations."""

    def waited(self, began: int, messages: Sequence[PendingMessage]) -> None:
        """Record a wait that ends now; it began at `began`, in ns of the monotonic clock."""

    def exchanged(self, began: int) -> None:
        """Record an exchange among all ranks; `began` as in `waited`."""

    def algorithm_chosen(self, algorithm: str) -> None:
        """Record the algorithm of the call."""


class CompletedWait(NamedTuple):
    """An event without a message: over already, or never seen to end by polling it."""

    text: str
    peers: Sequence[int]
    has_come: bool

    def done(self) -> bool:
        """Return `has_come`."""
        return self.has_come

    def describe(self) -> str:
        """Return the text."""
        return self.text


class RankSet:
    """A group of `size` ranks with this process as `rank`, and how errors name the ranks."""

    rank: int
    size: int

    # World rank of each rank, if this is a part of the world; None if it is the world.
    world: Sequence[int] | None = None

    def name(self, ranks: Sequence[int]) -> str:
        """Name ranks, with their world ranks where these differ."""
        return describe_ranks(ranks, self.world)

    def name_of_world(self, world_ranks: Sequence[int], numbers: Sequence[int]) -> str:
        """Name ranks that are given by their world ranks.

        Args:
            world_ranks: at least one.
            numbers: world rank of each rank of the group.
        """
        if set(world_ranks) <= set(numbers):
            return self.name([numbers.index(rank) for rank in world_ranks])
        return f"world {describe_ranks(world_ranks)}"

    def compiling(self) -> str:
        """Name ranks on other nodes that compile: "rank 1 has compiled loops for 12 s"."""
        return ""

    @property
    def where(self) -> str:
        """This rank, for the end of an error: "rank 1 (world rank 3) of 2"."""
        return f"{self.name([self.rank])} of {self.size}"


def describe_ranks(ranks: Sequence[int], world: Sequence[int] | None = None) -> str:
    """Name ranks of a group.

    Args:
        ranks: at least one.
        world: world rank of each rank of the group; None if the numbers are the same.

    Example:
        >>> describe_ranks([1]), describe_ranks([0, 1], [2, 3])
        ('rank 1', 'ranks 0 1 (world ranks 2 3)')
    """
    own = _list("rank", ranks)
    return own if world is None else f"{own} ({_list('world rank', [world[r] for r in ranks])})"


def _list(word: str, numbers: Sequence[int]) -> str:
    more = " ..." if len(numbers) > _NAMES else ""
    return f"{word}{'s' * (len(numbers) > 1)} {' '.join(map(str, numbers[:_NAMES]))}{more}"


def _clock() -> float:
    """Return monotonic seconds, without the time in which this process compiled."""
    return time.monotonic() - compile_time.total_seconds()


class Deadline:
    """Time limit of one call of one operation.

    Args:
        operation: name in errors and log lines.
        limit: seconds from now.
        warn_after: seconds from now after which one wait logs a warning.
        whereabouts: names the missing ranks and their last calls, as far as known.

    Attributes:
        waits: listener for the waits of the call; None for none.
        first_call: whether this is the group's first call, which some rank may not have entered.
        peer_has_come: in a first call, whether the awaited rank has entered the call and itself
            waits for another rank; None if unknown.
    """

    waits: WaitListener | None = None
    first_call = False
    peer_has_come: bool | None = None

    def __init__(
        self,
        operation: str,
        limit: float,
        warn_after: float = float("inf"),
        whereabouts: Callable[[], str] = str,
    ) -> None:
        self.operation = operation
        self.limit = limit
        self._warn_after = warn_after
        self._whereabouts = whereabouts
        self._start = _clock()
        self._stop = this_thread.stop

    @property
    def waited(self) -> float:
        """Seconds since the call began, without the time in which this process compiled."""
        return _clock() - self._start

    def check(
        self,
        ranks: RankSet,
        pending: Sequence[PendingMessage],
        culprit: Callable[[Sequence[PendingMessage]], str | None] = lambda pending: None,
    ) -> None:
        """Log a stall once, and raise `CollectiveTimeout` after the limit.

        Args:
            ranks: the group that waits, for the names in errors.
            pending: the messages that the group waits for.
            culprit: names the rank that all wait for, as `Transport.blocking_rank`.

        Raises:
            CollectiveError: the event of this thread was set.
        """
        if self._stop is not None and self._stop.is_set():
            raise CollectiveError(f"{self.operation}: stopped ({ranks.where})")
        waited = self.waited
        if waited > self._warn_after:  # before the limit: a process may sleep past both
            self._warn_after = float("inf")
            missing = self._missing(ranks, pending, culprit)
            if ranks.world is not None:
                missing += f" ({ranks.where})"
            who = f"[{ranks.rank}/{ranks.size}]"
            log.warning("%s %s has waited %.0f s for %s", who, self.operation, waited, missing)
        if waited > self.limit:
            raise CollectiveTimeout(
                f"{self.operation}: no answer within {self.limit:g} s, still waiting for "
                f"{self._missing(ranks, pending, culprit)} ({ranks.where})"
            )

    def _missing(
        self,
        ranks: RankSet,
        pending: Sequence[PendingMessage],
        culprit: Callable[[Sequence[PendingMessage]], str | None],
    ) -> str:
        found = culprit(pending)
        due = found or ", ".join(dict.fromkeys(m.describe() for m in pending))
        known = self._whereabouts() or ranks.compiling()
        if self.first_call:
            if not known and found:  # "rank 3, for which rank 0 also waits"
                known = f"{found.partition(',')[0]} has called nothing yet"
            elif not known and (self.peer_has_come is False or found == ""):
                late = dict.fromkeys(m.describe().partition(" to ")[0] for m in pending)
                due = ", ".join(f"{name} to enter the call" for name in late)
                known = ", ".join(f"{name} has called nothing yet" for name in late)
            elif not known:
                known = "some rank has called nothing yet"
            known += f"; the limit is {self.limit:g} s, by UNISONO_TIMEOUT or timeout="
        return f"{due}; {known}" if known else due
