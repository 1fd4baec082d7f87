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
    """A gradient that is zero except in some rows.

    Equals an array of zeros with every row added at its index, so rows of one index are summed.
    `Communicator.sparse_allreduce` returns the same two fields.

    Attributes:
        indices: shape (k,), integers >= 0 in host memory, in any order; stored as int64. Inside a
            compiled JAX program, a traced array, stored unchanged.
        values: shape (k, ...), a row of the variable per index, on the variable's device.

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
            return  # a tracer has no values yet
        indices = np.asarray(self.indices)
        # An empty list becomes float64, and uint64 mixed with int64 becomes float64.
        if indices.dtype.kind in "iu" or not indices.size:
            indices = indices.astype(np.int64, copy=False)
        object.__setattr__(self, "indices", indices)


Gradient: TypeAlias = npt.NDArray[Any] | Rows
"""In host memory."""


def as_rows(gradient: Any, operation: str, where: str) -> Any:
    """Return a sparse PyTorch tensor as `Rows`; other gradients unchanged.

    `torch.nn.Embedding(sparse=True)` has such gradients.

    Args:
        gradient: the gradient.
        operation: beginning of an error.
        where: end of an error.

    Raises:
        TypeError: the tensor is sparse in more than its first axis.
    """
    if getattr(gradient, "is_sparse", False) is not True:
        return gradient
    if gradient.sparse_dim() != 1:
        raise TypeError(
            f"{operation}: expected a gradient that is sparse in its first axis alone, got one "
            f"that is in {gradient.sparse_dim()} ({where})"
        )
    # PyTorch keeps repeated indices until `coalesce` adds them.
    whole = gradient.detach().coalesce()
    return Rows(whole.indices()[0].cpu().numpy(), whole.values())


def coalesced_checked(rows: Rows, operation: str, where: str, *, length: int | None = None) -> Rows:
    """Check rows; return them by increasing index, with rows of one index summed.

    Args:
        rows: rows with array values; not changed.
        operation: beginning of an error.
        where: end of an error.
        length: number of rows of the variable, if known.

    Returns:
        rows with unique int64 indices. If rows were summed, 16-bit floats have become float32.

    Raises:
        TypeError: the indices are not integers.
        ValueError: the number of indices is not that of rows, or an index is out of range.

    Order: the sums depend on the order of the rows alone.
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
    # Negative indices would count from the end in NumPy and fail elsewhere.
    if indices.size and (indices.min() < 0 or (length is not None and indices.max() >= length)):
        raise ValueError(
            f"{operation}: an index is out of range, expected 0 .. "
            f"{'any' if length is None else length - 1}, got {indices.min()} .. {indices.max()} "
            f"({where})"
        )
    return coalesced(rows)


def coalesced(rows: Rows) -> Rows:
    """Return `coalesced_checked` rows without the checks."""
    # Copied: the sender may change its indices while the result is in use.
    indices, values = rows.indices.copy(), rows.values
    # Strictly increasing: neither order nor sums are needed. This is the case after one coalescing.
    if np.all(indices[1:] > indices[:-1]):
        return Rows(indices, values)
    # Stable, so that rows of one index keep their order and the sum its rounding.
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], array_ops.take(values, order)
    # Adds neighbours of one index in pairs, until no index repeats.
    while np.any(same := indices[1:] == indices[:-1]):
        values = array_ops.arithmetic_dtype(values)
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        lengths = np.diff(starts, append=len(indices))
        second = (np.arange(len(indices)) - np.repeat(starts, lengths)) % 2 == 1
        right, kept = np.flatnonzero(second), np.flatnonzero(~second)
        # In pairs: log2(k) rounds of vector operations instead of k, and smaller rounding errors.
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
    """Return a gradient that fits its variable; rows are `coalesced_checked`.

    Args:
        gradient: an array, or `Rows`.
        shape: shape of the variable; None for any, for a size or for all of it.
        dtype: name of the variable's dtype.
        operation: beginning of an error.
        where: end of an error.
        cast: whether the gradient may have another dtype of the same kind.

    Raises:
        ValueError: shape or dtype differs, an index is out of range, or a scalar gets rows.
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
        # The number of rows is free, the other axes are the variable's.
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
    """Return whether a shape is as expected; None matches any size, or any shape."""
    if expected is None:
        return True
    # Not strict, because the next line compares the lengths.
    sizes = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(None in pair or len({*pair}) == 1 for pair in sizes)


def _castable(array: Any, dtype: str) -> bool:
    """Return whether an array can be cast; only NumPy arrays are checked."""
    # Libraries other than NumPy convert on their device, and raise their own errors.
    return not isinstance(array, np.ndarray) or np.can_cast(array.dtype, dtype, "same_kind")
