"""Conditional accumulators: average the fresh gradients of several workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from strategies.accumulators.gradient_sum import GradientSpec, checked
from strategies.accumulators.remote import AnyAccumulation, open_accumulation
from strategies.accumulators.state_machine import Accumulation, Apply, Take
from strategies.core.sparse import Rows
from strategies.errors import InvalidArgumentError
from strategies.rpc.operation import perform
from strategies.rpc.service import Service
from strategies.rpc.wire import Array, dtype_named

__all__ = ["ConditionalAccumulator", "SparseConditionalAccumulator", "shared_accumulator"]

Shape = Sequence[int | None] | None

_numbers = itertools.count()


class _Accumulator:
    """What both kinds share."""

    form = "any"

    def __init__(
        self,
        dtype: npt.DTypeLike,
        shape: Shape = None,
        *,
        reduction_type: str = "MEAN",
        name: str | None = None,
    ) -> None:
        self.name = name or f"accumulator_{next(_numbers)}"
        self.dtype = _known_dtype(dtype)
        self.shape = None if shape is None else tuple(shape)
        self.reduction_type = str(reduction_type).upper()
        if self.reduction_type not in ("MEAN", "SUM"):
            raise ValueError(
                f"accumulator: no such reduction_type, expected MEAN or SUM, got {reduction_type!r}"
            )
        self.part = GradientSpec(self.name, self.dtype.name, self.shape, self.form)
        self.mean = self.reduction_type == "MEAN"
        self.state_machine: AnyAccumulation = Accumulation(
            [self.part], mean=self.mean, name=self.name
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.dtype}, {self.shape}, "
            f"reduction_type={self.reduction_type!r}, name={self.name!r})"
        )

    def num_accumulated(self) -> int:
        """Return how many gradients of the current step are in."""
        return self.state_machine.state()[1]

    def global_step(self) -> int:
        """Return the current step; gradients of an earlier one are dropped."""
        return self.state_machine.state()[0]

    def set_global_step(self, step: int) -> None:
        """Set the current step; going back is logged as a warning."""
        self.state_machine.set_step(int(step))

    def cancel_pending(self) -> None:
        """Fail all takes that wait, of any thread, with `CancelledError`."""
        self.state_machine.cancel_pending()

    def _apply(self, gradient: Any, local_step: int) -> bool:
        attempt = Apply([gradient], int(local_step))
        perform(self.state_machine, attempt, "apply_grad", None)
        return attempt.accepted

    def _take(self, count: int, timeout: float | None) -> Any:
        attempt = Take(int(count))
        perform(self.state_machine, attempt, "take_grad", timeout)
        return attempt.results[0]


class ConditionalAccumulator(_Accumulator):
    """The mean of several gradients of one variable.

    Each gradient comes with the step of the values that it was computed from, its `local_step`. One
    of an earlier step than the accumulator's is *stale*, and dropped. Taking the mean empties the
    accumulator and begins its next step.

    Args:
        dtype: float16, bfloat16, float32 or float64. 16-bit floats are added up in float32.
        shape: of the gradients; None for a size, or all of it, that may be any, but the same for
            all that are averaged.
        reduction_type: "MEAN" or "SUM".
        name: for errors; made up if None.

    Raises:
        ValueError: no such dtype or reduction type.

    Example:
        >>> accumulator = ConditionalAccumulator("float32", (2,))
        >>> accumulator.apply_grad([10, 1])
        True
        >>> accumulator.apply_grad([20, 2])
        True
        >>> accumulator.take_grad(1)
        array([15. ,  1.5], dtype=float32)
        >>> accumulator.apply_grad([30, 3], local_step=0)
        False
    """

    form = "dense"

    def apply_grad(self, gradient: npt.ArrayLike, local_step: int = 0) -> bool:
        """Add a gradient, unless it is stale.

        Args:
            gradient: Python's numbers and lists take the dtype of the accumulator, arrays must have
                it. Not needed any more when the call returns.
            local_step: step of the values it was computed from; a later one than the accumulator's
                is fine.

        Returns:
            Whether it was added.

        Raises:
            InvalidArgumentError: its shape or dtype does not fit, also to those that are in.
        """
        return self._apply(_as_array(gradient, self.dtype), local_step)

    def take_grad(self, count: int, *, timeout: float | None = None) -> Array:
        """Wait until there are so many gradients, and take the mean or sum of all that are in.

        Whoever asked first is served first. The accumulator is empty afterwards, and its step is
        one more.

        Args:
            count: how many at least.
            timeout: seconds to wait.

        Returns:
            Shape and dtype of the gradients; belongs to the caller.

        Raises:
            InvalidArgumentError: a count below 1.
            DeadlineExceededError: not enough came within `timeout`.
            CancelledError: by `cancel_pending`, or the end of the service.
        """
        return self._take(count, timeout)  # type: ignore[no-any-return]


class SparseConditionalAccumulator(_Accumulator):
    """The mean of several gradients that are zero but for some rows.

    As a `ConditionalAccumulator`, but each index is averaged over the gradients that had it. Rows
    of one index in one gradient are added first.

    Args:
        dtype: as there.
        shape: of the variable; None for a size, or all of it, that may be any.
        reduction_type: "MEAN" or "SUM".
        name: for errors; made up if None.

    Example:
        >>> accumulator = SparseConditionalAccumulator("float32", (3, 2))
        >>> accumulator.apply_grad([0, 1], [[1, 1], [0, 2]])
        True
        >>> accumulator.apply_grad([0, 2], [[0, 0], [3, 0]])
        True
        >>> indices, values, shape = accumulator.take_grad(2)
        >>> indices, values.tolist(), shape
        (array([0, 1, 2]), [[0.5, 0.5], [0.0, 2.0], [3.0, 0.0]], (3, 2))
    """

    form = "rows"

    def apply_grad(
        self,
        indices: npt.ArrayLike,
        values: npt.ArrayLike,
        shape: Shape = None,
        local_step: int = 0,
    ) -> bool:
        """Add a gradient of some rows, unless it is stale.

        Args:
            indices: shape (k,), integers, in any order.
            values: shape (k, ...).
            shape: of the variable, if it is to be compared with that of the accumulator.
            local_step: as for `ConditionalAccumulator.apply_grad`.

        Returns:
            Whether it was added.

        Raises:
            InvalidArgumentError: not an index for every row, an index out of range, or shape or
                dtype do not fit.
        """
        rows = Rows(indices, _as_array(values, self.dtype))
        if shape is not None:
            self._check_shape(tuple(shape), rows)
        return self._apply(rows, local_step)

    def apply_rows(self, rows: Rows, local_step: int = 0) -> bool:
        """As `apply_grad`, for a gradient that is one object."""
        return self.apply_grad(rows.indices, rows.values, None, local_step)

    def take_grad(
        self, count: int, *, timeout: float | None = None
    ) -> tuple[Array, Array, tuple[int | None, ...] | None]:
        """Wait for so many gradients, and take the mean or sum of each index.

        Args:
            count: how many at least.
            timeout: seconds to wait.

        Returns:
            The indices in order, shape (k,), int64; their rows, shape (k, ...); and the shape of
            the variable, as far as the accumulator knows it.

        Raises:
            OpError: as `ConditionalAccumulator.take_grad`.
        """
        rows = self.take_rows(count, timeout=timeout)
        known = self.shape
        if known is None and len(rows.values):
            known = (None, *rows.values.shape[1:])
        return rows.indices, rows.values, known

    def take_rows(self, count: int, *, timeout: float | None = None) -> Rows:
        """As `take_grad`, but return one object."""
        return self._take(count, timeout)  # type: ignore[no-any-return]

    def _check_shape(self, shape: tuple[int | None, ...], rows: Rows) -> None:
        own = GradientSpec(self.name, self.dtype.name, shape, self.form)
        if not self.part.fits(shape):
            raise InvalidArgumentError(
                f"apply_grad: the variable has another shape, expected {self.shape}, got {shape} "
                f"({self.name})"
            )
        checked(own, rows, "apply_grad")


A = TypeVar("A", ConditionalAccumulator, SparseConditionalAccumulator)


def shared_accumulator(
    kind: type[A],
    dtype: npt.DTypeLike,
    shape: Shape = None,
    *,
    service: Service,
    shared_name: str,
    task: int | str | None = None,
    container: str | None = None,
    reduction_type: str = "MEAN",
) -> A:
    """Make an accumulator that lives on a task, or find it there; see `shared_queue`.

    Args:
        kind: `ConditionalAccumulator` or `SparseConditionalAccumulator`.
        dtype: as for the class.
        shape: as for the class.
        service: open on all tasks.
        shared_name: of the accumulator; also its `name`.
        task: where it lives: a number, or a device string such as "/job:worker/task:1"; what that
            leaves open, or None, is decided by the `device` blocks around.
        container: set of names that `shared_name` belongs to; None for the current one.
        reduction_type: as for the class.

    Returns:
        An accumulator with the same methods on all tasks.

    Raises:
        InvalidArgumentError: the name belongs to something else; says what differs.
        UnavailableError: the task cannot be reached.
        ValueError: no such task, no name, or as the class.
        TypeError: not one of the two classes.

    Example:
        >>> import collectives as cc
        >>> with Service(cc.init()) as service:
        ...     losses = shared_accumulator(
        ...         ConditionalAccumulator, "float64", (), service=service, shared_name="losses"
        ...     )
        ...     losses.apply_grad(2.0)
        ...     losses.take_grad(1).item()
        True
        2.0
    """
    if kind not in (ConditionalAccumulator, SparseConditionalAccumulator):
        raise TypeError(
            f"shared_accumulator: expected ConditionalAccumulator or SparseConditionalAccumulator, "
            f"got {kind!r}"
        )
    accumulator = kind(dtype, shape, reduction_type=reduction_type, name=shared_name)
    accumulator.state_machine = open_accumulation(
        service,
        [accumulator.part],
        mean=accumulator.mean,
        name=shared_name,
        task=task,
        container=container,
    )
    return accumulator


def _known_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        return dtype_named(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgumentError(f"accumulator: not a dtype: {error}") from error


def _as_array(value: npt.ArrayLike, dtype: np.dtype[Any]) -> Array:
    if hasattr(value, "dtype"):
        return np.asarray(value)
    try:
        return np.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"apply_grad: not an array of {dtype}: {error}") from error
