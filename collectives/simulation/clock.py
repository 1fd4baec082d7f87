"""Virtual clock: simulated ranks take turns in one thread.

A rank runs until it waits for a missing message. Its own time may then be ahead of the clock, by
the time its program took since the event that woke it. The clock advances to the next event only
when all ranks wait. So events happen in the order of their times. Everything a rank does is dated
by its own time, which is never before the clock. Its actions ahead of the clock may still be in the
future of other ranks, but never in their past.

Each rank is a coroutine with its own stack (greenlet), because algorithms wait inside plain
functions.
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

# Seconds after which waiting ranks detect a death: they check ten times a second
# (`transport.backoff`).
_NOTICED_AFTER = 0.1

# Events between two checks of the real time.
_LOOK_EVERY = 4096


# Bytes by which a simulation may grow the process: a flat ring of 8,192 ranks, each of which cuts
# its buffer into 8,192 chunks, would exhaust a machine's memory before its first message.
_MOST_BYTES = 4 << 30


# What a rank waits for before its program has begun.
_A_CORE = CompletedWait("a core", (), has_come=False)


class Stopped(Exception):
    """A simulation has exceeded its limit of time or memory.

    Attributes:
        reached: seconds on the clock by then.
    """

    def __init__(self, reached: float) -> None:
        super().__init__(f"simulation: stopped at {reached:g} s on its clock")
        self.reached = reached


class _Died(BaseException):
    """Unwinds the program of a dead rank; no program catches it."""


class SimulatedRank:
    """One rank: its time, its program, and the message it waits for.

    Args:
        clock: clock of all ranks.
        number: its rank.
        host: scheduler of the cores it shares; None if it has a core of its own.

    Attributes:
        now: seconds on its own clock.
        dies: when it dies.
        waits_for: the message it waits for; None while it runs and after it has finished.
        operation: name for the errors of its wait.
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
        # One stream per rank, so that the noise does not depend on the order of events.
        self._random = random.Random(cluster.seed * 1_000_003 + number)
        self._coroutine: Any = None

    def begin(self, program: Callable[[], Any]) -> None:
        """Run the program until its first wait."""

        def body() -> None:
            try:
                self.result = program()
                # A rank may die after its last wait.
                if self.dies <= self.now:
                    raise _Died
            except _Died as died:
                # A dead rank has no result and no error of its own.
                self.error, self.result = died, None
            except Exception as error:
                self.error = error

        self._coroutine = _greenlet()(body)
        # Without shared cores it runs at once, until its first wait.
        if self._host is None:
            self._coroutine.switch()
        else:
            # Other ranks may hold all cores.
            self.waits_for = _A_CORE
            self._host.begin(self)

    @property
    def shares(self) -> bool:
        """Whether it shares a core."""
        return self._host is not None and self._host.is_shared

    @property
    def cache_cold(self) -> float:
        """Factor by which a program slows down if its code is in no cache of its core."""
        return 1.0 if self._host is None else self._host.cold

    @property
    def died(self) -> bool:
        """Whether it is dead; False if it has only failed."""
        return isinstance(self.error, _Died)

    def advance(self, seconds: float) -> None:
        """Advance its time by the program's seconds, with the noise and slowness of this rank."""
        # A gamma distribution with mean 1 and this spread.
        if self._noise:
            shape = self._noise**-2
            seconds *= self._random.gammavariate(shape, 1 / shape)
        self.now += self._factor * seconds
        # Raised in the program, where it unwinds the algorithm.
        if self.now >= self.dies:
            raise _Died

    def wait(self, message: PendingMessage, operation: str, how: WaitingRank) -> None:
        """Let other ranks run until `wake`.

        Args:
            message: the missing message.
            operation: name for errors.
            how: cost of waiting on a shared core.

        Raises:
            PeerFailure: a rank is dead, whether or not this one waits for it.
            CollectiveTimeout: no rank can continue.
        """
        clock = self._clock
        # Known deaths end every wait, as in a real job.
        if clock.dead:
            raise self.from_failed(operation)
        self.waits_for, self.operation = message, operation
        if self._host is not None:
            self._host.waits(self, how)
        # Control returns when an event wakes this rank.
        clock.turn.switch()

    def sleep(
        self, until: float, message: PendingMessage, operation: str, how: WaitingRank
    ) -> None:
        """Wait for a message with a known arrival time."""
        # With a core of its own, a known arrival needs no event.
        if self._host is None:
            self.now = until
        else:
            # The rank must ask for a core again when the message is there.
            self._clock.at(until, self._come, message)
            self.wait(message, operation, how)

    def wake(self, when: float) -> None:
        """Resume, at its own time `when` or later; called by events, not by ranks."""
        if self._host is None:
            self.go_on(when)
        else:
            # An event, because the core may be busy at that time.
            self._clock.at(max(when, self._clock.now), self._come, self.waits_for)

    def _come(self, message: PendingMessage) -> None:
        """Ask for a core, because the message has arrived."""
        if self.waits_for is message and self._host is not None:  # it has not ended meanwhile
            self._host.runnable(self)

    def go_on(self, when: float) -> None:
        """Run, at its own time `when` or later."""
        if when > self.now:
            self.now = when
        self.waits_for = None
        self._coroutine.switch()
        self._has_ended()

    def end(self, error: BaseException) -> None:
        """Resume with an error; that needs no core."""
        # A rank without a core has not begun its program.
        begun, self.waits_for = self.waits_for is not _A_CORE, None
        if self._host is not None:
            # It must not be given a core later.
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
        """End it where it waits, without further messages of its program."""
        # A running rank dies in `advance`.
        if self.waits_for is not None:
            self.end(_Died())

    def from_failed(self, operation: str) -> PeerFailure:
        """Return the error of a rank that waits while some ranks are dead."""
        where = f"{describe_ranks([self.number])} of {self.size}"
        return PeerFailure(f"{operation}: {describe_ranks(self._clock.dead)} died ({where})")


class EventClock:
    """Virtual time of a cluster, and its ranks.

    Args:
        cluster: the cluster.

    Attributes:
        now: seconds.
        ranks: in order.
        dead: ranks that the other ranks know to be dead.
        turn: coroutine to which a rank switches when it waits.
        delivered: number of messages that have arrived.
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
        """Return the scheduler of every rank; None for a rank with a core of its own."""
        cluster = self.cluster
        if cluster.cores is None:
            return [None] * cluster.size
        # Nodes of one host share its cores.
        numbers = [node // cluster.nodes_per_host for node in cluster.nodes()]
        hosts = [
            CpuScheduler(self, numbers.count(number), cluster.cores)
            for number in range(numbers[-1] + 1)
        ]
        return [hosts[number] for number in numbers]

    def at(self, when: float, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` at `when`, in order among events of equal times."""
        # The number orders events of equal times, and keeps actions from being compared.
        self._number += 1
        heappush(self._events, (when, self._number, action, argument))

    def run(
        self,
        programs: Sequence[Callable[[], Any]],
        within: float = NEVER,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        """Run a program on every rank until all have finished.

        Args:
            programs: one per rank.
            within: limit in real seconds.
            progress: called now and then with the number of arrived messages and the clock.

        Raises:
            Stopped: the simulation exceeded the limit, or 4 GiB.
        """
        stop = time.monotonic() + within
        # Over the memory so far, because the process may be large already.
        most = _most_memory() + _MOST_BYTES
        events = self._events
        collects = gc.isenabled()
        gc.disable()  # a simulation has millions of objects, and few reference cycles
        try:
            # Before the programs begin, because a rank may die in its first step.
            for number, when in self.cluster.deaths.items():
                self.at(when, self._die, number)
            for rank, program in zip(self.ranks, programs, strict=True):
                rank.begin(program)
                # Beginning the ranks may take most of the memory.
                if time.monotonic() > stop or _most_memory() > most:
                    raise Stopped(0.0)
            looks = 0
            # Ended ranks have no events; others may wait for a message that is never sent.
            while self._waiting():
                while events:
                    self.now, _, action, argument = heappop(events)
                    # May run several ranks, until all of them wait again.
                    action(argument)
                    looks += 1
                    if looks == _LOOK_EVERY:
                        looks = 0
                        if progress is not None:
                            progress(self.delivered, self.now)
                        if time.monotonic() > stop or _most_memory() > most:
                            raise Stopped(self.now)
                # No event is left, so no waiting rank can continue.
                self._end_all(self._stuck)
        except BaseException:
            # Unwinds the programs that are suspended, which would keep their memory.
            self._end_all(lambda rank: _Died())
            raise
        finally:
            # Events refer to ranks, and garbage collection is off.
            events.clear()
            if collects:
                gc.enable()

    def _waiting(self) -> list[SimulatedRank]:
        return [rank for rank in self.ranks if rank.waits_for is not None]

    def _die(self, number: int) -> None:
        """Mark a rank as dead, and schedule its detection by the other ranks."""
        rank = self.ranks[number]
        # Else it is ahead of the clock, and dies in `advance`.
        if rank.waits_for is not None or rank.died:
            rank.kill()
            # Also for a rank that has died by itself.
            self.at(self.now + _NOTICED_AFTER, self._notice, number)

    def _notice(self, number: int) -> None:
        self.dead.append(number)
        # A copy of the list: ending one rank may end others.
        for rank in self._waiting():
            if rank.waits_for is not None:  # else another rank's error has ended it meanwhile
                rank.now = max(rank.now, self.now)
                rank.end(rank.from_failed(rank.operation))

    def _stuck(self, rank: SimulatedRank) -> BaseException:
        """Return the error of a rank to which nothing is in flight."""
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
    # Linux reports kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _greenlet() -> Any:
    """Return greenlet's class.

    Raises:
        ImportError: greenlet is not installed; names the remedy.
    """
    try:
        # An optional package: only simulations need it.
        from greenlet import greenlet
    except ImportError as error:
        raise ImportError(
            "simulation: ranks take turns by greenlet, which is not installed: pip install greenlet"
        ) from error
    return greenlet
