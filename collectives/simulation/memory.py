"""Buffers of simulated ranks, whose loops take virtual time.

Algorithms work on NumPy arrays or on a `DeviceBuffer`, whose device uses a module such as CuPy.
Here that module is a rank's processor: it advances virtual time, and computes with NumPy if buffers
have contents. A buffer without contents has a length, and takes no memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.arrays.device import Device, DeviceBuffer
from collectives.arrays.host_arrays import Array
from collectives.simulation.clock import SimulatedRank

__all__ = ["SimulatedMemory"]


class SimulatedMemory:
    """Memory of one rank.

    Args:
        rank: the rank.
        gamma: seconds per byte that is combined with another.
        payload: whether buffers have contents.
    """

    def __init__(self, rank: SimulatedRank, gamma: float, *, payload: bool) -> None:
        # `Device` enters a context for each operation; here it does nothing.
        self._device = Device(_Processor(rank, gamma, payload=payload), contextlib.nullcontext())

    def holding(self, contents: Array) -> DeviceBuffer:
        """Return a buffer on an array, shape (n,), contiguous, without copying it."""
        return DeviceBuffer(self._device, contents, contents.dtype)

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceBuffer:
        """Return a buffer of `count` elements, with or without contents."""
        return DeviceBuffer(self._device, self._device.cupy.empty(count, dtype), dtype)


class _Length:
    """An array without contents: only its length."""

    __slots__ = ("itemsize", "size")

    def __init__(self, size: int, itemsize: int) -> None:
        self.size, self.itemsize = size, itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __getitem__(self, part: slice) -> _Length:
        # As slices of arrays: bounds beyond the end are cut.
        begin, end, _ = part.indices(self.size)
        return _Length(end - begin if end > begin else 0, self.itemsize)

    # Without contents nothing is copied.
    def __setitem__(self, part: object, value: object) -> None:
        pass


class _Processor:
    """Replacement for CuPy in a `Device`: the loops that algorithms use, and a stream."""

    def __init__(self, rank: SimulatedRank, gamma: float, *, payload: bool) -> None:
        self._rank, self._gamma, self._payload = rank, gamma, payload
        # `Device` asks `cupy.cuda` for the stream.
        self.cuda = self

    def get_current_stream(self) -> _Processor:
        return self

    def synchronize(self) -> None:
        pass  # every loop has finished when it returns

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        return np.empty(count, dtype) if self._payload else _Length(count, dtype.itemsize)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that combines two arrays: `add`, `minimum` and so on, as NumPy's."""
        return functools.partial(self._combine, getattr(np, name))

    def _combine(self, function: Callable[..., Any], one: Any, other: Any, *, out: Any) -> None:
        # The bytes of the result: `gamma` is per combined byte.
        nbytes = out.nbytes
        if self._payload:
            function(one, other, out=out)
        self._rank.advance(nbytes * self._gamma)
