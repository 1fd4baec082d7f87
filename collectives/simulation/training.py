"""Simulated training steps of many replicas: compute times and waiting.

A replica is modelled by its compute seconds in each step, drawn from a distribution with
stragglers, and by the time of its gradients on the lines. Four ways to train:

    all-reduce           a step ends when all gradients have been reduced
    spare replicas       a step ends with the last gradient it needs; late ones are dropped
    synchronous ps       all workers push to s tasks and pull the values
    asynchronous ps      each worker pushes and pulls by itself; its gradient may be stale

A ps task has a line in and a line out, which its workers use one after the other. A worker's bytes
are spread evenly over the tasks.
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

# Share of the backward pass, in which gradients become ready, in a step: it has two matrix products
# for each one of the forward pass.
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class Compute:
    """Distribution of compute times, in seconds: gamma-distributed, with occasional stragglers.

    Measured times of steps replace the gamma distribution.

    Args:
        mean: mean of a step, without stragglers.
        spread: standard deviation over the mean.
        slow_share: share of stragglers among all steps of all replicas.
        slow_by: slowdown of a straggler.
        seed: seed of the random numbers.
        measured: times of steps in any unit, scaled to the mean `mean` and drawn with equal
            probability; replaces `spread`.
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
        # Seeded, so that all ways to train get the same times.
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
    """Outcome of a training.

    Attributes:
        steps_per_second: updates per second, each of `gradients` gradients.
        gradients: mean number of gradients per update.
        waiting: share of the time in which a replica neither computes nor is dropped.
        stale: mean number of updates between computing and applying a gradient.
    """

    steps_per_second: float
    gradients: float
    waiting: float
    stale: float = 0.0

    @property
    def gradients_per_second(self) -> float:
        """Applied gradients per second, the basis of speedups."""
        return self.steps_per_second * self.gradients


def ready_fractions(gradients: Sequence[int]) -> list[float]:
    """Return the share of a step after which each bucket is ready, given their bytes in order."""
    whole = sum(gradients)
    # Gradients become ready evenly over the backward pass.
    return [1 - _BACKWARD * (1 - passed / whole) for passed in itertools.accumulate(gradients)]


def all_reduce(drawn: Array, buckets: Sequence[tuple[float, float]]) -> TrainingResult:
    """Train with an all-reduce of every bucket in every step.

    Args:
        drawn: result of `Compute.draw`.
        buckets: (time when it is ready on all ranks, as a share of the slowest rank's step; seconds
            of its all-reduce), in order; buckets are reduced one at a time.
    """
    slowest = drawn.max(axis=1)
    ends = np.zeros_like(slowest)
    for ready, took in buckets:
        # A bucket waits for the bucket before it, and for its gradients.
        ends = np.maximum(ends, ready * slowest) + took
    # A step lasts at least as long as the slowest computation.
    ends = np.maximum(ends, slowest)
    steps, replicas = drawn.shape
    whole = float(ends.sum())
    return TrainingResult(steps / whole, replicas, 1 - float(drawn.sum()) / replicas / whole)


def spare_replicas(drawn: Array, needed: int, exchange: float) -> TrainingResult:
    """Train with the first `needed` gradients of each step.

    A late replica finishes its gradient, which is dropped, and continues with the newest step.

    Args:
        drawn: result of `Compute.draw`.
        needed: gradients per step.
        exchange: seconds from the last of them to new values on all replicas.
    """
    steps, replicas = drawn.shape
    now, idle = 0.0, 0.0
    free = np.zeros(replicas)
    for row in drawn:
        # A replica begins with the newest values, or when it has finished a late gradient.
        begun = np.maximum(free, now)
        idle += float((begun - free).sum())
        done = begun + row
        # The `needed`-th fastest gradient ends the step.
        now = float(np.partition(done, needed - 1)[needed - 1]) + exchange
        # Replicas that worked through the step are late, and finish first.
        free = np.where(begun < now, done, free)
    return TrainingResult(steps / now, needed, idle / replicas / now)


def servers(drawn: Array, tasks: int, line: float) -> TrainingResult:
    """Train with synchronous steps of all workers through parameter servers.

    Args:
        drawn: result of `Compute.draw`, a column per worker.
        tasks: number of ps tasks.
        line: seconds in which the bytes of all variables pass one line.
    """
    steps, workers = drawn.shape
    own = max(line, line * workers / tasks)  # a task's line carries a share of all workers' bytes
    ends = np.empty(steps)
    for step, row in enumerate(drawn):
        arrived = 0.0
        for done in np.sort(row):  # a gradient waits for earlier ones on the line
            # Tasks receive in parallel, and each worker's bytes pass its own line.
            arrived = max(arrived + line / tasks, float(done) + line)
        # Then all workers pull, over lines that are shared as for pushing.
        ends[step] = max(arrived, float(row.max()) + line) + own
    whole = float(ends.sum())
    return TrainingResult(steps / whole, workers, 1 - float(drawn.sum()) / workers / whole)


def asynchronous(drawn: Array, tasks: int, line: float) -> TrainingResult:
    """Train with workers that push and pull by themselves; arguments as `servers`."""
    steps, workers = drawn.shape
    service = line / tasks
    # (time, phase, worker): the heap gives the next one in time.
    events = [(float(drawn[0, worker]), 0, worker) for worker in range(workers)]
    events.sort()
    made = [0] * workers  # gradients so far
    seen = [0] * workers  # number of updates in the values of its present step
    updates, stale, computed = 0, 0, 0.0
    free_in = free_out = now = 0.0
    total = steps * workers
    # Endless: the last update ends the loop.
    for _ in itertools.repeat(None):
        now, phase, worker = heappop(events)
        if phase == 0:  # its gradient is ready for the lines of the tasks and its own
            # The tasks' lines in are used one worker after the other.
            free_in = max(free_in, now) + service
            # At least the time on the worker's own line.
            heappush(events, (max(free_in, now + line), 1, worker))
            computed += float(drawn[made[worker] % steps, worker])
            continue
        if phase == 2:  # the values have arrived
            made[worker] += 1
            heappush(events, (now + float(drawn[made[worker] % steps, worker]), 0, worker))
            continue
        # Updates by other workers since this one pulled.
        stale += updates - seen[worker]
        updates += 1
        seen[worker] = updates
        if updates == total:
            break
        free_out = max(free_out, now) + service
        heappush(events, (max(free_out, now + line), 2, worker))
    # Clipped, because computations of the last steps are counted as a whole.
    return TrainingResult(total / now, 1, max(0.0, 1 - computed / workers / now), stale / total)
