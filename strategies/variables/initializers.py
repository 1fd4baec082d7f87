"""Initializers that produce any part of a variable.

An *initializer* is a function `(first, last, shape, dtype) -> rows first .. last - 1` of a variable
of that shape. Those of this module give the same numbers however the variable is cut: random ones
are drawn in blocks of rows, each from a generator of its own, which the number of the block seeds::

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

_BLOCK = 1 << 16  # numbers of a block: some 0.3 ms to draw, where a generator takes 10 us to make


def zeros() -> Initializer:
    """Return an initializer of zeros, which take no memory until they are changed.

    Example:
        >>> zeros()(2, 5, (10**9, 2), "float32").shape
        (3, 2)
    """
    return _zeros


def constant(value: float) -> Initializer:
    """Return an initializer of one number."""
    return partial(_full, value)


def normal(stddev: float = 1.0, *, mean: float = 0.0, seed: int = 0) -> Initializer:
    """Return an initializer of numbers that are normally distributed.

    Args:
        stddev: standard deviation.
        mean: their mean.
        seed: at least 0.
    """
    return partial(_normal, integer("initializer", "seed", seed, least=0), stddev, mean)


def uniform(low: float = 0.0, high: float = 1.0, *, seed: int = 0) -> Initializer:
    """Return an initializer of numbers from `low` to `high`, all equally likely.

    Args:
        low: the least.
        high: more than any.
        seed: at least 0.

    Example:
        >>> make = uniform(seed=3)
        >>> whole = make(0, 100_000, (100_000, 2), "float32")
        >>> bool((make(41_000, 90_000, whole.shape, "float32") == whole[41_000:90_000]).all())
        True
    """
    return partial(_uniform, integer("initializer", "seed", seed, least=0), low, high)


# At the top of the module, so that other tasks find them by name.


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
    """Return rows drawn by a function of a generator, a shape and a dtype."""
    made = np.empty((last - first, *shape[1:]), dtype)
    # Generators know these two; 16-bit numbers are drawn as float32.
    drawn = np.float64 if made.dtype == np.float64 else np.float32
    height = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    for block in range(first // height, -(-last // height)):
        begin = block * height
        end = min(begin + height, shape[0])
        random = np.random.Generator(np.random.Philox(key=np.array([seed, block], np.uint64)))
        numbers = draw(random, (end - begin, *shape[1:]), drawn)
        low, high = max(begin, first), min(end, last)
        made[low - first : high - first] = numbers[low - begin : high - begin]
    return made
