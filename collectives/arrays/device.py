"""Flat buffers for algorithms: NumPy arrays on the host, `DeviceBuffer` on a device.

An algorithm cuts a buffer into slices, sends and receives them, and reduces one into another. The
functions here and in `collectives.arrays.reduction` hide the differences, so one schedule serves
host and device memory. Both kinds of buffers have `size`, `itemsize`, `nbytes`, `dtype` and slices.

Order on a device: all work is enqueued on one stream, the current stream of the device at the start
of the call. MPI does not know streams. So call `synchronize` before MPI reads or overwrites memory;
it waits for the stream if any work was enqueued since the last call.
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

# NPY_USERDEF of NumPy's C headers: the first number of dtypes added by other packages.
_FIRST_ADDED_DTYPE = 256


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether elements are 16-bit floats: float16 or bfloat16."""
    return dtype in _HALVES


def is_added(dtype: np.dtype[Any]) -> bool:
    """Return whether the dtype was added to NumPy by a package such as `ml_dtypes`."""
    # Numbers of NumPy's own dtypes are smaller.
    return dtype.num >= _FIRST_ADDED_DTYPE


def stored_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a device stores elements: unsigned bits if CuPy lacks the dtype."""
    # CuPy has no bfloat16 and none of `ml_dtypes`; copies need only the width of the elements.
    is_bits = is_half(dtype) or is_added(dtype)
    return np.dtype(f"u{dtype.itemsize}") if is_bits else dtype


class Device:
    """A CUDA device during one call.

    Attributes:
        cupy: the CuPy module.
        context: CuPy's device object, a context manager.
        stream: the stream of all work, current at the start of the call.
    """

    def __init__(self, cupy: Any, context: Any) -> None:
        self.cupy = cupy
        self.context = context
        with context:
            self.stream = cupy.cuda.get_current_stream()
        self._pending = True  # the caller may have enqueued work

    def put(self) -> None:
        """Mark that work was enqueued on the stream."""
        self._pending = True

    def synchronize(self) -> None:
        """Wait for all work on the stream."""
        if self._pending:
            self.stream.synchronize()
            self._pending = False


class DeviceBuffer:
    """Contiguous elements on a device.

    Args:
        device: the device.
        view: CuPy array of the elements, shape (n,), dtype `stored_as(dtype)`.
        dtype: dtype of the elements.
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
        """Device address of the first element."""
        return int(self.view.data.ptr)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes, for MPI; without a stream, because the buffer is synchronized before."""
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
        """Wait until no device work reads or writes the memory; required before MPI does."""
        self.device.synchronize()

    def empty(self, count: int, dtype: np.dtype[Any] | None = None) -> DeviceBuffer:
        """Return new memory on the same device, of the same dtype by default."""
        dtype = self.dtype if dtype is None else dtype
        with self.device.context:
            view = self.device.cupy.empty(count, stored_as(dtype))
        self.device.put()  # the pool may return memory that earlier work still uses
        return DeviceBuffer(self.device, view, dtype)

    def copy_from(self, source: DeviceBuffer) -> None:
        """Copy elements of the same dtype."""
        with self.device.context:
            self.view[...] = source.view
        self.device.put()

    def combine(self, function: str, other: DeviceBuffer) -> None:
        """Reduce another buffer into this one, elementwise; not for 16-bit floats."""
        with self.device.context:
            # By name, because CuPy has NumPy's names.
            getattr(self.device.cupy, function)(self.view, other.view, out=self.view)
        self.device.put()

    def divide(self, divisor: float) -> None:
        """Divide in place."""
        with self.device.context:
            self.device.cupy.true_divide(self.view, divisor, out=self.view)
        self.device.put()


# Only these functions distinguish the two kinds of memory for algorithms and messages.


def empty(count: int, like: Any) -> Any:
    """Return new memory for `count` elements, with the dtype and on the device of `like`."""
    if isinstance(like, DeviceBuffer):
        return like.empty(count)
    return np.empty(count, like.dtype)


def copy(into: Any, source: Any) -> None:
    """Copy a buffer into another buffer of the same length, dtype and memory."""
    if isinstance(into, DeviceBuffer):
        into.copy_from(source)
    else:
        np.copyto(into, source)


def combine(function: str, into: Any, other: Any) -> None:
    """Reduce `other` into `into` with a function of NumPy and CuPy, such as "add"."""
    if isinstance(into, DeviceBuffer):
        into.combine(function, other)
    else:
        getattr(np, function)(into, other, out=into)


def canonical_nans(buffer: Any) -> None:
    """Replace every NaN of a host buffer by NumPy's NaN.

    Several ranks compute these elements; see `collectives.kernels.combine` for the reason. Device
    buffers stay unchanged, because equal kernels on all ranks keep the same NaN.
    """
    if not isinstance(buffer, DeviceBuffer) and buffer.dtype.kind in "fc":
        # Complex numbers as pairs, whose parts may be NaN apart.
        parts = buffer.view(buffer.real.dtype)
        parts[np.isnan(parts)] = np.nan


def divide(buffer: Any, divisor: float) -> None:
    """Divide a buffer's elements in place."""
    if isinstance(buffer, DeviceBuffer):
        buffer.divide(divisor)
    else:
        np.divide(buffer, divisor, out=buffer)


def synchronize(buffer: Any) -> None:
    """Wait until no device work reads or writes the memory; required before MPI does."""
    if isinstance(buffer, DeviceBuffer):
        buffer.device.synchronize()
