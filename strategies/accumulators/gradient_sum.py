"""Validation and sum of the gradients of one variable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from strategies.core import gradient_sums, sparse
from strategies.core.array_ops import COMPUTE
from strategies.core.sparse import Rows
from strategies.errors import InvalidArgumentError
from strategies.rpc.wire import Array

__all__ = ["Gradient", "GradientSpec", "GradientSum", "checked", "format_of"]

Gradient: TypeAlias = Array | Rows | None


@dataclass(frozen=True)
class GradientSpec:
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
        return sparse.fits(shape, self.shape)


def format_of(gradient: Array | Rows) -> tuple[str, tuple[int | None, ...]]:
    """Return what the gradients of a step must have in common: "dense" or "rows", and a shape."""
    if isinstance(gradient, Rows):
        return "rows", (None, *gradient.values.shape[1:])
    return "dense", gradient.shape


def checked(part: GradientSpec, gradient: Gradient, operation: str) -> Gradient:
    """Return a gradient as a sum can take it: rows by increasing index, each index once.

    Raises:
        InvalidArgumentError: its form, dtype, shape or indices do not fit.
    """
    if gradient is None:
        return None
    form, _ = format_of(gradient)
    if part.form not in (form, "any"):
        raise InvalidArgumentError(
            f"{operation}: the gradient has another form, expected {part.form}, got {form} "
            f"({part.name})"
        )
    try:
        fitted: Gradient = sparse.checked_rows(
            gradient, part.shape, part.dtype, operation, part.name
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(str(error)) from error
    return fitted


class GradientSum:
    """A sum of gradients of one form.

    Args:
        first: the first of them, from `checked`; 16-bit floats are added up in float32.
        weight: how much it counts, such as the number of its examples; more than 0.
    """

    def __init__(self, first: Array | Rows, weight: float = 1) -> None:
        values = first.values if isinstance(first, Rows) else first
        self._dtype = values.dtype.name
        self._total: Any = gradient_sums.add(None, first, weight)
        self._counts: Rows | None = None  # the weight of the gradients that have had each row
        if isinstance(first, Rows):
            counts = np.full(len(values), weight, self._total.values.dtype)
            self._counts = Rows(first.indices, counts)

    @property
    def form(self) -> tuple[str, tuple[int | None, ...]]:
        """What all of them have in common, see `format_of`."""
        return format_of(self._total)

    def add(self, gradient: Array | Rows, weight: float = 1) -> None:
        """Add one more."""
        if isinstance(gradient, Rows):
            self.absorb(GradientSum(gradient, weight))
        else:
            self._total = gradient_sums.add(self._total, gradient, weight)

    def absorb(self, other: GradientSum) -> None:
        """Add what another sum holds."""
        if self._counts is None or other._counts is None:
            self._total = gradient_sums.add(self._total, other._total)
            return
        # At once, so that what waits for a take is no longer than the variable.
        with np.errstate(over="ignore", invalid="ignore"):
            self._total = gradient_sums.merge_rows([self._total, other._total])
        self._counts = gradient_sums.merge_rows([self._counts, other._counts])

    def result(self, *, mean: bool, number: float) -> Array | Rows:
        """Return the sum, or the mean of so many, of each row over the gradients that had it.

        Args:
            mean: whether it is the mean.
            number: of gradients, or their weight, of which those that were not added count as zero.
        """
        total = self._total
        if mean and self._counts is not None:
            counts = self._counts.values.reshape(-1, *[1] * (total.values.ndim - 1))
            total = Rows(total.indices, total.values / counts)
        elif mean:
            total = gradient_sums.divided(total, number)
        result: Array | Rows = gradient_sums.rounded(total, self._dtype)
        return result
