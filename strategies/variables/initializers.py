"""Initializers that produce any part of a variable.

An *initializer* is a function `(first, last, shape, dtype) -> rows first .. last - 1` of a variable
of that shape. The values do not depend on the partition: random numbers are drawn in blocks of
rows, each from its own generator seeded with the number of the block::

    rows      0 .. 9 | 10 .. 19 | 20 .. 29 | ...        each block: Philox(key=(seed, block))
    a part          [7 ............. 24]                draws blocks 0, 1, 2, and keeps its rows
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.core.validation import integer

__all__ = ["Initializer", "constant", "normal", "uniform", "zeros"]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Initializer = Callable[[int, int, Shape, Any], Array]

_BLOCK = 1 << 16  # numbers per block: 0.3 ms to draw them, 10 us to create the generator


def zeros() -> Initializer:
    """Return an initializer of zeros, which use no memory until they are written.

    Example:
        >>> zeros()(2, 5, (10**9, 2), "float32").shape
        (3, 2)
    """
    return _zeros


def constant(value: float) -> Initializer:
    """Return an initializer with one number for all elements."""
    return partial(_full, value)


def normal(stddev: float = 1.0, *, mean: float = 0.0, seed: int = 0) -> Initializer:
    """Return an initializer of normally distributed numbers.

    Args:
        stddev: standard deviation.
        mean: mean.
        seed: seed, at least 0.
    """
    return partial(_normal, integer("initializer", "seed", seed, least=0), stddev, mean)


def uniform(low: float = 0.0, high: float = 1.0, *, seed: int = 0) -> Initializer:
    """Return an initializer of numbers uniformly distributed in [`low`, `high`).

    Args:
        low: lower bound.
        high: upper bound, excluded.
        seed: seed, at least 0.

    Example:
        >>> make = uniform(seed=3)
        >>> whole = make(0, 100_000, (100_000, 2), "float32")
        >>> bool((make(41_000, 90_000, whole.shape, "float32") == whole[41_000:90_000]).all())
        True
    """
    return partial(_uniform, integer("initializer", "seed", seed, least=0), low, high)


# At the top level of the module, so that other tasks can import them by name.


def _zeros(first: int, last: int, shape: Shape, dtype: Any) -> Array:
    return np.zeros((last - first, *shape[1:]), dtype)


def _full(value: float, first: int, last: int, shape: Shape, dtype: Any) -> Array:
    return np.full((last - first, *shape[1:]), value, dtype)


def _normal(
    seed: int, stddev: float, mean: float, first: int, last: int, shape: Shape, dtype: Any
) -> Array:
    def draw(random: np.random.Generator, size: Shape, kind: Any) -> Array:
        numbers: Array = random.standard_normal(size, kind) * kind(stddev) + kind(mean)
        return numbers

    return _draw(draw, seed, first, last, shape, dtype)


def _uniform(
    seed: int, low: float, high: float, first: int, last: int, shape: Shape, dtype: Any
) -> Array:
    def draw(random: np.random.Generator, size: Shape, kind: Any) -> Array:
        numbers: Array = random.random(size, kind) * kind(high - low) + kind(low)
        return numbers

    return _draw(draw, seed, first, last, shape, dtype)


def _draw(
    draw: Callable[[np.random.Generator, Shape, Any], Array],
    seed: int,
    first: int,
    last: int,
    shape: Shape,
    dtype: Any,
) -> Array:
    """Return rows that `draw(generator, shape, dtype)` produces."""
    made = np.empty((last - first, *shape[1:]), dtype)
    # NumPy generators support only these two; 16-bit numbers are drawn as float32.
    drawn = np.float64 if made.dtype == np.float64 else np.float32
    # Rows per block, from the shape of the whole: all parts use the same blocks.
    height = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    for block in range(first // height, -(-last // height)):
        begin = block * height
        # The last block ends with the variable, so that every part draws it alike.
        end = min(begin + height, shape[0])
        # Philox is counter-based: each key starts a stream of its own, without drawing the numbers
        # of earlier blocks.
        random = np.random.Generator(np.random.Philox(key=np.array([seed, block], np.uint64)))
        numbers = draw(random, (end - begin, *shape[1:]), drawn)
        low, high = max(begin, first), min(end, last)
        # Rounds once to 16 bits, after scaling in float32.
        made[low - first : high - first] = numbers[low - begin : high - begin]
    return made
