"""Gradient clipping.

All functions take gradients of any library: arrays, `Rows` or None. They return new ones of the
same kinds and dtypes; what needs no change is returned itself. Rows that are changed come back by
increasing index, those of one index summed, as NumPy arrays if they are in host memory. 16-bit
floats are summed and scaled in float32.
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
# A smaller factor is applied in parts, since as a float32 it would lose its precision.
_SMALLEST_FACTOR = 1e-30


class _Gradient(NamedTuple):
    """A gradient that was looked at.

    Attributes:
        given: by the user.
        array: its elements, as a NumPy array where its memory allows; of rows, after summation.
        rows: their indices, or None for a dense gradient.
    """

    given: Any
    array: Any
    rows: npt.NDArray[np.int64] | None = None


def clip_by_value(gradients: Iterable[Any], limit: float) -> list[Any]:
    """Bring every element into [-limit, limit], the limit being rounded to the gradient's dtype.

    An infinity becomes the limit, a NaN stays one.

    Args:
        gradients: arrays of floats, `Rows` or None.
        limit: a number >= 0.

    Raises:
        TypeError, ValueError: something is not a gradient; the message names its position.
    """
    limit = number("clip_by_value", "limit", limit)

    def clip(array: Any) -> Any:
        most = limit if array_ops.dtype_name(array) == "float64" else min(limit, _FLOAT32_MAX)
        return array_api_compat.array_namespace(array).clip(array, -most, most)

    return [_map(gradient, clip) for gradient in _look_at(gradients, "clip_by_value")]


def clip_by_norm(gradients: Iterable[Any], max_norm: float) -> list[Any]:
    """Scale every gradient whose own norm is larger than `max_norm` to that norm.

    One with an infinity or a NaN is returned as it is.

    Args:
        gradients: arrays of floats, `Rows` or None.
        max_norm: a number >= 0.

    Raises:
        TypeError, ValueError: something is not a gradient; the message names its position.
    """
    limit = number("clip_by_norm", "max_norm", max_norm)
    return [
        gradient and _scale(gradient, _factor(norm(squares(gradient.array)), limit))
        for gradient in _look_at(gradients, "clip_by_norm")
    ]


def clip_by_global_norm(
    gradients: Iterable[Any], max_norm: float, comm: cc.Communicator | None = None
) -> tuple[list[Any], float]:
    """Scale all gradients so that they are, as one long vector, no longer than `max_norm`.

    With a communicator, the vector is that of all ranks, joined: use it where each rank has another
    part of the gradients, or has gradients that are averaged afterwards. Gradients that are equal
    on all ranks need none.

    *Collective* if there is a communicator: all its ranks call it with the same `max_norm`.

    Args:
        gradients: arrays of floats, `Rows` or None; with a communicator, any number of them.
        max_norm: a number >= 0.
        comm: the ranks whose gradients form one vector; this rank's alone if None.

    Returns:
        (gradients, norm): the norm is that before the scaling, the same bits on all ranks. If there
        is an infinity or a NaN on any of them, the norm is one, and gradients are returned as they
        are on all ranks, so that each can pass over the step: `if math.isfinite(norm)`.

    Raises:
        TypeError, ValueError: something is not a gradient, or ranks differ in `max_norm`; on all
            ranks.

    Cost: one all-gather of 32 bytes per rank; gradients are read once, and once more if scaled.

    Example:
        >>> clip_by_global_norm([np.array([3.0]), None, np.array([4.0])], 1.0)
        ([array([0.6]), None, array([0.8])], 5.0)
    """
    error, limit, looked_at, own = None, 0.0, [], Squares(1.0, 0.0)
    try:
        limit = number("clip_by_global_norm", "max_norm", max_norm)
        looked_at = _look_at(gradients, "clip_by_global_norm")
        own = combine(squares(gradient.array) for gradient in looked_at if gradient)
    except (TypeError, ValueError) as caught:
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
    """Add the squares of all ranks in their order, or raise on all of them."""
    report = np.array([[error is not None, limit, *own]], np.float64)
    reports = comm.allgather(report)
    if reports[:, 0].any():
        raise_everywhere(error, comm, "clip_by_global_norm")
    limits = reports[:, 1].tolist()
    if len(set(limits)) > 1:
        raise ValueError(
            f"clip_by_global_norm: ranks differ in max_norm, expected one number, got {limits}"
        )
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
            checked.append(_Gradient(given, rows.values, rows.indices))
        else:
            checked.append(_Gradient(given, floats("gradient", given, operation, where)))
    return checked


def _factor(length: float, limit: float) -> float:
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
    """Return a gradient whose elements are a function of these, computed in their wide dtype."""
    if gradient is None:
        return None
    if gradient.rows is None:
        given = gradient.given
        return array_ops.astype(
            function(array_ops.arithmetic_dtype(given)), array_ops.dtype_name(given)
        )
    name = array_ops.dtype_name(gradient.given.values)
    return Rows(
        gradient.rows, array_ops.astype(function(array_ops.arithmetic_dtype(gradient.array)), name)
    )
