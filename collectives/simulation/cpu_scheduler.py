"""Simulated scheduling of more ranks than cores.

A rank holds a core while it runs, and for a while longer when it waits: it polls before it gives
the core away (`transport.backoff`). What it waits for finds it at once as long as it polls. After
that it has the core back in turns with the others, for a look each, and goes on in the order in
which ranks became ready.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["Clock", "CpuScheduler", "Rank", "WaitingRank", "WaitKinds"]


# How many times as long Python takes when others have had its core, for each doubling of their
# number: the part of a call that is not messages 22 us with a core of its own, 65 with two ranks on
# it, 140 with eight (`benchmarks/shared_host.py`), so 1.95 and 1.8.
COLD = 1.9


class WaitingRank(NamedTuple):
    """How somebody waits who shares a core, in seconds."""

    polls: float  # for so long it keeps the core
    look: float  # of the core, each time that it has it back and finds nothing
    resume: float  # until it goes on, when it has it back and finds something


class WaitKinds(NamedTuple):
    """How ranks wait for messages from Python, for those of compiled code, and in their node."""

    python: WaitingRank
    eager: WaitingRank
    engine: WaitingRank


_NEVER = WaitingRank(0.0, 0.0, 0.0)  # of who has not begun yet, or has ended


class Clock(Protocol):
    """What a host sees of the time of a cluster."""

    now: float

    def at(self, when: float, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` when the clock is there."""


class Rank(Protocol):
    """What a host sees of a rank."""

    now: float

    def go_on(self, when: float) -> None:
        """Run, with its own time not before `when`."""


class CpuScheduler:
    """Some cores, and the ranks that run on them.

    Args:
        clock: of all ranks.
        ranks: how many share it.
        cores: that it has.

    Attributes:
        is_shared: whether there are more ranks than cores.
        cold: how many times as long a program takes that has not run since others had its core.
    """

    def __init__(self, clock: Clock, ranks: int, cores: int) -> None:
        self._clock = clock
        self._cores = self._free = cores
        self.is_shared = ranks > cores
        self.cold = 1 + COLD * math.log2(max(1.0, ranks / cores))
        self._line: deque[Rank] = deque()
        self._until: dict[Rank, float] = {}  # who holds a core, and for how long; inf: it runs
        self._waits: dict[Rank, WaitingRank] = {}  # who has begun to wait, and how
        self._looking: dict[Rank, float] = {}  # seconds of a look, of who has given its core away

    def begin(self, rank: Rank) -> None:
        """Let a rank run for the first time, as soon as there is a core."""
        if self._free:
            self._free -= 1
            self._run(rank)
        else:
            self._line.append(rank)

    def runnable(self, rank: Rank) -> None:
        """Let a rank run, or stand in line; called when the clock is at the time."""
        if rank in self._until:  # it still polls
            self._run(rank)
            return
        self._looking.pop(rank, None)
        if self._free:
            self._free -= 1
            rank.now = max(rank.now, self._clock.now + self._turn(rank))
            self._run(rank)
        else:
            self._line.append(rank)

    def waits(self, rank: Rank, how: WaitingRank) -> None:
        """Take note that a rank has begun to wait, at its own time."""
        self._waits[rank] = how
        self._leave(rank, rank.now + how.polls)

    def message_arrived(self, rank: Rank) -> None:
        """Take note that a rank hears of an error, wherever it waits."""
        if rank in self._line:
            self._line.remove(rank)

    def finished(self, rank: Rank) -> None:
        """Take note that its program has ended."""
        self._waits[rank] = _NEVER
        self._looking.pop(rank, None)
        self._leave(rank, rank.now)

    def _turn(self, rank: Rank) -> float:
        """Return the seconds until a rank that is ready goes on, on a core that nobody works on.

        Those that wait have their turns there, too, to look whether their message has come: half of
        them on the average.
        """
        if not self.is_shared:
            return 0.0
        own = self._waits.get(rank, _NEVER).resume
        return own + sum(self._looking.values()) / (2 * self._cores)

    def _run(self, rank: Rank) -> None:
        self._until[rank] = float("inf")
        rank.go_on(self._clock.now)

    def _leave(self, rank: Rank, until: float) -> None:
        if rank in self._until:
            self._until[rank] = max(until, self._clock.now)
            self._clock.at(self._until[rank], self._give_away, rank)

    def _give_away(self, rank: Rank) -> None:
        """Let the next one have the core, unless its rank goes on or polls for longer."""
        if self._until.get(rank, float("inf")) > self._clock.now:
            return
        del self._until[rank]
        self._looking[rank] = self._waits[rank].look
        if self._line:
            following = self._line.popleft()
            following.now = max(following.now, self._clock.now + self._turn(following))
            self._run(following)
        else:
            self._free += 1
