"""Learning rate schedules.

A schedule is a function of the number of steps already taken, 0 in the first step. Every optimizer
accepts one instead of a number. Schedules of this module compute in float64 and have no state. So
all ranks, and a resumed run, get the same rate in the same step.

Example:
    >>> rate = warmup(cosine(0.1, 90), 10, start=0.1)
    >>> [round(rate(step), 4) for step in (0, 5, 10, 55, 100, 200)]
    [0.01, 0.055, 0.1, 0.05, 0.0, 0.0]
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping

from strategies.core.validation import integer, number

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "inverse_sqrt",
    "linear",
    "piecewise",
    "polynomial",
    "warmup",
]

Schedule = Callable[[int], float]
"""Function from the number of steps already taken to a learning rate."""


def constant(rate: float) -> Schedule:
    """Return a schedule of a constant rate, for example for `warmup`."""
    rate = number("constant", "rate", rate)
    return lambda step: rate


def piecewise(rates: Mapping[int, float]) -> Schedule:
    """Return a schedule that changes at given steps.

    Args:
        rates: first step -> rate from that step on; must contain step 0.

    Raises:
        ValueError: a step or rate is negative, or step 0 is missing.

    Example:
        >>> rate = piecewise({0: 0.1, 30: 0.01})
        >>> rate(29), rate(30)
        (0.1, 0.01)
    """
    starts = sorted(integer("piecewise", "step", step, least=0) for step in rates)
    if not starts or starts[0] != 0:
        raise ValueError(f"piecewise: no rate for the first step, expected step 0, got {starts}")
    values = [number("piecewise", "rate", rates[start]) for start in starts]
    # `bisect_right`: a rate holds from its first step on.
    return lambda step: values[bisect.bisect_right(starts, step) - 1]


def exponential(initial: float, *, factor: float, steps: int, staircase: bool = False) -> Schedule:
    """Return a schedule that is multiplied by `factor` every `steps` steps.

    Args:
        initial: rate in the first step.
        factor: multiplier, >= 0.
        steps: number of steps per multiplication, >= 1.
        staircase: whether to multiply once every `steps` steps instead of a little in each step.

    Example:
        >>> exponential(0.1, factor=0.5, steps=10)(20)
        0.025
    """
    initial = number("exponential", "initial", initial)
    factor = number("exponential", "factor", factor)
    steps = integer("exponential", "steps", steps)

    def rate(step: int) -> float:
        # `step / steps` changes in each step, `step // steps` once per `steps`.
        return float(initial * factor ** (step // steps if staircase else step / steps))

    return rate


def polynomial(initial: float, end: float = 0.0, *, steps: int, power: float = 1.0) -> Schedule:
    """Return a schedule that changes from one rate to another by a power of the remaining steps.

        end + (initial - end) * (1 - step / steps) ** power

    Args:
        initial: rate in the first step.
        end: rate from step `steps` on.
        steps: >= 1.
        power: > 0; 1 is a straight line.
    """
    initial, end = number("polynomial", "initial", initial), number("polynomial", "end", end)
    steps = integer("polynomial", "steps", steps)
    # A power of 0 would jump to the end at once.
    power = number("polynomial", "power", power, least=1e-9)

    def rate(step: int) -> float:
        # Limited to 1: after `steps` the rate stays at the end.
        return float(end + (initial - end) * (1 - min(step / steps, 1.0)) ** power)

    return rate


def linear(initial: float, end: float = 0.0, *, steps: int) -> Schedule:
    """Return a schedule that changes linearly from one rate to another.

    Args:
        initial: rate in the first step.
        end: rate from step `steps` on.
        steps: >= 1.
    """
    return polynomial(initial, end, steps=steps)


def cosine(initial: float, steps: int, *, end: float = 0.0) -> Schedule:
    """Return a schedule that falls along half a cosine wave.

    Args:
        initial: rate in the first step.
        steps: length of the half wave, >= 1.
        end: rate after the half wave.

    Source: I. Loshchilov, F. Hutter, "SGDR: stochastic gradient descent with warm restarts",
    arXiv:1608.03983, equation 5.
    """
    initial, end = number("cosine", "initial", initial), number("cosine", "end", end)
    steps = integer("cosine", "steps", steps)
    return lambda step: _wave(initial, end, step / steps)


def cosine_restarts(
    initial: float, steps: int, *, growth: float = 1, decay: float = 1, end: float = 0.0
) -> Schedule:
    """Return a schedule that falls along half a cosine wave repeatedly.

    Args:
        initial: rate in the first step.
        steps: length of the first wave, >= 1.
        growth: length of each wave divided by that of the previous one, >= 1; rounded down.
        decay: initial rate of each wave divided by that of the previous one, >= 0.
        end: rate that each wave falls to; the next wave starts one step later.

    Source: as for `cosine`, section 3.
    """
    initial, end = (
        number("cosine_restarts", "initial", initial),
        number("cosine_restarts", "end", end),
    )
    first = integer("cosine_restarts", "steps", steps)
    growth = number("cosine_restarts", "growth", growth, least=1)
    decay = number("cosine_restarts", "decay", decay)

    def rate(step: int) -> float:
        length, start = float(first), initial
        # Waves of one length need no loop over all earlier ones.
        if growth == 1:
            start *= decay ** (step // first)
            return _wave(start, end, step % first / first)
        # Lengths grow geometrically, so the loop takes the logarithm of the step.
        while step >= int(length):
            step -= int(length)
            length *= growth
            start *= decay
        return _wave(start, end, step / int(length))

    return rate


def inverse_sqrt(initial: float, steps: int) -> Schedule:
    """Return a schedule that falls with the root of the step: `initial / sqrt(1 + step / steps)`.

    Args:
        initial: rate in the first step.
        steps: the rate is halved after three times this number, >= 1. After a `warmup` of `steps`
            steps, the rate is that of the source.

    Source: A. Vaswani et al., "Attention is all you need", arXiv:1706.03762, equation 3.
    """
    initial = number("inverse_sqrt", "initial", initial)
    steps = integer("inverse_sqrt", "steps", steps)
    return lambda step: initial / math.sqrt(1 + step / steps)


def warmup(schedule: Schedule | float, steps: int, *, start: float = 0.0) -> Schedule:
    """Return a schedule that rises linearly to the start of another, then follows it.

    A batch that is P times larger allows a rate that is about P times higher, but not at first.
    With P ranks, `warmup(P * rate, 5 * steps_per_epoch, start=1 / P)` starts at the rate for one
    rank and reaches the rate for all after five epochs.

    Args:
        schedule: schedule after the warm-up, which starts there at step 0; or a rate.
        steps: length of the warm-up; 0 for none.
        start: initial rate as a fraction of the schedule's first rate, 0 to 1.

    Source: P. Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour",
    arXiv:1706.02677, section 2.2.
    """
    # A rate is a schedule that never changes.
    follows = schedule if callable(schedule) else constant(schedule)
    steps = integer("warmup", "steps", steps, least=0)
    start = number("warmup", "start", start)
    if start > 1:
        raise ValueError(f"warmup: bad start, expected 0 <= start <= 1, got {start}")

    def rate(step: int) -> float:
        if step >= steps:
            return follows(step - steps)
        # The schedule starts after the warm-up, so its first rate is where the rise ends.
        return follows(0) * (start + (1 - start) * step / steps)

    return rate


def _wave(initial: float, end: float, way: float) -> float:
    # Limited to 1: after the wave the rate stays at `end` instead of rising again.
    return end + (initial - end) * 0.5 * (1 + math.cos(math.pi * min(way, 1.0)))
