"""Waiting for other ranks: spin, yield, sleep, and a warning or timeout in the end.

All waits go the same way. First polls without a pause, for the time in which an answer to a small
message comes (`POLLS`; the compiled rounds of a node have counts of their own). Then a `Backoff`:
for some milliseconds the core is given away after each poll, then there are naps, which grow with
the time waited so far, and some looks a second at whether the others are alive. A `Deadline` ends
it.
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

# About 0.3 us each.
POLLS = 200

# Seconds between two looks at whether a rank has died.
_LOOK_EVERY = 0.1

# How many ranks an error names.
_NAMES = 8


class BackoffPolicy(NamedTuple):
    """How often to look for something that may take long; all in seconds, but `share`.

    A rank that waits for a slow one must not take the core that the slow one needs.
    """

    yields: float  # for so long the core is only given away between two looks
    share: float  # of the time waited so far that a nap lasts
    shortest: float
    longest: float

    def nap(self, waited: float) -> float:
        """Return how long to sleep before the next look."""
        return min(self.longest, max(waited * self.share, self.shortest))


# Delays no operation by more than 2 %; 200 looks a second cost 1 % of a core.
_OPERATIONS = BackoffPolicy(yields=0.02, share=1 / 64, shortest=0.0, longest=0.005)

# For what may take days: a look among what has come takes 0.15 ms, 20 a second 0.3 % of a core.
IN_RESERVE = _OPERATIONS._replace(longest=0.05)


class Backoff:
    """A wait for one thing, from now on.

    Args:
        first_nap: seconds to sleep, instead of giving the core away, as long as the wait is short.
        pace: how often to look.
    """

    def __init__(self, first_nap: float = 0.0, pace: BackoffPolicy = _OPERATIONS) -> None:
        self._first_nap = first_nap
        self._pace = pace
        self._began = time.monotonic()
        self._look_at = self._began + _LOOK_EVERY

    def pause(self) -> bool:
        """Leave the core to others, and tell whether it is time to look after the other ranks."""
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
    """Ask again and again, with naps of `every` seconds, for `limit` seconds; tell the answer."""
    give_up = time.monotonic() + limit
    while not (answer := found()) and time.monotonic() < give_up:
        time.sleep(every)
    return answer


class _Thread(threading.local):
    """What holds for the waits of one thread."""

    stop: threading.Event | None = None


# A thread that works for others puts an event here; when it is set, the thread's waits end.
this_thread = _Thread()


class PendingMessage(Protocol):
    """A message under way, or something else to come from other ranks."""

    def done(self) -> bool:
        """Make progress and tell whether the memory may be used again.

        Raises:
            MismatchError: the other side sent another number of bytes.
            PeerFailure: the other side is dead.
        """

    def describe(self) -> str:
        """Say whom this waits for: "rank 3 to send 8 bytes"."""

    @property
    def peers(self) -> Sequence[int]:
        """The ranks that this waits for; where it is all of them, some."""


class WaitListener(Protocol):
    """Is told for what a call waited, and how long."""

    def waited(self, began: int, messages: Sequence[PendingMessage]) -> None:
        """Note a wait that ends now; it began at so many ns of the monotonic clock."""

    def exchanged(self, began: int) -> None:
        """Note the same of an exchange among all ranks."""

    def algorithm_chosen(self, algorithm: str) -> None:
        """Note by which algorithm the call goes."""


class CompletedWait(NamedTuple):
    """What takes no message: it has come, or nothing but a look elsewhere will tell."""

    text: str
    peers: Sequence[int]
    has_come: bool

    def done(self) -> bool:
        """Tell whether it has come."""
        return self.has_come

    def describe(self) -> str:
        """Say whom this waits for."""
        return self.text


class RankSet:
    """Some ranks, `size` of them, of which this one is `rank`, and how errors name them."""

    rank: int
    size: int

    # Of each rank its number in the world, where this is a part of it; None where it is the world.
    world: Sequence[int] | None = None

    def name(self, ranks: Sequence[int]) -> str:
        """Name ranks, by their numbers in the world, too, where these are others."""
        return describe_ranks(ranks, self.world)

    def name_of_world(self, world_ranks: Sequence[int], numbers: Sequence[int]) -> str:
        """Name ranks that are given by their numbers in the world.

        Args:
            world_ranks: at least one.
            numbers: of each rank of the group its number in the world.
        """
        if set(world_ranks) <= set(numbers):
            return self.name([numbers.index(rank) for rank in world_ranks])
        return f"world {describe_ranks(world_ranks)}"

    def compiling(self) -> str:
        """Say which ranks on other nodes compile: "rank 1 has compiled loops for 12 s"."""
        return ""

    @property
    def where(self) -> str:
        """This rank, as the last words of an error: "rank 1 (world rank 3) of 2"."""
        return f"{self.name([self.rank])} of {self.size}"


def describe_ranks(ranks: Sequence[int], world: Sequence[int] | None = None) -> str:
    """Name ranks of a group.

    Args:
        ranks: at least one.
        world: of each rank of the group its number in the world; None if that is the same.

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
    """Seconds, but for those in which this process has made what it needs once."""
    return time.monotonic() - compile_time.total_seconds()


class Deadline:
    """When one call of one operation has waited long enough.

    Args:
        operation: the name that errors and log lines carry.
        limit: seconds from now.
        warn_after: seconds from now after which a wait is reported once.
        whereabouts: says which ranks have not come and what they last did, as far as is known.

    Attributes:
        waits: is told of them; None where nobody wants to know.
        first_call: whether this is the group's first call, which some rank may not have entered.
        peer_has_come: in a first call, whether the awaited rank has entered it, and itself waits
            for another rank; None if unknown.
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
        """Seconds since the call began, but for those in which this process compiled."""
        return _clock() - self._start

    def check(
        self,
        ranks: RankSet,
        pending: Sequence[PendingMessage],
        culprit: Callable[[Sequence[PendingMessage]], str | None] = lambda pending: None,
    ) -> None:
        """Report a stall once, and raise `CollectiveTimeout` when the time is over.

        Args:
            ranks: the group that waits, as errors name it.
            pending: what it waits for.
            culprit: names the rank that all wait for, as `Transport.blocking_rank`.

        Raises:
            CollectiveError: this thread is told to stop.
        """
        if self._stop is not None and self._stop.is_set():
            raise CollectiveError(f"{self.operation}: stopped ({ranks.where})")
        waited = self.waited
        if waited > self._warn_after:  # first: a process that slept past both still leaves its line
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
            if not known and found:  # "rank 3, for which rank 0 waits, too"
                known = f"{found.partition(',')[0]} has called nothing yet"
            elif not known and (self.peer_has_come is False or found == ""):
                late = dict.fromkeys(m.describe().partition(" to ")[0] for m in pending)
                due = ", ".join(f"{name} to enter the call" for name in late)
                known = ", ".join(f"{name} has called nothing yet" for name in late)
            elif not known:
                known = "some rank has called nothing yet"
            known += f"; the limit is {self.limit:g} s, by UNISONO_TIMEOUT or timeout="
        return f"{due}; {known}" if known else due
