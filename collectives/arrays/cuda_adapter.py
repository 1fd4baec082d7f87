"""CUDA device memory of any library, accessed through CuPy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.arrays.adapter import ArrayAdapter, DeviceArray, overlap_reason
from collectives.arrays.device import Device, DeviceBuffer, stored_as

__all__ = ["device_memory", "has_cupy", "load_cupy", "nccl"]


def device_memory(view: Any, cupy: Any, read_only: bool) -> ArrayAdapter:
    """Return the adapter of CUDA device memory, given as a CuPy array."""
    return _DeviceMemory(view, cupy, read_only)


class _DeviceMemory(ArrayAdapter):
    """CUDA device memory, as a CuPy array."""

    private = pinnable = True

    def __init__(self, view: Any, cupy: Any, read_only: bool) -> None:
        self._cupy = cupy
        self._view = view
        self.shape = view.shape
        self.dtype = np.dtype(view.dtype)
        self._read_only = read_only

    def why_constant(self) -> str | None:
        if self._read_only:
            return "it is read-only"
        return overlap_reason(self.shape, self._view.strides, self.dtype.itemsize)

    def elements(self) -> npt.NDArray[Any]:
        # Pinned, because copies from pageable memory pass through a buffer of the driver.
        host = self.pinned(self._view.nbytes).view(self.dtype).reshape(self.shape)
        self.fetch(host)
        return host

    def pinned(self, nbytes: int) -> npt.NDArray[Any]:
        with self._view.device:
            # At least one byte: CUDA rejects empty allocations.
            pinned = self._cupy.cuda.alloc_pinned_memory(max(1, nbytes))
        return np.frombuffer(pinned, np.uint8)[:nbytes]

    def fetch(self, into: npt.NDArray[Any]) -> None:
        with self._view.device:
            self._view.get(out=into)  # waits for the current stream

    def wrap(self, result: npt.NDArray[Any]) -> Any:
        # On the device of the argument, whatever device is current.
        with self._view.device:
            array = self._cupy.asarray(result)
            self._wait()
        return array

    def write(self, result: npt.NDArray[Any]) -> None:
        with self._view.device:
            if self._view.flags.c_contiguous:
                self._view.set(result)
            else:
                self._view[...] = self._cupy.asarray(result)
            self._wait()

    def resident(self) -> DeviceArray:
        device = Device(self._cupy, self._view.device)
        kind = stored_as(self.dtype)
        with self._view.device:
            # A copy only if the strides require one.
            flat = self._cupy.ascontiguousarray(self._view)

        def show(array: Any) -> DeviceBuffer:
            return DeviceBuffer(device, array.reshape(-1).view(kind), self.dtype)

        def new(shape: tuple[int, ...]) -> tuple[Any, DeviceBuffer]:
            with self._view.device:
                array = self._cupy.empty(shape, self.dtype)
            device.put()  # the pool may return memory that earlier work still uses
            return array, show(array)

        # Viewed as the caller's dtype: the buffer may hold bits.
        def as_array(buffer: DeviceBuffer, shape: tuple[int, ...]) -> Any:
            return buffer.view.view(self.dtype).reshape(shape)

        def write(buffer: DeviceBuffer) -> None:
            # Equal addresses: the kernel has written the array itself.
            if buffer.address != self._view.data.ptr:
                with self._view.device:
                    self._view[...] = as_array(buffer, self.shape)
                buffer.device.put()

        is_own = bool(flat.data.ptr == self._view.data.ptr)
        return DeviceArray(self.shape, self.dtype, show(flat), is_own, new, write, as_array)

    def _wait(self) -> None:
        # The device reads pinned memory after the call that started the copy. CuPy's pool would
        # reuse that memory as soon as the last array on it is gone.
        self._cupy.cuda.get_current_stream().synchronize()


@functools.cache
def has_cupy() -> bool:
    """Return whether CuPy is usable; PyTorch tensors do not need CuPy."""
    # Cached, because the search for a device takes long, and its result does not change.
    try:
        load_cupy()
    except TypeError:
        return False
    return True


def load_cupy() -> Any:
    """Import CuPy, and check for a device: without one, every allocation would fail."""
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            "device memory is reached through CuPy, which is not installed: "
            "`pip install cupy-cuda12x`, or `cupy-cuda13x` for CUDA 13"
        ) from error
    if not cupy.cuda.is_available():
        raise TypeError("device memory is reached through CuPy, which finds no CUDA device")
    return cupy


def nccl() -> Any:
    """Import CuPy's NCCL bindings, which may be an unavailable stub; None if they are missing."""
    # CuPy builds without NCCL lack the module.
    try:
        from cupy.cuda import nccl as library
    except ImportError:
        return None
    return library
