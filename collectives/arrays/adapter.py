"""Interface that every adapter of another array library implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.arrays.device import DeviceBuffer

__all__ = ["ArrayAdapter", "DeviceArray", "dense_axes", "overlap_reason"]


class ArrayAdapter(ABC):
    """An array of another library.

    Attributes:
        shape: shape of the array.
        dtype: the NumPy dtype.
        shared: whether writing to `elements` changes the array.
        private: whether `elements` is a private copy that may be overwritten. May be False together
            with `shared`.
        pinnable: whether it is private, and a device copies it to and from pinned memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shared: bool = False
    private: bool = False
    pinnable: bool = False

    @abstractmethod
    def why_constant(self) -> str | None:
        """Return the reason why the array cannot hold a result, None if it can."""

    @abstractmethod
    def elements(self) -> npt.NDArray[Any]:
        """Return the elements in host memory: of `shape` and `dtype`, any strides."""

    @abstractmethod
    def wrap(self, result: npt.NDArray[Any]) -> Any:
        """Return a result, which has no other owner, as an array of this kind on this device."""

    @abstractmethod
    def write(self, result: npt.NDArray[Any]) -> None:
        """Write `result` into the array; if `shared`, the elements are already written."""

    def show(self, memory: npt.NDArray[Any]) -> Any:
        """Return host memory as an array of this kind, with its strides; requires `shared`."""
        return self.wrap(memory)

    def strides(self) -> tuple[int, ...] | None:
        """Return the strides that results keep, in elements; None for C order."""
        return None

    def pinned(self, nbytes: int) -> npt.NDArray[Any]:
        """Allocate pinned memory, shape (nbytes,), uint8; requires `pinnable`."""
        raise NotImplementedError

    def fetch(self, into: npt.NDArray[Any]) -> None:
        """Copy the elements into host memory of their shape and dtype; requires `pinnable`."""
        raise NotImplementedError

    def resident(self) -> DeviceArray | None:
        """Return the array on its CUDA device; None for other memory."""
        return None


class DeviceArray(NamedTuple):
    """An array in the memory of a CUDA device.

    Attributes:
        shape, dtype: as of NumPy arrays.
        buffer: elements in C order: the array's memory, or a copy if its strides require one.
        is_own: whether `buffer` is the array's memory.
        new: returns a new array of this kind, dtype and device, of a given shape, and its memory.
        write: copies a buffer into the array; complete once the buffer is synchronized.
        show: returns the memory of a buffer as an array of this kind, of a given shape.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    buffer: DeviceBuffer
    is_own: bool
    new: Callable[[tuple[int, ...]], tuple[Any, DeviceBuffer]]
    write: Callable[[DeviceBuffer], None]
    show: Callable[[DeviceBuffer, tuple[int, ...]], Any]


def overlap_reason(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 1
) -> str | None:
    """Return why an array with overlapping elements cannot hold a result; None if it can.

    Args:
        shape: the array's shape.
        strides: the array's strides.
        itemsize: size of an element in the unit of the strides.
    """
    pairs = zip(shape, strides, strict=True)
    axes = sorted((abs(stride), n) for n, stride in pairs if n > 1)
    used = itemsize  # by the faster axes
    for stride, n in axes:
        if stride < used:
            break
        used += stride * (n - 1)
    else:
        return None
    # Views by `as_strided` may interleave axes, and then only the addresses show an overlap.
    if 0 not in shape and (axes[0][0] == 0 or _closest(axes) < itemsize):
        return "several of its elements are the same memory"
    return None


def _closest(axes: Sequence[tuple[int, int]]) -> int:
    """Return the smallest distance of two elements."""
    places = np.zeros(1, np.int64)
    for stride, n in axes:
        places = np.add.outer(places, stride * np.arange(n)).reshape(-1)
    return int(np.diff(np.sort(places)).min())


def dense_axes(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Return the axes with several elements, from the slowest to the fastest in memory.

    Args:
        shape: the array's shape.
        strides: the array's strides, in elements.

    Returns:
        The axes; None if the elements do not fill a contiguous block of memory, or share memory.

    Example:
        >>> dense_axes((4, 3, 2), (6, 1, 3)), dense_axes((4, 3), (8, 2)), dense_axes((5, 1), (1, 9))
        ([0, 2, 1], None, [0])
    """
    # The order of axes is undefined without elements.
    if 0 in shape:
        return None
    # Axes of length 1 have arbitrary strides.
    axes = sorted((i for i, n in enumerate(shape) if n > 1), key=lambda i: -strides[i])
    expected = 1
    # From the fastest axis outwards, each stride is the product of the shorter axes.
    for i in reversed(axes):
        if strides[i] != expected:
            return None
        expected *= shape[i]
    return axes
