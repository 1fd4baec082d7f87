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
    """What an array looks like.

    Attributes:
        shape, dtype: as of NumPy arrays.
        library: an array of the other library that results are for, or None for NumPy.
        strides: strides of a dense array that results keep, in elements; None for C order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    library: ArrayAdapter | None
    strides: tuple[int, ...] | None = None

    @property
    def order(self) -> list[int] | None:
        """The axes by `dense_axes`, equal on all ranks; None for C order."""
        axes = None if self.strides is None else dense_axes(self.shape, self.strides)
        return None if axes is None or axes == sorted(axes) else axes

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class SpecView(NamedTuple):
    """Some memory as an array.

    Attributes:
        memory: the array.
        shown: it again, as a tensor where that is the caller's kind.
        result: makes what the caller gets as a result: `shown`, or a new array on a device.
    """

    memory: Array
    shown: Any
    result: Callable[[], Any]


def spec_of(x: Any, *, operation: str) -> ArraySpec:
    """Tell the kind of an array, or of a pair of a shape and a dtype, which stands for NumPy's.

    Raises:
        TypeError: `x` is not an array, or its elements cannot be moved.
        ValueError: a dimension is negative.
    """
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], (int, tuple, list)):
        return numpy_spec(*x, operation=operation)
    library = None if isinstance(x, (np.ndarray, np.generic)) else adapters.adapter_for(x)
    if library is None:
        array = host_arrays.host_view(x, operation=operation).host
        return ArraySpec(array.shape, array.dtype, None)
    shape, dtype = tuple(library.shape), _check(library.dtype, operation)
    return ArraySpec(shape, dtype, library, library.strides())


def numpy_spec(
    shape: SupportsIndex | Iterable[SupportsIndex], dtype: npt.DTypeLike, *, operation: str
) -> ArraySpec:
    """Check what a NumPy array shall look like; errors as `spec_of`."""
    dims = shape if isinstance(shape, Iterable) else (shape,)
    plain = tuple(map(operator.index, dims))  # the same text on all ranks, also of NumPy integers
    if any(n < 0 for n in plain):
        raise ValueError(f"{operation}: a dimension is negative, got {plain}")
    return ArraySpec(plain, _check(np.dtype(dtype), operation), None)


def as_array(memory: Array, kind: ArraySpec) -> SpecView:
    """Show memory, shape (nbytes,), uint8, as an array of a kind."""
    library = kind.library
    view: Array = memory.view(kind.dtype)
    if kind.strides is None:
        view = view.reshape(kind.shape)
    else:
        steps = [step * kind.dtype.itemsize for step in kind.strides]
        view = np.lib.stride_tricks.as_strided(view, kind.shape, steps)
    if library is None:
        return SpecView(view, view, lambda: view)
    if library.shared:
        shown = library.show(view)
        return SpecView(view, shown, lambda: shown)
    # Arrays that never change must not see what is written to this memory later.
    return SpecView(view, view, lambda: library.wrap(view if library.private else view.copy()))


def _check(dtype: np.dtype[Any], operation: str) -> np.dtype[Any]:
    """Refuse a dtype that cannot be moved; return it in native byte order."""
    return host_arrays.host_view(np.empty(0, dtype), operation=operation).host.dtype
