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
    """Allowed gradients of one variable.

    Attributes:
        name: name of the variable, for errors.
        dtype: its name, one of `COMPUTE`.
        shape: shape of the variable; None for a size, or for the shape, accepts any.
        form: "dense", "rows", or "any" if only all gradients of a step must have the same form.
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
        """Return whether the variable may have this shape."""
        return sparse.fits(shape, self.shape)


def format_of(gradient: Array | Rows) -> tuple[str, tuple[int | None, ...]]:
    """Return the properties that all gradients of a step share: "dense" or "rows", and a shape."""
    if isinstance(gradient, Rows):
        # The number of rows may differ among gradients.
        return "rows", (None, *gradient.values.shape[1:])
    return "dense", gradient.shape


def checked(part: GradientSpec, gradient: Gradient, operation: str) -> Gradient:
    """Return a gradient in the form for sums: unique rows in increasing index order.

    Raises:
        InvalidArgumentError: its form, dtype, shape or indices are invalid.
    """
    if gradient is None:
        # Counts as a gradient of zeros.
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
        first: the first gradient, from `checked`; 16-bit floats are accumulated in float32.
        weight: weight of the gradient, such as its number of examples; more than 0.
    """

    def __init__(self, first: Array | Rows, weight: float = 1) -> None:
        values = first.values if isinstance(first, Rows) else first
        self._dtype = values.dtype.name
        self._total: Any = gradient_sums.add(None, first, weight)
        self._counts: Rows | None = None  # total weight of the gradients that contain each row
        if isinstance(first, Rows):
            # In the dtype of the sum, so that the division below keeps it.
            counts = np.full(len(values), weight, self._total.values.dtype)
            self._counts = Rows(first.indices, counts)

    @property
    def form(self) -> tuple[str, tuple[int | None, ...]]:
        """The shared properties of the gradients, see `format_of`."""
        return format_of(self._total)

    def add(self, gradient: Array | Rows, weight: float = 1) -> None:
        """Add a gradient."""
        if isinstance(gradient, Rows):
            # Through a sum of its own, which has the weight of each of its rows.
            self.absorb(GradientSum(gradient, weight))
        else:
            self._total = gradient_sums.add(self._total, gradient, weight)

    def absorb(self, other: GradientSum) -> None:
        """Add another sum."""
        if self._counts is None or other._counts is None:
            self._total = gradient_sums.add(self._total, other._total)
            return
        # Merge at once, so that a sum that waits for a take is no longer than the variable.
        with np.errstate(over="ignore", invalid="ignore"):
            self._total = gradient_sums.merge_rows([self._total, other._total])
        # Merged by the same rule as the rows, so that both keep the same indices.
        self._counts = gradient_sums.merge_rows([self._counts, other._counts])

    def result(self, *, mean: bool, number: float) -> Array | Rows:
        """Return the sum or mean; the mean of a row is over the gradients that contain it.

        Args:
            mean: whether to return the mean.
            number: number or total weight of all gradients, also of None ones, which count as zero.
        """
        total = self._total
        if mean and self._counts is not None:
            # Extended by axes of size 1, to divide whole rows.
            counts = self._counts.values.reshape(-1, *[1] * (total.values.ndim - 1))
            total = Rows(total.indices, total.values / counts)
        elif mean:
            total = gradient_sums.divided(total, number)
        result: Array | Rows = gradient_sums.rounded(total, self._dtype)
        return result
