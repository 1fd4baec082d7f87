"""Flat buffers for algorithms: NumPy arrays on the host, `DeviceBuffer` on a device.

An algorithm cuts a buffer into slices, sends and receives them, and combines one with another. The
functions here and in `collectives.arrays.reduction` do the little that differs, so that one
schedule serves both memories. What else an algorithm asks of a buffer (`size`, `itemsize`,
`nbytes`, `dtype`, slices) both kinds answer alike.

Order on a device: work is put on one stream, the one that was current for the device as the call
began. MPI knows nothing of streams. So who hands memory to it, to be read or to be overwritten,
calls `synchronize` first, which waits for the stream if anything has been put on it since.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "BFLOAT16",
    "Device",
    "DeviceBuffer",
    "canonical_nans",
    "combine",
    "copy",
    "divide",
    "empty",
    "is_added",
    "is_half",
    "synchronize",
    "stored_as",
]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_HALVES = (np.dtype(np.float16), BFLOAT16)

# NPY_USERDEF of NumPy's C headers: the first number of a dtype that another package has added.
_FIRST_ADDED_DTYPE = 256


def is_half(dtype: np.dtype[Any]) -> bool:
    """Tell whether elements are floats of 16 bits: float16 or bfloat16."""
    return dtype in _HALVES


def is_added(dtype: np.dtype[Any]) -> bool:
    """Tell whether a package such as `ml_dtypes` has added the dtype to NumPy's."""
    return dtype.num >= _FIRST_ADDED_DTYPE


def stored_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a device stores elements: unsigned bits if CuPy lacks the dtype."""
    is_bits = is_half(dtype) or is_added(dtype)
    return np.dtype(f"u{dtype.itemsize}") if is_bits else dtype


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

    def synchronize(self) -> None:
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

    def synchronize(self) -> None:
        """Wait until nothing on the device reads or writes the memory; before MPI does."""
        self.device.synchronize()

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

    def combine(self, function: str, other: DeviceBuffer) -> None:
        """Combine with another buffer's elements, in place; not for floats of 16 bits."""
        with self.device.context:
            getattr(self.device.cupy, function)(self.view, other.view, out=self.view)
        self.device.put()

    def divide(self, divisor: int) -> None:
        """Divide in place."""
        with self.device.context:
            self.device.cupy.true_divide(self.view, divisor, out=self.view)
        self.device.put()


# The only places where algorithms and messages tell the two kinds of memory apart.


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


def combine(function: str, into: Any, other: Any) -> None:
    """Combine two buffers by a function of NumPy and CuPy, such as "add", into the first."""
    if isinstance(into, DeviceBuffer):
        into.combine(function, other)
    else:
        getattr(np, function)(into, other, out=into)


def canonical_nans(buffer: Any) -> None:
    """Replace every NaN of a buffer in host memory by NumPy's.

    Several ranks compute these elements: `collectives.kernels.combine` has the reason. Buffers on a
    device stay, because the same kernels on all ranks keep the same NaN.
    """
    if not isinstance(buffer, DeviceBuffer) and buffer.dtype.kind in "fc":
        parts = buffer.view(buffer.real.dtype)
        parts[np.isnan(parts)] = np.nan


def divide(buffer: Any, divisor: int) -> None:
    """Divide a buffer's elements in place."""
    if isinstance(buffer, DeviceBuffer):
        buffer.divide(divisor)
    else:
        np.divide(buffer, divisor, out=buffer)


def synchronize(buffer: Any) -> None:
    """Wait until nothing on a device reads or writes the memory; before MPI does."""
    if isinstance(buffer, DeviceBuffer):
        buffer.device.synchronize()
