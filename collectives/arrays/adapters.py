"""Adapter lookup: host memory for arrays of other libraries, and results in the same kind.

An array is recognized by its protocol, never by a class name. A lookup imports no library that the
caller's array does not use:

| kind | protocol | elements | result |
| --- | --- | --- | --- |
| PyTorch | `__torch_function__` | CPU: shared; else copied | a tensor on the same device |
| CuPy, Numba, RMM | `__cuda_array_interface__`, or DLPack | copied | a CuPy array, same device |
| JAX, array API | `__array_namespace__` | CPU: shared; else copied | same library and device (1) |
| other | `__dlpack__`, host memory | shared | a NumPy array |

(1) If JAX has sharded an array over several devices, a result of the same shape has the same
sharding. A result of another shape is on the default device, because the sharding may not fit.

JAX also exposes the CUDA interface, but as read-only memory. Its arrays use the JAX namespace
instead, so they need no CuPy.

Stream order: elements are copied to the host on the stream that is current for the array's device
at the call, and the call waits for that stream once. If another library exports its own stream,
CuPy first waits for that stream. A result is complete on the device when the operation returns. The
host memory of CUDA arrays is pinned. These copies are of whole arrays; `device_array` exposes large
arrays to operations that work in place or in slices (`collectives.devices.staged`).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.arrays.adapter import ArrayAdapter, DeviceArray, overlap_reason
from collectives.arrays.cuda_adapter import device_memory, load_cupy
from collectives.arrays.torch_adapter import tensor

__all__ = ["FOREIGN_ERRORS", "adapter_for", "device_array"]

# Errors of other libraries that cannot export an array.
FOREIGN_ERRORS = (
    AttributeError, BufferError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip

# DLPack device types: CPU, pinned by CUDA, pinned by ROCm; CUDA device memory and managed memory.
_DLPACK_HOST = (1, 3, 11)
_DLPACK_CUDA = (2, 13)


def device_array(x: object, least: int) -> tuple[ArrayAdapter, DeviceArray] | None:
    """Return an array of at least `least` bytes on a CUDA device, with its adapter; else None.

    Later work on the array is ordered after the work on its library's current stream.
    """
    kind = type(x)
    # By the type: on an instance of torch the property raises for CPU tensors.
    if kind is np.ndarray or not hasattr(kind, "__cuda_array_interface__"):
        return None
    # `is_cpu` answers for torch without a device call; `nbytes` avoids an adapter for small arrays.
    if getattr(x, "is_cpu", False) or getattr(x, "nbytes", least) < least:
        return None
    if not hasattr(kind, "__torch_function__"):  # torch raises if a tensor requires a gradient
        interface = getattr(x, "__cuda_array_interface__", None)
        # Read-only with an array namespace: JAX, which the module explains.
        if interface is None or (interface["data"][1] and hasattr(x, "__array_namespace__")):
            return None
    memory = adapter_for(x)
    if memory is None:
        return None
    shown = memory.resident()
    return None if shown is None or shown.buffer.nbytes < least else (memory, shown)


def adapter_for(x: object) -> ArrayAdapter | None:
    """Return the adapter of an array of another library; None if NumPy reads the array itself.

    Raises:
        TypeError: the memory of the array is not accessible; the text names a remedy.
    """
    # If torch is not imported, the array cannot be one of its tensors.
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(type(x), "__torch_function__"):
        return tensor(x, torch)
    interface = getattr(x, "__cuda_array_interface__", None)
    standard = hasattr(x, "__array_namespace__")
    # JAX exposes device memory as read-only, and must not be written behind its back.
    if interface is not None and not (standard and interface["data"][1]):
        cupy = load_cupy()
        return device_memory(cupy.asarray(x), cupy, bool(interface["data"][1]))
    if standard:
        return _ArrayApiAdapter(x)
    if hasattr(x, "__dlpack_device__"):
        return _export(x)
    return None


class _ArrayApiAdapter(ArrayAdapter):
    """An array of a library that follows the array API standard, such as JAX."""

    def __init__(self, x: Any) -> None:
        self._x = x
        # JAX shares host memory with NumPy, and copies from a device.
        self._host: npt.NDArray[Any] = np.asarray(x)
        self.shape = self._host.shape
        self.dtype = self._host.dtype

    def why_constant(self) -> str | None:
        return None if self._host.flags.writeable else "arrays of this kind are immutable"

    def elements(self) -> npt.NDArray[Any]:
        return self._host

    def wrap(self, result: npt.NDArray[Any]) -> Any:
        # JAX recompiles functions if an uncommitted array becomes committed to a device.
        bound = getattr(self._x, "committed", True)
        # `device=None` leaves the array uncommitted, as the argument was.
        device = self._x.device if bound else None
        # The `device` of a sharded array is its sharding.
        if result.shape != self.shape and not getattr(device, "is_fully_replicated", True):
            device = None
        return self._x.__array_namespace__().asarray(result, device=device)

    def write(self, result: npt.NDArray[Any]) -> None:
        self._x[...] = self.wrap(result)


class _DlpackAdapter(ArrayAdapter):
    """Host memory exported by DLPack, from a library without a constructor for results."""

    shared = True

    def __init__(self, x: Any) -> None:
        self._host: npt.NDArray[Any] = np.from_dlpack(x)
        self.shape = self._host.shape
        self.dtype = self._host.dtype

    def why_constant(self) -> str | None:
        if not self._host.flags.writeable:
            return f"NumPy {np.__version__} sees it as read-only"  # before 2.0, all DLPack imports
        return overlap_reason(self.shape, self._host.strides, self.dtype.itemsize)

    def elements(self) -> npt.NDArray[Any]:
        return self._host

    # Without a constructor of the other library, the result is NumPy's.
    def wrap(self, result: npt.NDArray[Any]) -> Any:
        return result

    def write(self, result: npt.NDArray[Any]) -> None:
        # The elements are the library's own memory.
        pass


def _export(x: Any) -> ArrayAdapter:
    kind = int(x.__dlpack_device__()[0])
    if kind in _DLPACK_HOST:
        return _DlpackAdapter(x)
    if kind in _DLPACK_CUDA:
        # DLPack orders the stream of CuPy after the stream of the exporter.
        cupy = load_cupy()
        return device_memory(cupy.from_dlpack(x), cupy, read_only=False)
    raise TypeError(
        f"its memory is on a device that cannot be reached from here (DLPack device type {kind})"
    )
