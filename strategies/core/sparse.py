"""Sparse gradients: the rows of a large variable that a step used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.core import array_ops

__all__ = ["Gradient", "Rows", "as_rows", "fits", "checked_rows", "coalesced_checked", "coalesced"]


@dataclass(frozen=True, eq=False)
class Rows:
    """A gradient that is zero but for some rows.

    It stands for an array of zeros to which every row is added at its index, so that rows of one
    index are summed. What `Communicator.sparse_allreduce` returns are its two fields.

    Attributes:
        indices: shape (k,), integers >= 0 in host memory, in any order; kept as int64. Inside of a
            compiled program of JAX, an array there, kept as it is.
        values: shape (k, ...), a row of the variable for each index, in the variable's memory.

    Example:
        >>> import strategies
        >>> table = np.zeros((4, 2))
        >>> rows = strategies.Rows([3, 0, 3], np.ones((3, 2)))
        >>> strategies.SGD(0.5).apply_gradients([(rows, table)])
        >>> table[:, 0].tolist()
        [-0.5, 0.0, 0.0, -1.0]
    """

    indices: Any
    values: Any

    def __post_init__(self) -> None:
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(self.indices, jax.core.Tracer):
            return  # which has no numbers yet
        indices = np.asarray(self.indices)
        # An empty list is one of floats, and beside int64 uint64 becomes one, too.
        if indices.dtype.kind in "iu" or not indices.size:
            indices = indices.astype(np.int64, copy=False)
        object.__setattr__(self, "indices", indices)


Gradient: TypeAlias = npt.NDArray[Any] | Rows
"""In host memory."""


def as_rows(gradient: Any, operation: str, where: str) -> Any:
    """Return a sparse tensor of PyTorch as `Rows`, and all else as it is.

    Such are the gradients of `torch.nn.Embedding(sparse=True)`.

    Args:
        gradient: anything.
        operation: beginning of a message.
        where: end of a message.

    Raises:
        TypeError: it is sparse in more than its rows.
    """
    if getattr(gradient, "is_sparse", False) is not True:
        return gradient
    if gradient.sparse_dim() != 1:
        raise TypeError(
            f"{operation}: expected a gradient that is sparse in its first axis alone, got one "
            f"that is in {gradient.sparse_dim()} ({where})"
        )
    whole = gradient.detach().coalesce()
    return Rows(whole.indices()[0].cpu().numpy(), whole.values())


def coalesced_checked(rows: Rows, operation: str, where: str, *, length: int | None = None) -> Rows:
    """Check rows, and return them by increasing index, those of one index summed.

    Args:
        rows: as a user gave them, with values that are an array; they are not changed.
        operation: beginning of a message.
        where: end of a message.
        length: number of rows of the variable, if known.

    Returns:
        Rows whose indices are int64 without repetition. Where any were summed, 16-bit floats have
        become float32.

    Raises:
        TypeError: the indices are not integers.
        ValueError: there is not an index for every row, or one is out of range.

    Order: of a summation, fixed by the order of the rows.
    """
    indices, values = rows.indices, rows.values
    if indices.dtype != np.int64:
        raise TypeError(f"{operation}: indices are not integers, got {indices.dtype} ({where})")
    shape = tuple(values.shape)
    if indices.ndim != 1 or indices.shape != shape[:1]:
        raise ValueError(
            f"{operation}: expected an index for every row, got shapes {indices.shape} and "
            f"{shape} ({where})"
        )
    if indices.size and (indices.min() < 0 or (length is not None and indices.max() >= length)):
        raise ValueError(
            f"{operation}: an index is out of range, expected 0 .. "
            f"{'any' if length is None else length - 1}, got {indices.min()} .. {indices.max()} "
            f"({where})"
        )
    return coalesced(rows)


def coalesced(rows: Rows) -> Rows:
    """As `coalesced_checked`, without the check."""
    indices, values = rows.indices.copy(), rows.values
    if np.all(indices[1:] > indices[:-1]):
        return Rows(indices, values)
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], array_ops.take(values, order)
    # Neighbours of one index two by two, until there are none.
    while np.any(same := indices[1:] == indices[:-1]):
        values = array_ops.arithmetic_dtype(values)
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        lengths = np.diff(starts, append=len(indices))
        second = (np.arange(len(indices)) - np.repeat(starts, lengths)) % 2 == 1
        right, kept = np.flatnonzero(second), np.flatnonzero(~second)
        sums = array_ops.take(values, right - 1) + array_ops.take(values, right)
        values = array_ops.put(values, right - 1, sums)
        indices, values = indices[kept], array_ops.take(values, kept)
    return Rows(indices, values)


def checked_rows(
    gradient: Any,
    shape: tuple[int | None, ...] | None,
    dtype: str,
    operation: str,
    where: str,
    *,
    cast: bool = False,
) -> Any:
    """Return a gradient that fits its variable; rows `coalesced_checked`.

    Args:
        gradient: an array, or `Rows` of one.
        shape: of the variable; None for a size, or for all of it, that may be any.
        dtype: name of the variable's.
        operation: beginning of a message.
        where: end of a message.
        cast: whether the gradient may have another dtype, of the same kind.

    Raises:
        ValueError: its shape or dtype differs, an index is out of range, or a scalar gets rows.
        TypeError: the indices are not integers, or the dtype is of another kind.
    """
    array = gradient.values if isinstance(gradient, Rows) else gradient
    has, own = tuple(array.shape), array_ops.dtype_name(array)
    expected = shape
    if isinstance(gradient, Rows):
        if shape == ():
            raise ValueError(f"{operation}: a scalar has no rows ({where})")
        length = shape[0] if shape else None
        gradient = coalesced_checked(gradient, operation, where, length=length)
        expected = None if shape is None else (*has[:1], *shape[1:])
    alike = has == expected or fits(has, expected)
    if cast and not alike:
        raise ValueError(
            f"{operation}: the gradient does not fit in shape, expected {expected}, got {has} "
            f"({where})"
        )
    if cast and own != dtype and not _castable(array, dtype):
        raise TypeError(
            f"{operation}: the gradient has the wrong dtype, expected {dtype}, got {own} ({where})"
        )
    if not cast and not (alike and own == dtype):
        raise ValueError(
            f"{operation}: gradient does not fit, expected {dtype} of shape {expected}, got {own} "
            f"of shape {has} ({where})"
        )
    return gradient


def fits(shape: Sequence[int | None], expected: Sequence[int | None] | None) -> bool:
    """Whether a shape is as expected, where some sizes, or all of it, may be any."""
    if expected is None:
        return True
    sizes = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(None in pair or len({*pair}) == 1 for pair in sizes)


def _castable(array: Any, dtype: str) -> bool:
    """Whether an array can stand for one of another dtype; where it is copied, others refuse."""
    return not isinstance(array, np.ndarray) or np.can_cast(array.dtype, dtype, "same_kind")
