"""Sums and means of dense, sparse and missing gradients.

All of them are added in the order in which they come, 16-bit floats as float32
(`array_ops.arithmetic_dtype`), and a sum is `rounded` once, at its end. Rows are joined; those of
one index are added up before a sum is divided.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from strategies.core import array_ops
from strategies.core.sparse import Rows, coalesced

__all__ = [
    "SumBuffers",
    "add",
    "check_examples",
    "concatenated",
    "mean",
    "merge_rows",
    "divided",
    "rounded",
    "weights",
]


class SumBuffers:
    """Host memory for the sums of each step, used again unless somebody still holds the last one.

    The system else takes it back after each step, and clears other pages in the next one: 1.6 MiB
    of sums took 0.5 ms so, of a step of 4 ms.
    """

    def __init__(self) -> None:
        self._kept: dict[str, npt.NDArray[Any]] = {}
        self._kept[""] = np.empty(0)
        self._free = sys.getrefcount(self._kept[""])  # of an array that nobody else holds

    def like(self, name: str, array: Any) -> Any | None:
        """Return an array of any numbers, of another's shape, dtype and library.

        Args:
            name: whose sum it is for.
            array: what is to be added.

        Returns:
            None if the array is not in host memory, is one of JAX, or has no float32 or float64.
        """
        there = None if array_api_compat.is_jax_array(array) else array_ops.host(array)
        if there is None or there.dtype not in (np.float32, np.float64):
            return None
        kept = self._kept.get(name)
        fits = kept is not None and (kept.shape, kept.dtype) == (there.shape, there.dtype)
        del kept
        if not fits or sys.getrefcount(self._kept[name]) > self._free:
            self._kept[name] = np.empty(there.shape, there.dtype)
        view = self._kept[name][...]  # who holds the sum holds this
        return (
            view if isinstance(array, np.ndarray) else array_ops.device_key(array)[0].asarray(view)
        )


def add(total: Any, gradient: Any, weight: float = 1) -> Any:
    """Return `total + weight * gradient`, in the memory of the total where that can be changed.

    Args:
        total: what this function has returned for the gradients before, None for the first.
        gradient: it is not changed, and the sum shares no memory with it. Beside an array, rows are
            added where they belong; both are in host memory then.
        weight: of 0, the gradient does not count: a mean over no examples may be NaN.
    """
    if gradient is None or weight == 0:
        return total
    with np.errstate(over="ignore", invalid="ignore"):  # a sum may be infinite, or NaN
        if isinstance(gradient, Rows):
            rows = Rows(gradient.indices, array_ops.arithmetic_dtype(gradient.values) * weight)
            if total is None:
                return rows
            return (
                concatenated([total, rows])
                if isinstance(total, Rows)
                else _scatter_add(total, rows)
            )
        if total is None:
            return array_ops.arithmetic_dtype(gradient) * weight
        more = (
            array_ops.arithmetic_dtype(gradient)
            if weight == 1
            else array_ops.arithmetic_dtype(gradient) * weight
        )
        if isinstance(total, Rows):
            total = _scatter_add(np.zeros_like(more), total)
        if total.dtype != more.dtype:
            return total + more
        total += more  # arrays of JAX, which cannot be changed, make a new one
        return total


def concatenated(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, in their order; of one index there may be several."""
    join = array_api_compat.array_namespace(parts[0].values).concat
    indices = np.concatenate([rows.indices for rows in parts])
    return Rows(indices, join([rows.values for rows in parts]))


def merge_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts by increasing index, those of one index added up."""
    return coalesced(concatenated(parts))


def divided(total: Any, number: float) -> Any:
    """Divide a sum; rows of one index are added up first."""
    if isinstance(total, Rows):
        rows = coalesced(total)
        return Rows(rows.indices, divided(rows.values, number))
    return total if total is None or number == 1 else total / number


def rounded(total: Any, dtype: str) -> Any:
    """Return a sum or a mean in the dtype of its gradients; that of integers stays as it is."""
    if isinstance(total, Rows):
        return Rows(total.indices, rounded(total.values, dtype))
    return (
        total if total is None or dtype not in array_ops.COMPUTE else array_ops.astype(total, dtype)
    )


def mean(
    column: Iterable[tuple[Any, float]], whole: float, dtype: str, out: Any | None = None
) -> Any:
    """Return the sum of gradients times their weights, divided by a whole weight, and rounded.

    Args:
        column: (gradient, weight) of one variable.
        whole: also of gradients that are None, which count as zero.
        dtype: of the gradients.
        out: memory of `SumBuffers.like` for it, which is used if all count alike.

    Returns:
        `Rows` by increasing index if all gradients that count are rows, an array if one is dense,
        None if there are none.
    """
    counted = [(gradient, weight) for gradient, weight in column if gradient is not None and weight]
    if counted and all(isinstance(gradient, Rows) for gradient, _ in counted):
        rows = concatenated([add(None, gradient, weight) for gradient, weight in counted])
        return rounded(divided(rows, whole), dtype)
    total = None
    if _are_plain(counted[:2]):
        (first, _), (second, _), *counted = counted
        with np.errstate(over="ignore", invalid="ignore"):
            # Both at once saves a copy of the first.
            if out is None:
                total = array_ops.arithmetic_dtype(first) + array_ops.arithmetic_dtype(second)
            else:
                total = out
                np.add(
                    array_ops.to_host(first), array_ops.to_host(second), out=array_ops.to_host(out)
                )
    for gradient, weight in counted:
        total = add(total, gradient, weight)
    if total is not None and whole != 1 and array_ops.dtype_name(total) in ("float32", "float64"):
        total /= whole  # its memory is nobody else's
        return rounded(total, dtype)
    return rounded(divided(total, whole), dtype)


def _are_plain(counted: Sequence[tuple[Any, float]]) -> bool:
    """Whether these are two arrays of one dtype, with a weight of 1."""
    if len(counted) < 2 or any(weight != 1 or isinstance(g, Rows) for g, weight in counted):
        return False
    (first, _), (second, _) = counted
    return bool(first.dtype == second.dtype)


def weights(examples: Sequence[float | None], whose: str) -> list[float]:
    """Return how much each gradient counts: its examples, or 1 if nobody says how many.

    Raises:
        ValueError: only some say.
    """
    told = [number is not None for number in examples]
    if any(told) and not all(told):
        raise ValueError(
            f"apply_gradients: only some {whose} say of how many examples their gradients are, "
            f"expected all or none"
        )
    return [1 if number is None else number for number in examples]


def check_examples(examples: float | None) -> None:
    """Refuse what is not a number of examples; None if it was not told.

    Raises:
        ValueError: it is negative, infinite or NaN.
        TypeError: it is not a number.
    """
    try:
        good = examples is None or 0 <= examples < math.inf
    except TypeError:
        raise TypeError(
            f"apply_gradients: bad examples, expected a number, got {examples!r:.80}"
        ) from None
    if not good:
        raise ValueError(f"apply_gradients: bad examples, expected >= 0, got {examples}")


def _scatter_add(total: Any, rows: Rows) -> Any:
    """Add rows to an array where they belong."""
    np.add.at(total, rows.indices, rows.values)
    return total
