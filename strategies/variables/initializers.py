"""First values of variables, made part by part: the whole need not fit into any memory.

An *initializer* is a function `(first, last, shape, dtype) -> rows first .. last - 1` of a variable
of that shape. Those of this module give the same numbers however the variable is cut: random ones
are drawn in blocks of rows, each from a generator of its own, which the number of the block seeds::

    rows      0 .. 9 | 10 .. 19 | 20 .. 29 | ...        each block: Philox(key=(seed, block))
    a part          [7 ............. 24]                draws blocks 0, 1, 2, and keeps its rows
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.checks import integer

__all__ = ["Initializer", "constant", "normal", "uniform", "zeros"]

Initializer = Callable[[int, int, tuple[int, ...], Any], npt.NDArray[Any]]

_BLOCK = 1 << 16  # numbers of a block: some 0.3 ms to draw, where a generator takes 10 us to make


def zeros() -> Initializer:
    """Return an initializer of zeros, which take no memory until they are changed.

    Example:
        >>> zeros()(2, 5, (10**9, 2), "float32").shape
        (3, 2)
    """
    return lambda first, last, shape, dtype: np.zeros((last - first, *shape[1:]), dtype)


def constant(value: float) -> Initializer:
    """Return an initializer of one number."""
    return lambda first, last, shape, dtype: np.full((last - first, *shape[1:]), value, dtype)


def normal(stddev: float = 1.0, *, mean: float = 0.0, seed: int = 0) -> Initializer:
    """Return an initializer of numbers that are normally distributed.

    Args:
        stddev: standard deviation.
        mean: their mean.
        seed: at least 0.
    """
    return _drawn(
        lambda random, size, dtype: (
            random.standard_normal(size, dtype) * dtype(stddev) + dtype(mean)
        ),
        seed,
    )


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
    return _drawn(
        lambda random, size, dtype: random.random(size, dtype) * dtype(high - low) + dtype(low),
        seed,
    )


def _drawn(draw: Callable[[Any, tuple[int, ...], Any], Any], seed: int) -> Initializer:
    """Return an initializer of numbers drawn by a function of a generator, a shape and a dtype."""
    integer("initializer", "seed", seed, least=0)

    def rows(first: int, last: int, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
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

    return rows
