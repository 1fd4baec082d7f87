"""Memory owned by this package, exposed as arrays of the caller's library."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from collectives.arrays import adapters, host_arrays
from collectives.arrays.adapter import ArrayAdapter, dense_axes
from collectives.arrays.host_arrays import Array

__all__ = ["ArraySpec", "SpecView", "spec_of", "numpy_spec", "as_array"]


class ArraySpec(NamedTuple):
    """Shape, dtype and library of an array.

    Attributes:
        shape, dtype: as of NumPy arrays.
        library: adapter of an array of the library that results belong to; None for NumPy.
        strides: strides of a dense array that results keep, in elements; None for C order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    library: ArrayAdapter | None
    strides: tuple[int, ...] | None = None

    @property
    def order(self) -> list[int] | None:
        """The axes by `dense_axes`, equal on all ranks; None for C order."""
        # Equal orders on all ranks, although strides of short axes may differ.
        axes = None if self.strides is None else dense_axes(self.shape, self.strides)
        return None if axes is None or axes == sorted(axes) else axes

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class SpecView(NamedTuple):
    """Memory as an array.

    Attributes:
        memory: the array.
        shown: the array as a tensor, if that is the caller's kind.
        result: returns the result for the caller: `shown`, or a new array on a device.
    """

    memory: Array
    shown: Any
    result: Callable[[], Any]


def spec_of(x: Any, *, operation: str) -> ArraySpec:
    """Return the spec of an array, or of a pair (shape, dtype) for a NumPy array.

    Raises:
        TypeError: `x` is not an array, or its elements cannot be moved.
        ValueError: a dimension is negative.
    """
    # A pair (shape, dtype) describes an array that does not exist yet.
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], (int, tuple, list)):
        return numpy_spec(*x, operation=operation)
    library = None if isinstance(x, (np.ndarray, np.generic)) else adapters.adapter_for(x)
    if library is None:
        array = host_arrays.host_view(x, operation=operation).host
        return ArraySpec(array.shape, array.dtype, None)
    # The caller's array is not needed later, only its kind.
    shape, dtype = tuple(library.shape), _check(library.dtype, operation)
    return ArraySpec(shape, dtype, library, library.strides())


def numpy_spec(
    shape: SupportsIndex | Iterable[SupportsIndex], dtype: npt.DTypeLike, *, operation: str
) -> ArraySpec:
    """Return the spec of a NumPy array of a shape and dtype; errors as `spec_of`."""
    dims = shape if isinstance(shape, Iterable) else (shape,)
    plain = tuple(map(operator.index, dims))  # the same text on all ranks, also for NumPy integers
    if any(n < 0 for n in plain):
        raise ValueError(f"{operation}: a dimension is negative, got {plain}")
    return ArraySpec(plain, _check(np.dtype(dtype), operation), None)


def as_array(memory: Array, kind: ArraySpec) -> SpecView:
    """Return a view of memory, shape (nbytes,), uint8, as an array of a spec."""
    library = kind.library
    view: Array = memory.view(kind.dtype)
    if kind.strides is None:
        view = view.reshape(kind.shape)
    else:
        steps = [step * kind.dtype.itemsize for step in kind.strides]
        # The strides fill the memory exactly (`dense_axes`), so no element is outside.
        view = np.lib.stride_tricks.as_strided(view, kind.shape, steps)
    if library is None:
        return SpecView(view, view, lambda: view)
    if library.shared:
        shown = library.show(view)
        return SpecView(view, shown, lambda: shown)
    # Immutable arrays must not change when this memory is overwritten later.
    return SpecView(view, view, lambda: library.wrap(view if library.private else view.copy()))


def _check(dtype: np.dtype[Any], operation: str) -> np.dtype[Any]:
    # An empty array takes all checks of an argument, and names the operation in errors.
    return host_arrays.host_view(np.empty(0, dtype), operation=operation).host.dtype
