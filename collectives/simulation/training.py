"""Simulated training steps of many replicas: compute times and waiting.

Below, a replica is nothing but the seconds that it computes in each step, drawn from a distribution
with stragglers, and what its gradient takes on the lines. Four ways to train:

    all-reduce           a step ends when everybody's gradients have been reduced
    spare replicas       a step ends with the gradient that it needs last; late ones are dropped
    synchronous ps       all workers push to s tasks and get the values back from them
    asynchronous ps      each worker pushes and gets by itself; its gradient may be stale

A ps task has a line in and a line out, which its workers use one after the other; what a worker
moves is spread evenly over the tasks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.simulation.cluster import check_spread

__all__ = [
    "Compute",
    "TrainingResult",
    "all_reduce",
    "asynchronous",
    "ready_fractions",
    "servers",
    "spare_replicas",
]

# The share of a step that the backward pass takes, in which gradients get ready: it multiplies
# twice where the forward pass does once.
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class Compute:
    """What replicas compute for, in seconds: gamma-distributed, and now and then a straggler.

    Where times of steps have been measured, it is drawn from them instead.

    Args:
        mean: of a step, without stragglers.
        spread: standard deviation over the mean.
        slow_share: the share of all steps of all replicas in which one is a straggler.
        slow_by: how many times as long that takes.
        seed: the same gives the same times.
        measured: seconds of steps in any unit, scaled so that their mean is `mean`; each is drawn
            as often as any other. In place of a spread.
    """

    mean: float
    spread: float = 0.0
    slow_share: float = 0.0
    slow_by: float = 1.0
    seed: int = 0
    measured: Sequence[float] = ()

    def __post_init__(self) -> None:
        check_spread("step: spread", self.spread)

    def draw(self, steps: int, replicas: int) -> Array:
        """Return seconds, shape (steps, replicas), float64."""
        rng = np.random.default_rng(self.seed)
        drawn = np.full((steps, replicas), self.mean)
        if self.measured:
            times = np.asarray(self.measured, np.float64)
            drawn = rng.choice(times * (self.mean / times.mean()), (steps, replicas))
        elif self.spread:
            shape = self.spread**-2
            drawn = rng.gamma(shape, self.mean / shape, (steps, replicas))
        drawn[rng.random((steps, replicas)) < self.slow_share] *= self.slow_by
        return drawn


@dataclass(frozen=True)
class TrainingResult:
    """What training came to.

    Attributes:
        steps_per_second: updates; with `gradients` each.
        gradients: that an update is made of, on average.
        waiting: the share of its time in which a replica neither computes nor is dropped.
        stale: updates between what a gradient was computed with and what it was applied to, mean.
    """

    steps_per_second: float
    gradients: float
    waiting: float
    stale: float = 0.0

    @property
    def gradients_per_second(self) -> float:
        """Gradients that counted, per second: what a speedup compares."""
        return self.steps_per_second * self.gradients


def ready_fractions(gradients: Sequence[int]) -> list[float]:
    """Return after which share of a step each bucket of so many bytes is ready, in their order."""
    whole = sum(gradients)
    return [1 - _BACKWARD * (1 - passed / whole) for passed in itertools.accumulate(gradients)]


def all_reduce(drawn: Array, buckets: Sequence[tuple[float, float]]) -> TrainingResult:
    """Train with an all-reduce of every bucket in every step.

    Args:
        drawn: of `Compute.draw`.
        buckets: in order, for each when it is ready on all ranks, as a share of the slowest one's
            step, and the seconds that its all-reduce takes; one at a time is reduced.
    """
    slowest = drawn.max(axis=1)
    ends = np.zeros_like(slowest)
    for ready, took in buckets:
        ends = np.maximum(ends, ready * slowest) + took
    ends = np.maximum(ends, slowest)
    steps, replicas = drawn.shape
    whole = float(ends.sum())
    return TrainingResult(steps / whole, replicas, 1 - float(drawn.sum()) / replicas / whole)


def spare_replicas(drawn: Array, needed: int, exchange: float) -> TrainingResult:
    """Train with the first `needed` gradients of each step.

    Who is late finishes its gradient, which is dropped, and begins with the newest step.

    Args:
        drawn: of `Compute.draw`.
        needed: gradients of a step.
        exchange: seconds from the last of them to new values on all replicas.
    """
    steps, replicas = drawn.shape
    now, idle = 0.0, 0.0
    free = np.zeros(replicas)
    for row in drawn:
        begun = np.maximum(free, now)
        idle += float((begun - free).sum())
        done = begun + row
        now = float(np.partition(done, needed - 1)[needed - 1]) + exchange
        free = np.where(begun < now, done, free)
    return TrainingResult(steps / now, needed, idle / replicas / now)


def servers(drawn: Array, tasks: int, line: float) -> TrainingResult:
    """Train in steps of all workers through ps tasks, which get all gradients and send the values.

    Args:
        drawn: of `Compute.draw`, a column for each worker.
        tasks: of the ps.
        line: seconds in which the bytes of all variables pass one line.
    """
    steps, workers = drawn.shape
    own = max(line, line * workers / tasks)  # a task's line carries a share of everybody's
    ends = np.empty(steps)
    for step, row in enumerate(drawn):
        arrived = 0.0
        for done in np.sort(row):  # the last gradient waits for those that are under way
            arrived = max(arrived + line / tasks, float(done) + line)
        ends[step] = max(arrived, float(row.max()) + line) + own
    whole = float(ends.sum())
    return TrainingResult(steps / whole, workers, 1 - float(drawn.sum()) / workers / whole)


def asynchronous(drawn: Array, tasks: int, line: float) -> TrainingResult:
    """Train with workers that push and get by themselves; arguments as `servers`."""
    steps, workers = drawn.shape
    service = line / tasks
    events = [(float(drawn[0, worker]), 0, worker) for worker in range(workers)]
    events.sort()
    made = [0] * workers  # gradients so far
    seen = [0] * workers  # updates in the values that it computes with
    updates, stale, computed = 0, 0, 0.0
    free_in = free_out = now = 0.0
    total = steps * workers
    for _ in itertools.repeat(None):
        now, phase, worker = heappop(events)
        if phase == 0:  # its gradient is ready: over the lines of the tasks and its own
            free_in = max(free_in, now) + service
            heappush(events, (max(free_in, now + line), 1, worker))
            computed += float(drawn[made[worker] % steps, worker])
            continue
        if phase == 2:  # the values are there
            made[worker] += 1
            heappush(events, (now + float(drawn[made[worker] % steps, worker]), 0, worker))
            continue
        stale += updates - seen[worker]
        updates += 1
        seen[worker] = updates
        if updates == total:
            break
        free_out = max(free_out, now) + service
        heappush(events, (max(free_out, now + line), 2, worker))
    return TrainingResult(total / now, 1, max(0.0, 1 - computed / workers / now), stale / total)
