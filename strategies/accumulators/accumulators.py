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
    """Base of both kinds of accumulators."""

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
        # Replaced by a client of the state machine if the accumulator is on another task.
        self.state_machine: AnyAccumulation = Accumulation(
            [self.part], mean=self.mean, name=self.name
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.dtype}, {self.shape}, "
            f"reduction_type={self.reduction_type!r}, name={self.name!r})"
        )

    def num_accumulated(self) -> int:
        """Return the number of gradients accumulated in the current step."""
        return self.state_machine.state()[1]

    def global_step(self) -> int:
        """Return the current step; gradients of earlier steps are dropped."""
        return self.state_machine.state()[0]

    def set_global_step(self, step: int) -> None:
        """Set the current step; setting an earlier one logs a warning."""
        self.state_machine.set_step(int(step))

    def cancel_pending(self) -> None:
        """Fail all waiting takes of all threads with `CancelledError`."""
        self.state_machine.cancel_pending()

    def _apply(self, gradient: Any, local_step: int) -> bool:
        # An apply never waits, so it needs no timeout.
        attempt = Apply([gradient], int(local_step))
        perform(self.state_machine, attempt, "apply_grad", None)
        return attempt.accepted

    def _take(self, count: int, timeout: float | None) -> Any:
        attempt = Take(int(count))
        perform(self.state_machine, attempt, "take_grad", timeout)
        # Accumulators of this kind have one part.
        return attempt.results[0]


class ConditionalAccumulator(_Accumulator):
    """The mean of several gradients of one variable.

    Each gradient has a `local_step`: the step of the values that it was computed from. A gradient
    of an earlier step than the accumulator's is *stale* and dropped. Taking the mean empties the
    accumulator and begins its next step.

    Args:
        dtype: float16, bfloat16, float32 or float64. 16-bit floats are accumulated in float32.
        shape: shape of the gradients. None for a size, or for the shape, accepts any, but it must
            be the same for all gradients of a step.
        reduction_type: "MEAN" or "SUM".
        name: name for errors; None chooses one.

    Raises:
        ValueError: the dtype or reduction type is unknown.

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
            gradient: an array of the accumulator's dtype, or Python numbers and lists, which take
                it. You may change it after the call.
            local_step: step of the values that it was computed from; may be later than the
                accumulator's.

        Returns:
            Whether it was added.

        Raises:
            InvalidArgumentError: its shape or dtype differs from the accumulator's or from earlier
                gradients of the step.
        """
        return self._apply(_as_array(gradient, self.dtype), local_step)

    def take_grad(self, count: int, *, timeout: float | None = None) -> Array:
        """Wait for at least `count` gradients; return the mean or sum of all accumulated ones.

        Callers are served in the order of their calls. Afterwards the accumulator is empty, and its
        step is one higher.

        Args:
            count: minimum number of gradients.
            timeout: seconds to wait.

        Returns:
            An array with shape and dtype of the gradients; it belongs to the caller.

        Raises:
            InvalidArgumentError: a count below 1.
            DeadlineExceededError: fewer gradients arrived within `timeout`.
            CancelledError: `cancel_pending` was called, or the service has ended.
        """
        return self._take(count, timeout)  # type: ignore[no-any-return]


class SparseConditionalAccumulator(_Accumulator):
    """The mean of several gradients that are zero except for some rows.

    As a `ConditionalAccumulator`, but each row is averaged over the gradients that contain it.
    Duplicate indices in one gradient are summed first.

    Args:
        dtype: as for `ConditionalAccumulator`.
        shape: shape of the variable; None for a size, or for the shape, accepts any.
        reduction_type: "MEAN" or "SUM".
        name: name for errors; None chooses one.

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
            shape: shape of the variable, to compare with the accumulator's; None skips this check.
            local_step: as for `ConditionalAccumulator.apply_grad`.

        Returns:
            Whether it was added.

        Raises:
            InvalidArgumentError: indices and rows differ in number, an index is out of range, or
                shape or dtype differ.
        """
        rows = Rows(indices, _as_array(values, self.dtype))
        if shape is not None:
            self._check_shape(tuple(shape), rows)
        return self._apply(rows, local_step)

    def apply_rows(self, rows: Rows, local_step: int = 0) -> bool:
        """As `apply_grad`, for a gradient as one object."""
        return self.apply_grad(rows.indices, rows.values, None, local_step)

    def take_grad(
        self, count: int, *, timeout: float | None = None
    ) -> tuple[Array, Array, tuple[int | None, ...] | None]:
        """Wait for at least `count` gradients; return the mean or sum of each row.

        Args:
            count: minimum number of gradients.
            timeout: seconds to wait.

        Returns:
            The indices in order, shape (k,), int64; their rows, shape (k, ...); and the shape of
            the variable as far as it is known.

        Raises:
            OpError: as `ConditionalAccumulator.take_grad`.
        """
        rows = self.take_rows(count, timeout=timeout)
        known = self.shape
        if known is None and len(rows.values):
            # The number of rows of the variable is unknown; the other sizes are those of the
            # gradients.
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
    """Create an accumulator on a task, or find it there; see `shared_queue`.

    Args:
        kind: `ConditionalAccumulator` or `SparseConditionalAccumulator`.
        dtype: as for the class.
        shape: as for the class.
        service: service that is open on all tasks.
        shared_name: name of the accumulator; also its `name`.
        task: task of the accumulator: a number, or a device string such as "/job:worker/task:1".
            The enclosing `device` blocks supply missing parts, or all of it for None.
        container: namespace of `shared_name`; None for the current one.
        reduction_type: as for the class.

    Returns:
        An accumulator with the same methods on all tasks.

    Raises:
        InvalidArgumentError: the name belongs to a different object; names the difference.
        UnavailableError: the task cannot be reached.
        ValueError: the task does not exist, the name is empty, or as the class.
        TypeError: `kind` is not one of the two classes.

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
    # Made first, because its constructor checks the arguments before any message.
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
    # Arrays keep their dtype, which is checked; Python's numbers take the accumulator's.
    if hasattr(value, "dtype"):
        return np.asarray(value)
    try:
        return np.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"apply_grad: not an array of {dtype}: {error}") from error
