"""Flat memory that algorithms work in: NumPy arrays on the host, `DeviceBuffer` on a device.

An algorithm cuts a buffer into slices, sends and receives them, and combines one with another. The
functions here and in `collectives.arrays.reduction` do the little that differs, so that one
schedule serves both memories. What else an algorithm asks of a buffer (`size`, `itemsize`,
`nbytes`, `dtype`, slices) both kinds answer alike.

Order on a device: work is put on one stream, the one that was current for the device as the call
began. MPI knows nothing of streams. So whoever hands memory to it, to be read or to be overwritten,
calls `settle` first, which waits for the stream if anything has been put on it since.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["Device", "DeviceBuffer", "copy", "empty", "stored_as"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# The names that CuPy, like NumPy, has for what combines two arrays.
_COMBINE = {
    "SUM": "add", "MEAN": "add", "MIN": "minimum", "MAX": "maximum", "PRODUCT": "multiply",
}  # fmt: skip


def stored_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype as which a device keeps elements: the bits, for floats of 16."""
    half = dtype == _BFLOAT16 or dtype == np.float16
    return np.dtype(np.uint16) if half else dtype


class Device:
    """A CUDA device for the time of one call.

    Attributes:
        cupy: the module.
        context: CuPy's device; work is done inside of `with`.
        stream: on which everything is put, current when the call began.
    """

    def __init__(self, cupy: Any, context: Any) -> None:
        self.cupy = cupy
        self.context = context
        with context:
            self.stream = cupy.cuda.get_current_stream()
        self._pending = True  # what the caller has put there

    def put(self) -> None:
        """Note that there is something on the stream."""
        self._pending = True

    def settle(self) -> None:
        """Wait for everything on the stream."""
        if self._pending:
            self.stream.synchronize()
            self._pending = False


class DeviceBuffer:
    """Contiguous elements on a device.

    Args:
        device: where.
        view: CuPy's array of them, shape (n,), of the dtype `stored_as(dtype)`.
        dtype: what the elements mean.
    """

    __slots__ = ("device", "dtype", "size", "view")

    def __init__(self, device: Device, view: Any, dtype: np.dtype[Any]) -> None:
        self.device = device
        self.view = view
        self.dtype = dtype
        self.size = int(view.size)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Where the elements begin, on the device."""
        return int(self.view.data.ptr)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes, for MPI; they are settled, so that there is no stream to wait for."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __getitem__(self, part: slice) -> DeviceBuffer:
        return DeviceBuffer(self.device, self.view[part], self.dtype)

    def settle(self) -> None:
        """Wait until nothing on the device reads or writes the memory; before MPI does."""
        self.device.settle()

    def empty(self, count: int, dtype: np.dtype[Any] | None = None) -> DeviceBuffer:
        """Return new memory on the same device, of the same dtype unless one is given."""
        dtype = self.dtype if dtype is None else dtype
        with self.device.context:
            view = self.device.cupy.empty(count, stored_as(dtype))
        self.device.put()  # the pool may give memory that earlier work still uses
        return DeviceBuffer(self.device, view, dtype)

    def copy_from(self, source: DeviceBuffer) -> None:
        """Copy elements of the same dtype."""
        with self.device.context:
            self.view[...] = source.view
        self.device.put()

    def combine(self, op: str, other: DeviceBuffer) -> None:
        """Combine with another buffer's elements, in place; not for floats of 16 bits."""
        with self.device.context:
            getattr(self.device.cupy, _COMBINE[op])(self.view, other.view, out=self.view)
        self.device.put()

    def divide(self, divisor: int) -> None:
        """Divide in place."""
        with self.device.context:
            self.device.cupy.true_divide(self.view, divisor, out=self.view)
        self.device.put()


def empty(count: int, like: Any) -> Any:
    """Return new memory for `count` elements, of the dtype and in the memory of a buffer."""
    if isinstance(like, DeviceBuffer):
        return like.empty(count)
    return np.empty(count, like.dtype)


def copy(into: Any, source: Any) -> None:
    """Copy a buffer's elements into another one of the same length, dtype and memory."""
    if isinstance(into, DeviceBuffer):
        into.copy_from(source)
    else:
        np.copyto(into, source)
