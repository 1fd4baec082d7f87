"""Simulated scheduling of more ranks than cores.

A rank holds a core while it runs. When it waits, it polls for a while before it yields the core
(`transport.backoff`); a message that arrives while it polls resumes it at once. After that it gets
the core in turns with other ranks, for one look each. Ready ranks resume in order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["Clock", "CpuScheduler", "Rank", "WaitingRank", "WaitKinds"]


# Slowdown of Python if other ranks have used its core, per doubling of their number. The part of a
# call without messages takes 22 us with a core of its own, 65 with two ranks per core, 140 with
# eight (`benchmarks/shared_host.py`): factors of 1.95 and 1.8.
COLD = 1.9


class WaitingRank(NamedTuple):
    """Cost of a rank's wait on a shared core, in seconds."""

    polls: float  # time for which it keeps the core
    look: float  # core time of each later look that finds nothing
    resume: float  # from getting the core back, with a message there, until it continues


class WaitKinds(NamedTuple):
    """Waits for Python's messages, for messages of compiled code, and in the node engine."""

    python: WaitingRank
    eager: WaitingRank
    engine: WaitingRank


_NEVER = WaitingRank(0.0, 0.0, 0.0)  # of a rank that has not begun, or has finished


class Clock(Protocol):
    """The clock, as the scheduler uses it."""

    now: float

    def at(self, when: float, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` when the clock reaches `when`."""


class Rank(Protocol):
    """A rank, as the scheduler uses it."""

    now: float

    def go_on(self, when: float) -> None:
        """Run, at its own time `when` or later."""


class CpuScheduler:
    """The cores of a host, and the ranks that run on them.

    Args:
        clock: clock of all ranks.
        ranks: number of ranks that share the host.
        cores: number of its cores.

    Attributes:
        is_shared: whether there are more ranks than cores.
        cold: slowdown of a program after other ranks have used its core.
    """

    def __init__(self, clock: Clock, ranks: int, cores: int) -> None:
        self._clock = clock
        self._cores = self._free = cores
        self.is_shared = ranks > cores
        # 1 without sharing, and more with each doubling of ranks per core.
        self.cold = 1 + COLD * math.log2(max(1.0, ranks / cores))
        self._line: deque[Rank] = deque()
        self._until: dict[Rank, float] = {}  # ranks that hold a core, and until when; inf: running
        self._waits: dict[Rank, WaitingRank] = {}  # ranks that wait
        self._looking: dict[Rank, float] = {}  # seconds of a look, of ranks that yielded their core

    def begin(self, rank: Rank) -> None:
        """Run a rank for the first time, as soon as a core is free."""
        # In the order of ranks, as the processes start.
        if self._free:
            self._free -= 1
            self._run(rank)
        else:
            self._line.append(rank)

    def runnable(self, rank: Rank) -> None:
        """Run a rank, or queue it; called when the clock is at that time."""
        if rank in self._until:  # it still polls on its core
            self._run(rank)
            return
        # It no longer polls in vain.
        self._looking.pop(rank, None)
        if self._free:
            self._free -= 1
            # The switch to this rank, and the looks of others before it.
            rank.now = max(rank.now, self._clock.now + self._turn(rank))
            self._run(rank)
        else:
            self._line.append(rank)

    def waits(self, rank: Rank, how: WaitingRank) -> None:
        """Record that a rank begins to wait, at its own time."""
        self._waits[rank] = how
        # It keeps the core while it polls; then an event gives the core away.
        self._leave(rank, rank.now + how.polls)

    def message_arrived(self, rank: Rank) -> None:
        """Remove a rank from the queue, because an error ends its wait."""
        if rank in self._line:
            self._line.remove(rank)

    def finished(self, rank: Rank) -> None:
        """Record that a rank's program has finished."""
        # A finished rank never looks again.
        self._waits[rank] = _NEVER
        self._looking.pop(rank, None)
        self._leave(rank, rank.now)

    def _turn(self, rank: Rank) -> float:
        """Return the seconds until a ready rank resumes on an idle core.

        Waiting ranks also get turns on the core, to look for their messages: half of them on
        average.
        """
        if not self.is_shared:
            return 0.0
        # Half of the waiting ranks look before this one, on average.
        own = self._waits.get(rank, _NEVER).resume
        return own + sum(self._looking.values()) / (2 * self._cores)

    def _run(self, rank: Rank) -> None:
        self._until[rank] = float("inf")
        rank.go_on(self._clock.now)

    def _leave(self, rank: Rank, until: float) -> None:
        # A rank without a core has nothing to give away.
        if rank in self._until:
            # Its own time may be ahead of the clock.
            self._until[rank] = max(until, self._clock.now)
            self._clock.at(self._until[rank], self._give_away, rank)

    def _give_away(self, rank: Rank) -> None:
        """Give the core to the next rank, unless its holder runs or still polls."""
        # It runs, or polls longer than when this event was made.
        if self._until.get(rank, float("inf")) > self._clock.now:
            return
        del self._until[rank]
        # From now on it takes turns with other ranks.
        self._looking[rank] = self._waits[rank].look
        if self._line:
            following = self._line.popleft()
            following.now = max(following.now, self._clock.now + self._turn(following))
            self._run(following)
        else:
            self._free += 1
