"""Cores that ranks share, where there are more ranks than cores.

A rank holds a core while it runs, and for a while longer when it waits: it polls before it gives
the core away (`transport.waiting`). What it waits for finds it at once as long as it polls. After
that it stands in line for a core, in the order in which ranks became ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Clock", "Host", "Rank"]


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


class Host:
    """Some cores, and the ranks that run on them.

    Args:
        clock: of all ranks.
        ranks: how many share it.
        cores: that it has.
        change: seconds from one rank on a core to the next one.
    """

    def __init__(self, clock: Clock, ranks: int, cores: int, change: float) -> None:
        self._clock = clock
        self._cores = self._free = cores
        self._ranks = ranks
        self._change = change
        self._line: deque[Rank] = deque()
        self._until: dict[Rank, float] = {}  # who holds a core, and for how long; inf: it runs

    def begin(self, rank: Rank) -> None:
        """Let a rank run for the first time, as soon as there is a core."""
        if self._free:
            self._free -= 1
            self._run(rank)
        else:
            self._line.append(rank)

    def ready(self, rank: Rank) -> None:
        """Let a rank run, or stand in line; called when the clock is at the time."""
        if rank in self._until:  # it still polls
            self._run(rank)
        elif self._free:
            self._free -= 1
            rank.now = max(rank.now, self._clock.now + self._turn())
            self._run(rank)
        else:
            self._line.append(rank)

    def waits(self, rank: Rank, patience: float) -> None:
        """Take note that a rank has begun to wait, at its own time, and polls for so long."""
        self._leave(rank, rank.now + patience)

    def told(self, rank: Rank) -> None:
        """Take note that a rank hears of an error, wherever it waits."""
        if rank in self._line:
            self._line.remove(rank)

    def ended(self, rank: Rank) -> None:
        """Take note that its program has ended."""
        self._leave(rank, rank.now)

    def _turn(self) -> float:
        """Return the seconds until a rank that is ready has a core that nobody works on.

        Those that wait have their turns there, too, to look whether their message has come: half of
        them on the average.
        """
        if self._ranks <= self._cores:
            return 0.0
        others = self._ranks - len(self._until) - len(self._line) - 1
        return self._change * (1 + max(0, others) / (2 * self._cores))

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
        if self._line:
            following = self._line.popleft()
            following.now = max(following.now, self._clock.now + self._turn())
            self._run(following)
        else:
            self._free += 1
