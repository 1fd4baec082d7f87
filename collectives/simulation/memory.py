"""Buffers of simulated ranks, whose loops take virtual time.

Algorithms work in NumPy arrays or in a `DeviceBuffer`, whose device does what they ask for by a
module such as CuPy. Here that module is a rank's processor: it lets time pass, and has NumPy do the
work where there are contents at all. A buffer without contents is as long as it says, and takes no
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.arrays.device import Device, DeviceBuffer
from collectives.arrays.host_arrays import Array
from collectives.simulation.clock import SimulatedRank

__all__ = ["SimulatedMemory"]


class SimulatedMemory:
    """The memory of one rank.

    Args:
        rank: whose.
        gamma: seconds for a byte that is combined with another.
        payload: whether buffers have contents.
    """

    def __init__(self, rank: SimulatedRank, gamma: float, *, payload: bool) -> None:
        self._device = Device(_Processor(rank, gamma, payload=payload), contextlib.nullcontext())

    def holding(self, contents: Array) -> DeviceBuffer:
        """Return a buffer of an array, shape (n,), contiguous; it stays the same memory."""
        return DeviceBuffer(self._device, contents, contents.dtype)

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceBuffer:
        """Return a buffer of so many elements, with or without contents."""
        return DeviceBuffer(self._device, self._device.cupy.empty(count, dtype), dtype)


class _Length:
    """An array of which only the length is known."""

    __slots__ = ("itemsize", "size")

    def __init__(self, size: int, itemsize: int) -> None:
        self.size, self.itemsize = size, itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __getitem__(self, part: slice) -> _Length:
        begin, end, _ = part.indices(self.size)
        return _Length(end - begin if end > begin else 0, self.itemsize)

    def __setitem__(self, part: object, value: object) -> None:
        pass


class _Processor:
    """What a `Device` takes for CuPy: the loops that algorithms use, and a stream."""

    def __init__(self, rank: SimulatedRank, gamma: float, *, payload: bool) -> None:
        self._rank, self._gamma, self._payload = rank, gamma, payload
        self.cuda = self

    def get_current_stream(self) -> _Processor:
        return self

    def synchronize(self) -> None:
        pass  # what is put there is done at once

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        return np.empty(count, dtype) if self._payload else _Length(count, dtype.itemsize)

    def add(self, one: Any, other: Any, *, out: Any) -> None:
        self._combine(np.add, one, other, out)

    def minimum(self, one: Any, other: Any, *, out: Any) -> None:
        self._combine(np.minimum, one, other, out)

    def maximum(self, one: Any, other: Any, *, out: Any) -> None:
        self._combine(np.maximum, one, other, out)

    def multiply(self, one: Any, other: Any, *, out: Any) -> None:
        self._combine(np.multiply, one, other, out)

    def true_divide(self, one: Any, other: Any, *, out: Any) -> None:
        self._combine(np.true_divide, one, other, out)

    def _combine(self, function: Callable[..., Any], one: Any, other: Any, out: Any) -> None:
        nbytes = out.nbytes
        if self._payload:
            function(one, other, out=out)
        self._rank.advance(nbytes * self._gamma)
