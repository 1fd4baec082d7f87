"""Gradient clipping.

All functions accept gradients of any library: arrays, `Rows` or None. They return new gradients of
the same kinds and dtypes, or the same object if it does not change. Changed `Rows` are returned in
increasing index order, with equal indices summed, as NumPy arrays if they are in host memory.
16-bit floats are summed and scaled in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies.core import array_ops
from strategies.core.agreement import raise_everywhere
from strategies.core.sparse import Rows, coalesced_checked
from strategies.core.validation import number
from strategies.optimizers.gradient_pairs import floats
from strategies.optimizers.norms import Squares, combine, norm, squares

__all__ = ["clip_by_global_norm", "clip_by_norm", "clip_by_value"]

_FLOAT32_MAX = float(np.finfo(np.float32).max)
# Smaller factors are applied in several multiplications, because float32 would lose precision.
_SMALLEST_FACTOR = 1e-30


class _Gradient(NamedTuple):
    """A validated gradient.

    Attributes:
        given: the argument.
        array: its elements, as a NumPy array if in host memory; for `Rows` after summation.
        rows: indices of the rows; None for a dense gradient.
    """

    given: Any
    array: Any
    rows: npt.NDArray[np.int64] | None = None


def clip_by_value(gradients: Iterable[Any], limit: float) -> list[Any]:
    """Clip every element to [-limit, limit]; the limit is rounded to the gradient's dtype.

    Infinities become the limit. NaNs remain.

    Args:
        gradients: arrays of floats, `Rows` or None.
        limit: a number >= 0.

    Raises:
        TypeError, ValueError: an element of `gradients` is invalid; names its position.
    """
    limit = number("clip_by_value", "limit", limit)

    def clip(array: Any) -> Any:
        # A float64 limit above the largest float32 would become infinity and clip nothing.
        most = limit if array_ops.dtype_name(array) == "float64" else min(limit, _FLOAT32_MAX)
        return array_api_compat.array_namespace(array).clip(array, -most, most)

    return [_map(gradient, clip) for gradient in _look_at(gradients, "clip_by_value")]


def clip_by_norm(gradients: Iterable[Any], max_norm: float) -> list[Any]:
    """Scale every gradient with a norm above `max_norm` to that norm.

    A gradient with an infinity or a NaN is returned unchanged.

    Args:
        gradients: arrays of floats, `Rows` or None.
        max_norm: a number >= 0.

    Raises:
        TypeError, ValueError: an element of `gradients` is invalid; names its position.
    """
    limit = number("clip_by_norm", "max_norm", max_norm)
    # None passes through: `gradient and ...` returns it unchanged.
    return [
        gradient and _scale(gradient, _factor(norm(squares(gradient.array)), limit))
        for gradient in _look_at(gradients, "clip_by_norm")
    ]


def clip_by_global_norm(
    gradients: Iterable[Any], max_norm: float, comm: cc.Communicator | None = None
) -> tuple[list[Any], float]:
    """Scale all gradients so that their joint norm is at most `max_norm`.

    With a communicator, the norm covers the gradients of all ranks. Use it if each rank holds
    another part of the gradients, or gradients to be averaged afterwards. Gradients that are equal
    on all ranks need no communicator.

    *Collective* if there is a communicator: all its ranks pass the same `max_norm`.

    Args:
        gradients: arrays of floats, `Rows` or None; with a communicator, any number of them.
        max_norm: a number >= 0.
        comm: the ranks whose gradients form one vector; None for this rank alone.

    Returns:
        (gradients, norm): the norm before scaling, the same bits on all ranks. With an infinity or
        NaN on any rank, the norm is not finite and all ranks return their gradients unchanged. Test
        `math.isfinite(norm)` to skip the step.

    Raises:
        TypeError, ValueError: an element of `gradients` is invalid, or ranks differ in `max_norm`;
            on all ranks.

    Cost: one all-gather of 32 bytes per rank. Gradients are read once, and again if scaled.

    Example:
        >>> clip_by_global_norm([np.array([3.0]), None, np.array([4.0])], 1.0)
        ([array([0.6]), None, array([0.8])], 5.0)
    """
    error, limit, looked_at, own = None, 0.0, [], Squares(1.0, 0.0)
    try:
        # In one `try`, because other ranks wait in the all-gather below.
        limit = number("clip_by_global_norm", "max_norm", max_norm)
        looked_at = _look_at(gradients, "clip_by_global_norm")
        own = combine(squares(gradient.array) for gradient in looked_at if gradient)
    except (TypeError, ValueError) as caught:
        # Without a communicator no other rank waits.
        if comm is None:
            raise
        error = caught
    if comm is not None:
        own = _of_all_ranks(own, limit, error, comm)
    length = norm(own)
    factor = _factor(length, limit)
    return [gradient and _scale(gradient, factor) for gradient in looked_at], length


def _of_all_ranks(
    own: Squares, limit: float, error: Exception | None, comm: cc.Communicator
) -> Squares:
    """Return the sum of all ranks' squares in rank order, or raise on all ranks."""
    # Flag, limit, scale and total in one row of 32 bytes per rank.
    report = np.array([[error is not None, limit, *own]], np.float64)
    reports = comm.allgather(report)
    if reports[:, 0].any():
        raise_everywhere(error, comm, "clip_by_global_norm")
    limits = reports[:, 1].tolist()
    if len(set(limits)) > 1:
        raise ValueError(
            f"clip_by_global_norm: ranks differ in max_norm, expected one number, got {limits}"
        )
    # In rank order, so that all ranks get the same bits.
    return combine(Squares(scale, total) for _, _, scale, total in reports.tolist())


def _look_at(gradients: Iterable[Any], operation: str) -> list[_Gradient | None]:
    checked: list[_Gradient | None] = []
    for position, given in enumerate(gradients):
        where = f"position {position}"
        if given is None:
            checked.append(None)
        elif isinstance(given, Rows):
            values = floats("gradient", given.values, operation, where)
            rows = coalesced_checked(Rows(given.indices, values), operation, where)
            # Summed first: the norm is that of the dense equivalent.
            checked.append(_Gradient(given, rows.values, rows.indices))
        else:
            checked.append(_Gradient(given, floats("gradient", given, operation, where)))
    return checked


def _factor(length: float, limit: float) -> float:
    # An infinite or NaN norm leaves the gradients, so that the caller can detect it.
    return limit / length if limit < length < math.inf else 1.0


def _scale(gradient: _Gradient, factor: float) -> Any:
    if factor == 1.0:
        return gradient.given

    def scale(array: Any) -> Any:
        left = factor
        while 0 < left < _SMALLEST_FACTOR:
            array = array * _SMALLEST_FACTOR
            left /= _SMALLEST_FACTOR
        return array * left

    return _map(gradient, scale)


def _map(gradient: _Gradient | None, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the elements of a gradient, in the wide dtype."""
    if gradient is None:
        return None
    if gradient.rows is None:
        # In its own library; only norms need the host view.
        given = gradient.given
        # In float32 for 16-bit floats, rounded once.
        return array_ops.astype(
            function(array_ops.arithmetic_dtype(given)), array_ops.dtype_name(given)
        )
    name = array_ops.dtype_name(gradient.given.values)
    return Rows(
        gradient.rows, array_ops.astype(function(array_ops.arithmetic_dtype(gradient.array)), name)
    )
