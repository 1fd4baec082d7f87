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
        shape: as the array says.
        dtype: as NumPy names it.
        shared: what is written into `elements` is written into the array.
        private: `elements` is memory of its own, free for any use. Some kinds say neither.
        pinnable: it is private, and a device copies it to and from pinned memory by itself.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shared: bool = False
    private: bool = False
    pinnable: bool = False

    @abstractmethod
    def why_constant(self) -> str | None:
        """Say why the array cannot take a result, None if it can."""

    @abstractmethod
    def elements(self) -> npt.NDArray[Any]:
        """Return the elements in host memory: of `shape` and `dtype`, any strides."""

    @abstractmethod
    def wrap(self, result: npt.NDArray[Any]) -> Any:
        """Make an array of this kind on this device of a result that nobody else holds."""

    @abstractmethod
    def write(self, result: npt.NDArray[Any]) -> None:
        """Make `result` the array's elements; if `shared`, they have been written already."""

    def show(self, memory: npt.NDArray[Any]) -> Any:
        """View host memory as an array of this kind, with its strides, if `shared`."""
        return self.wrap(memory)

    def strides(self) -> tuple[int, ...] | None:
        """Return the strides that results keep, in elements; None for C order."""
        return None

    def pinned(self, nbytes: int) -> npt.NDArray[Any]:
        """Allocate pinned memory, shape (nbytes,), uint8; of what is `pinnable`."""
        raise NotImplementedError

    def fetch(self, into: npt.NDArray[Any]) -> None:
        """Copy the elements into host memory of their shape and dtype; of what is `pinnable`."""
        raise NotImplementedError

    def resident(self) -> DeviceArray | None:
        """Show an array on a CUDA device where it is; None for others."""
        return None


class DeviceArray(NamedTuple):
    """An array in the memory of a CUDA device.

    Attributes:
        shape, dtype: as of NumPy arrays.
        buffer: its elements in order: its own memory, or a copy where its strides need one.
        is_own: whether it is its own memory.
        new: makes an array of its kind and dtype on its device, of a shape; returns it with its
            memory.
        write: makes the elements of a buffer the array's; complete when the buffer is settled.
        show: sees the memory of a buffer as an array of its kind, of a shape.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    buffer: DeviceBuffer
    is_own: bool
    new: Callable[[tuple[int, ...]], tuple[Any, DeviceBuffer]]
    write: Callable[[DeviceBuffer], None]
    show: Callable[[DeviceBuffer, tuple[int, ...]], Any]


def overlap_reason(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    """Say that an array cannot take a result since its elements share memory; None if not."""
    pairs = zip(shape, strides, strict=True)
    if 0 not in shape and any(n > 1 and stride == 0 for n, stride in pairs):
        return "several of its elements are the same memory"
    return None


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
    if 0 in shape:
        return None
    axes = sorted((i for i, n in enumerate(shape) if n > 1), key=lambda i: -strides[i])
    expected = 1
    for i in reversed(axes):
        if strides[i] != expected:
            return None
        expected *= shape[i]
    return axes
