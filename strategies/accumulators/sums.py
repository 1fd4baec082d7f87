"""Gradients of one variable, added up as they come; their sum or mean in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.arrays import COMPUTE, astype
from strategies.errors import InvalidArgumentError
from strategies.remote.wire import Array
from strategies.sparse import Rows, in_order

__all__ = ["DenseSum", "Gradient", "Part", "RowsSum", "Sum", "checked", "started"]

Gradient: TypeAlias = Array | Rows | None


@dataclass(frozen=True)
class Part:
    """What the gradients of one variable may be.

    Attributes:
        name: of the variable, for errors.
        dtype: its name, one of `COMPUTE`.
        shape: of the variable; None for a size, or all of it, that may be any.
        form: "dense", "rows", or "any" as long as all gradients of a step have the same form.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    form: str = "any"

    def __post_init__(self) -> None:
        if self.dtype not in COMPUTE:
            raise InvalidArgumentError(
                f"accumulator: unsupported dtype, expected {', '.join(COMPUTE)}, got {self.dtype} "
                f"({self.name})"
            )

    def fits(self, shape: Sequence[int | None]) -> bool:
        """Whether the variable may have this shape."""
        return self.shape is None or (
            len(self.shape) == len(shape)
            and all(None in p or p[0] == p[1] for p in zip(self.shape, shape, strict=True))
        )


def checked(part: Part, gradient: Gradient, operation: str) -> Gradient:
    """Return a gradient as a sum can take it: rows by increasing index, each index once.

    Raises:
        InvalidArgumentError: its form, dtype, shape or indices do not fit.
    """
    if gradient is None:
        return None
    form = "rows" if isinstance(gradient, Rows) else "dense"
    if part.form not in (form, "any"):
        raise InvalidArgumentError(
            f"{operation}: the gradient has another form, expected {part.form}, got {form} "
            f"({part.name})"
        )
    array = gradient.values if isinstance(gradient, Rows) else gradient
    if array.dtype.name != part.dtype:
        raise InvalidArgumentError(
            f"{operation}: the gradient has the wrong dtype, expected {part.dtype}, got "
            f"{array.dtype} ({part.name})"
        )
    shape: tuple[int | None, ...] = array.shape
    if isinstance(gradient, Rows):
        length = part.shape[0] if part.shape else None
        try:
            gradient = in_order(gradient, operation, part.name, length=length)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(str(error)) from error
        shape = (None, *shape[1:])
    if not part.fits(shape):
        raise InvalidArgumentError(
            f"{operation}: the gradient has the wrong shape, expected {part.shape}, got {shape} "
            f"({part.name})"
        )
    return gradient


class DenseSum:
    """A sum of arrays of one shape.

    Args:
        first: the first of them, copied; 16-bit floats are added up in float32.
    """

    form = "dense"

    def __init__(self, first: Array) -> None:
        self._dtype = first.dtype.name
        self._total = np.array(first, COMPUTE[self._dtype])

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape of all of them."""
        return self._total.shape

    def add(self, gradient: Array) -> None:
        """Add one more."""
        with np.errstate(over="ignore", invalid="ignore"):
            self._total += gradient.astype(self._total.dtype, copy=False)

    def absorb(self, other: DenseSum) -> None:
        """Add what another sum holds."""
        self.add(other._total)

    def result(self, divisor: int | None) -> Array:
        """Return the sum, or the mean of so many; shape and dtype of the gradients."""
        total = self._total if divisor is None else np.asarray(self._total / divisor)
        return np.asarray(astype(total, self._dtype))


class RowsSum:
    """A sum of rows, index by index.

    Args:
        first: the first of them, from `checked`.
    """

    form = "rows"

    def __init__(self, first: Rows, dtype: str) -> None:
        self._dtype = dtype
        self._indices: npt.NDArray[np.int64] = first.indices
        self._values = np.array(first.values, COMPUTE[dtype])
        self._counts = np.ones(len(self._indices), np.int64)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape of the variable, as far as it is known."""
        return (None, *self._values.shape[1:])

    def add(self, gradient: Rows) -> None:
        """Add the rows of one more gradient."""
        self._merge(gradient.indices, gradient.values, np.ones(len(gradient.indices), np.int64))

    def absorb(self, other: RowsSum) -> None:
        """Add what another sum holds."""
        self._merge(other._indices, other._values, other._counts)

    def result(self, divisor: int | None) -> Rows:
        """Return the sums, or the mean of each index over the gradients that had it."""
        values = self._values
        if divisor is not None:
            values = values / self._counts.reshape(-1, *[1] * (values.ndim - 1))
        return Rows(self._indices, astype(values, self._dtype))

    def _merge(self, indices: Array, values: Array, counts: Array) -> None:
        union = np.union1d(self._indices, indices)
        total = np.zeros((len(union), *self._values.shape[1:]), self._values.dtype)
        times = np.zeros(len(union), np.int64)
        for where, rows, number in (
            (self._indices, self._values, self._counts), (indices, values, counts),
        ):  # fmt: skip
            at = np.searchsorted(union, where)
            with np.errstate(over="ignore", invalid="ignore"):
                total[at] += rows.astype(total.dtype, copy=False)
            times[at] += number
        self._indices, self._values, self._counts = union, total, times


Sum: TypeAlias = DenseSum | RowsSum


def started(gradient: Any) -> Sum:
    """Return a sum of one gradient."""
    if isinstance(gradient, Rows):
        return RowsSum(gradient, gradient.values.dtype.name)
    return DenseSum(gradient)
