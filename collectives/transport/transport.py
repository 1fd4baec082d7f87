"""Send and receive one array between two ranks, never waiting without a limit.

Algorithms see a `Transport`: two operations that start a message (`start_send`, `start_receive`)
and one that waits for some of them. A message that has been started holds a reference to its
memory until it is complete, also when a wait ends with an error.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from collectives.arrays import device
from collectives.arrays.host import Array
from collectives.errors import CollectiveError, CollectiveTimeout
from collectives.transport.mailbox import Mail

__all__ = ["Deadline", "Message", "Transport", "named", "this_thread"]

log = logging.getLogger(__name__)

# A wait polls without a pause this often (about 0.3 us each: the time in which an answer to a
# small message comes), then gives its core away after each poll, and after `_DROWSY` seconds sleeps
# between polls: a rank that waits for a slow one must not take the core that the slow one needs.
# A nap lasts a sixty-fourth of the time waited so far, so that it delays no operation by more than
# 2 %, and at most `_LONGEST_NAP` seconds: 200 polls per second cost 1 % of a core.
_SPINS = 200
_DROWSY = 0.02
_NAP_SHARE = 1 / 64
_LONGEST_NAP = 0.005

# How many ranks an error names.
_NAMES = 8

# Seconds between two looks at whether a rank that this one does not wait for has died.
_LOOK_EVERY = 0.1


class _Thread(threading.local):
    """What holds for the waits of one thread."""

    stop: threading.Event | None = None


# A thread that works for others puts an event here; when it is set, the thread's waits end.
this_thread = _Thread()


class Deadline:
    """When one call of one operation has waited long enough.

    Args:
        operation: the name that errors and log lines carry.
        limit: seconds from now.
        warn_after: seconds from now after which a wait is reported once.
        whereabouts: says which ranks have not come and what they last did, as far as is known.
    """

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
        self._start = time.monotonic()
        self._stop = this_thread.stop

    @property
    def waited(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._start

    def check(
        self,
        ranks: Transport,
        pending: Sequence[Message],
        culprit: Callable[[Sequence[Message]], str] = lambda pending: "",
    ) -> None:
        """Report a stall once, and raise `CollectiveTimeout` when the time is over.

        Args:
            ranks: the group that waits, as errors name it.
            pending: what it waits for.
            culprit: finds out whom all wait for, if that is not who owes one of those messages.

        Raises:
            CollectiveError: this thread is told to stop.
        """
        if self._stop is not None and self._stop.is_set():
            raise CollectiveError(f"{self.operation}: stopped ({ranks.where})")
        waited = self.waited
        if waited > self.limit:
            raise CollectiveTimeout(
                f"{self.operation}: no answer within {self.limit:g} s, still waiting for "
                f"{self._missing(pending, culprit)} ({ranks.where})"
            )
        if waited > self._warn_after:
            self._warn_after = float("inf")
            log.warning(
                "[%d/%d] %s has waited %.0f s for %s%s",
                ranks.rank, ranks.size, self.operation, waited, self._missing(pending, culprit),
                "" if ranks.world is None else f" ({ranks.where})",
            )  # fmt: skip

    def _missing(
        self, pending: Sequence[Message], culprit: Callable[[Sequence[Message]], str]
    ) -> str:
        named = dict.fromkeys(message.describe() for message in pending)
        due = culprit(pending) or ", ".join(named)
        known = self._whereabouts()
        return f"{due}; {known}" if known else due


def named(ranks: Sequence[int], world: Sequence[int] | None = None) -> str:
    """Name ranks of a group.

    Args:
        ranks: at least one.
        world: of each rank of the group its number in the world; None if that is the same.

    Example:
        >>> named([1]), named([0, 1], [2, 3])
        ('rank 1', 'ranks 0 1 (world ranks 2 3)')
    """
    own = _listed("rank", ranks)
    return own if world is None else f"{own} ({_listed('world rank', [world[r] for r in ranks])})"


def _listed(word: str, numbers: Sequence[int]) -> str:
    more = " ..." if len(numbers) > _NAMES else ""
    return f"{word}{'s' * (len(numbers) > 1)} {' '.join(map(str, numbers[:_NAMES]))}{more}"


class Message(Protocol):
    """A message under way."""

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


class _Nothing:
    """A message of no bytes: both sides know that nothing has to be sent."""

    def done(self) -> bool:
        return True

    def describe(self) -> str:
        return "nothing"

    @property
    def peers(self) -> Sequence[int]:
        return ()


class Transport(ABC):
    """Messages among `size` ranks, of which this one is `rank`.

    Messages between two ranks arrive in the order in which they were started. Arrays are
    contiguous; both sides must name the same number of bytes. One thread at a time uses it.
    """

    rank: int
    size: int

    # Of each rank its number in the world, where this is a part of it; None where it is the world.
    world: Sequence[int] | None = None

    def name(self, ranks: Sequence[int]) -> str:
        """Name ranks, by their numbers in the world, too, where these are others."""
        return named(ranks, self.world)

    @property
    def where(self) -> str:
        """This rank, as the last words of an error: "rank 1 (world rank 3) of 2"."""
        return f"{self.name([self.rank])} of {self.size}"

    @property
    def whole(self) -> Transport:
        """The group by whose numbers errors name ranks: another one if this is a part of it."""
        return self

    def number(self, rank: int) -> int:
        """Return the number that a rank of this transport has in the whole group."""
        return rank

    @abstractmethod
    def _start_send(self, data: Array, dest: int) -> Message:
        """Start sending a contiguous array of at least one byte."""

    @abstractmethod
    def _start_receive(self, into: Array, source: int) -> Message:
        """Start receiving into a contiguous array of at least one byte."""

    @abstractmethod
    def split(self, color: int | None, key: int) -> Transport | None:
        """Make a transport for the ranks that name the same color, ordered by key, then rank."""

    def lane(self) -> Transport:
        """Return messages among the same ranks that never meet those of this; sends nothing.

        It is the same transport under another tag, and closes with it.
        """
        raise NotImplementedError(f"lane: {type(self).__name__} is only a part of a transport")

    def open_mail(self) -> Mail:
        """Make mail between the same ranks, independent of this transport; *collective*."""
        raise NotImplementedError(f"open_mail: {type(self).__name__} is only a part of a transport")

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds; closing twice is harmless."""

    def look_around(  # noqa: B027  (not every transport can tell)
        self, operation: str, peers: Sequence[int] = ()
    ) -> None:
        """Raise `PeerFailure` if any rank is known to be dead, also one that nothing is due from.

        Also if one that something is due from is known to have ended its program. A wait does this
        by itself; who waits without messages has to call it, some times a second.

        Args:
            operation: the name that the error carries.
            peers: the ranks that this one waits for.
        """

    def pass_on(self, rank: int, how: str) -> None:  # noqa: B027  (not every transport can tell)
        """Tell ranks that wait for this one why it fails: another one of the group has left.

        Args:
            rank: who has left.
            how: as errors say it.
        """

    def culprit(self, pending: Sequence[Message]) -> str:
        """Say whom all wait for, if it is known to be another rank than those that owe messages."""
        return ""

    def check_threads(self, operation: str) -> None:  # noqa: B027  (most transports do not mind)
        """Refuse to be used by several threads at a time, this transport and others like it.

        Raises:
            LaunchError: MPI was started without support for that.
        """

    def progress(self) -> None:  # noqa: B027  (not every transport needs it)
        """Move on messages that are under way while this rank waits for something else."""

    def _explain(self, error: RuntimeError, operation: str) -> RuntimeError:
        """Return what an error means to callers, who know nothing of how messages travel."""
        return error

    def start_send(self, data: Array, dest: int) -> Message:
        """Start sending `data`; it must not change until the message is done."""
        device.settle(data)
        return self._start_send(data, dest) if data.size else _NOTHING

    def start_receive(self, into: Array, source: int) -> Message:
        """Start receiving exactly `into.nbytes` bytes; `into` is undefined until done."""
        device.settle(into)
        return self._start_receive(into, source) if into.size else _NOTHING

    def poll(self, message: Message, operation: str) -> bool:
        """Tell whether a message is done, without waiting; errors as those of `wait`."""
        try:
            return message.done()
        except RuntimeError as error:
            meaning = self._explain(error, operation)
            if meaning is error:
                raise
            raise meaning from error

    def wait(self, messages: Sequence[Message], deadline: Deadline) -> None:
        """Wait until every message is done.

        Raises:
            CollectiveTimeout: the deadline has passed; names the ranks that are missing.
            PeerFailure: a rank is dead, whether or not this one waits for it.
            MismatchError: a rank sent another number of bytes.
        """
        try:
            # One after the other: each poll moves all messages that are under way.
            for message in messages:
                polls = 0
                while not message.done():
                    polls += 1
                    if polls > _SPINS:
                        self._wait_long(messages, deadline)
        except RuntimeError as error:
            meaning = self._explain(error, deadline.operation)
            if meaning is error:
                raise
            raise meaning from error

    def _wait_long(self, messages: Sequence[Message], deadline: Deadline) -> None:
        """Wait while leaving the core to others, and look after the other ranks."""
        began = time.monotonic()
        look_at = began + _LOOK_EVERY
        while pending := [message for message in messages if not message.done()]:
            deadline.check(self, pending, self.culprit)
            now = time.monotonic()
            if now > look_at:
                look_at = now + _LOOK_EVERY
                peers = [rank for message in pending for rank in message.peers]
                self.look_around(deadline.operation, list(dict.fromkeys(peers)))
            if now - began < _DROWSY:
                os.sched_yield()
            else:
                time.sleep(min((now - began) * _NAP_SHARE, _LONGEST_NAP))

    def send(self, data: Array, dest: int, deadline: Deadline) -> None:
        """Send `data` and wait until its memory may be used again."""
        self.wait((self.start_send(data, dest),), deadline)

    def receive(self, into: Array, source: int, deadline: Deadline) -> None:
        """Receive exactly `into.nbytes` bytes."""
        self.wait((self.start_receive(into, source),), deadline)

    def exchange(
        self, data: Array, dest: int, into: Array, source: int, deadline: Deadline
    ) -> None:
        """Send to one rank while receiving from another, or the same one."""
        # The receive is posted first, so that data arrives where it belongs without a detour.
        receive = self.start_receive(into, source)
        self.wait((receive, self.start_send(data, dest)), deadline)


_NOTHING = _Nothing()
