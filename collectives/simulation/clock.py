"""Virtual clock: simulated ranks take turns in one thread.

A rank runs until it waits for a message that is not there. Its own time may then be ahead of the
clock, by what its program has taken since the event that woke it. Only when all ranks wait does the
clock go on to the next event. So events come in the order of their times, and whatever a rank does
is dated by its own time, which is never before the clock's: what it has done ahead of the clock can
still be in the future of others, never in their past.

Each rank is a coroutine with a stack of its own (greenlet), since algorithms wait in the middle of
plain functions.
"""

from __future__ import annotations

import gc
import random
import resource
import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from collectives.core.errors import CollectiveTimeout, PeerFailure
from collectives.simulation.cluster import SimulatedCluster
from collectives.simulation.cpu_scheduler import CpuScheduler, WaitingRank
from collectives.transport.backoff import CompletedWait, PendingMessage, describe_ranks

__all__ = ["NEVER", "EventClock", "SimulatedRank", "Stopped"]

NEVER = float("inf")

# Seconds after which those that wait hear of a death: they look ten times a second (`waiting`).
_NOTICED_AFTER = 0.1

# Events between two looks at the real time.
_LOOK_EVERY = 4096


# Bytes by which a simulation may let the process grow: a flat ring of 8,192 ranks, each of which
# cuts its buffer into 8,192 chunks, would take all memory of a machine before its first message.
_MOST_BYTES = 4 << 30


# What a rank waits for that has not begun.
_A_CORE = CompletedWait("a core", (), has_come=False)


class Stopped(Exception):
    """A simulation has taken as much time, or memory, as it may.

    Attributes:
        reached: seconds on the clock until then.
    """

    def __init__(self, reached: float) -> None:
        super().__init__(f"simulation: stopped at {reached:g} s on its clock")
        self.reached = reached


class _Died(BaseException):
    """Unwinds a rank that is dead; no rank catches it."""


class SimulatedRank:
    """One rank: its time, its program, and what it waits for.

    Args:
        clock: of all ranks.
        number: its rank.
        host: whose cores it shares with others; None where it has a core of its own.

    Attributes:
        now: seconds on its own clock.
        dies: when it is dead.
        waits_for: what has to come before it goes on; None while it runs and when it has ended.
        operation: the name that errors of its wait carry.
    """

    __slots__ = (
        "_clock", "_coroutine", "_factor", "_host", "_noise", "_random", "dies", "error", "now",
        "number", "operation", "result", "size", "waits_for",
    )  # fmt: skip

    def __init__(self, clock: EventClock, number: int, host: CpuScheduler | None) -> None:
        cluster = clock.cluster
        self.number, self.size = number, cluster.size
        self.now = 0.0
        self.dies = cluster.deaths.get(number, NEVER)
        self.waits_for: PendingMessage | None = None
        self.operation = ""
        self.result: Any = None
        self.error: BaseException | None = None
        self._clock, self._host = clock, host
        self._factor = cluster.slow.get(number, 1.0)
        self._noise = cluster.noise
        self._random = random.Random(cluster.seed * 1_000_003 + number)
        self._coroutine: Any = None

    def begin(self, program: Callable[[], Any]) -> None:
        """Run the program until it first waits."""

        def body() -> None:
            try:
                self.result = program()
                if self.dies <= self.now:
                    raise _Died
            except _Died as died:
                self.error, self.result = died, None
            except Exception as error:
                self.error = error

        self._coroutine = _greenlet()(body)
        if self._host is None:
            self._coroutine.switch()
        else:
            self.waits_for = _A_CORE
            self._host.begin(self)

    @property
    def shares(self) -> bool:
        """Whether it has to share a core."""
        return self._host is not None and self._host.is_shared

    @property
    def cache_cold(self) -> float:
        """How many times as long a program takes whose code is in no cache of its core."""
        return 1.0 if self._host is None else self._host.cold

    @property
    def died(self) -> bool:
        """Whether it is dead; not whether it has failed."""
        return isinstance(self.error, _Died)

    def advance(self, seconds: float) -> None:
        """Let its program take so long, as it does on this rank and this time."""
        if self._noise:
            shape = self._noise**-2
            seconds *= self._random.gammavariate(shape, 1 / shape)
        self.now += self._factor * seconds
        if self.now >= self.dies:
            raise _Died

    def wait(self, message: PendingMessage, operation: str, how: WaitingRank) -> None:
        """Let others go on until `wake`.

        Args:
            message: that has to come.
            operation: the name that errors carry.
            how: it waits.

        Raises:
            PeerFailure: a rank is dead, whether or not this one waits for it.
            CollectiveTimeout: no rank can go on any more.
        """
        clock = self._clock
        if clock.dead:
            raise self.from_failed(operation)
        self.waits_for, self.operation = message, operation
        if self._host is not None:
            self._host.waits(self, how)
        clock.turn.switch()

    def sleep(
        self, until: float, message: PendingMessage, operation: str, how: WaitingRank
    ) -> None:
        """Wait for a message of which it is known when it is there."""
        if self._host is None:
            self.now = until
        else:
            self._clock.at(until, self._come, message)
            self.wait(message, operation, how)

    def wake(self, when: float) -> None:
        """Go on, with its own time not before `when`; called by events, not by ranks."""
        if self._host is None:
            self.go_on(when)
        else:
            self._clock.at(max(when, self._clock.now), self._come, self.waits_for)

    def _come(self, message: PendingMessage) -> None:
        """What it waits for is there: ask for a core."""
        if self.waits_for is message and self._host is not None:  # it has not ended meanwhile
            self._host.runnable(self)

    def go_on(self, when: float) -> None:
        """Run, with its own time not before `when`."""
        if when > self.now:
            self.now = when
        self.waits_for = None
        self._coroutine.switch()
        self._has_ended()

    def end(self, error: BaseException) -> None:
        """Go on with an error, for which it needs no core."""
        begun, self.waits_for = self.waits_for is not _A_CORE, None
        if self._host is not None:
            self._host.message_arrived(self)
        if not begun:
            self.error = error
            return
        self._coroutine.throw(error)
        self._has_ended()

    def _has_ended(self) -> None:
        if self._host is not None and self._coroutine.dead:
            self._host.finished(self)

    def kill(self) -> None:
        """End it where it waits, and its program without an answer to anybody."""
        if self.waits_for is not None:
            self.end(_Died())

    def from_failed(self, operation: str) -> PeerFailure:
        """Return the error of who waits for ranks of which some are dead."""
        where = f"{describe_ranks([self.number])} of {self.size}"
        return PeerFailure(f"{operation}: {describe_ranks(self._clock.dead)} died ({where})")


class EventClock:
    """The time of a cluster, and its ranks.

    Args:
        cluster: whose.

    Attributes:
        now: seconds.
        ranks: in order.
        dead: ranks that the others know to be dead.
        turn: the coroutine to which a rank switches when it waits.
        delivered: messages that have arrived so far.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.now = 0.0
        self.dead: list[int] = []
        self.delivered = 0
        hosts = self._hosts()
        self.ranks = [SimulatedRank(self, number, hosts[number]) for number in range(cluster.size)]
        self.turn = _greenlet().getcurrent()
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._number = 0

    def _hosts(self) -> list[CpuScheduler | None]:
        """Return the host of every rank; None where it has a core of its own."""
        cluster = self.cluster
        if cluster.cores is None:
            return [None] * cluster.size
        numbers = [node // cluster.nodes_per_host for node in cluster.nodes()]
        hosts = [
            CpuScheduler(self, numbers.count(number), cluster.cores)
            for number in range(numbers[-1] + 1)
        ]
        return [hosts[number] for number in numbers]

    def at(self, when: float, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` when the clock is there; in order among equal times."""
        self._number += 1
        heappush(self._events, (when, self._number, action, argument))

    def run(
        self,
        programs: Sequence[Callable[[], Any]],
        within: float = NEVER,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        """Run a program on every rank, until all have ended.

        Args:
            programs: one for each rank.
            within: real seconds that it may take.
            progress: told now and then how many messages have arrived, and the time on the clock.

        Raises:
            Stopped: it takes longer, or 4 GiB.
        """
        stop = time.monotonic() + within
        most = _most_memory() + _MOST_BYTES
        events = self._events
        collects = gc.isenabled()
        gc.disable()  # a simulation has millions of objects, none of them in a circle for long
        try:
            for number, when in self.cluster.deaths.items():
                self.at(when, self._die, number)
            for rank, program in zip(self.ranks, programs, strict=True):
                rank.begin(program)
                if time.monotonic() > stop or _most_memory() > most:
                    raise Stopped(0.0)
            looks = 0
            while self._waiting():
                while events:
                    self.now, _, action, argument = heappop(events)
                    action(argument)
                    looks += 1
                    if looks == _LOOK_EVERY:
                        looks = 0
                        if progress is not None:
                            progress(self.delivered, self.now)
                        if time.monotonic() > stop or _most_memory() > most:
                            raise Stopped(self.now)
                self._end_all(self._stuck)
        except BaseException:
            self._end_all(lambda rank: _Died())
            raise
        finally:
            events.clear()
            if collects:
                gc.enable()

    def _waiting(self) -> list[SimulatedRank]:
        return [rank for rank in self.ranks if rank.waits_for is not None]

    def _die(self, number: int) -> None:
        """Let a rank be dead from now on, and the others notice."""
        rank = self.ranks[number]
        if rank.waits_for is not None or rank.died:
            rank.kill()
            self.at(self.now + _NOTICED_AFTER, self._notice, number)

    def _notice(self, number: int) -> None:
        self.dead.append(number)
        for rank in self._waiting():
            if rank.waits_for is not None:  # not ended meanwhile by what another one did
                rank.now = max(rank.now, self.now)
                rank.end(rank.from_failed(rank.operation))

    def _stuck(self, rank: SimulatedRank) -> BaseException:
        """Return the error of a rank for which nothing is on the way."""
        waited = "" if rank.waits_for is None else rank.waits_for.describe()
        return CollectiveTimeout(
            f"{rank.operation}: no answer will come, still waiting for {waited} "
            f"({describe_ranks([rank.number])} of {rank.size})"
        )

    def _end_all(self, error: Callable[[SimulatedRank], BaseException]) -> None:
        for rank in self._waiting():
            if rank.waits_for is not None:
                rank.end(error(rank))


def _most_memory() -> int:
    """Return the bytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _greenlet() -> Any:
    """Return the package's class.

    Raises:
        ImportError: it is not installed; says how to.
    """
    try:
        from greenlet import greenlet
    except ImportError as error:
        raise ImportError(
            "simulation: ranks take turns by greenlet, which is not installed: pip install greenlet"
        ) from error
    return greenlet
