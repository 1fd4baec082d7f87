"""Adapter lookup: host memory for arrays of other libraries, and results in the same kind.

A kind is known by the protocol that it speaks, never by a class name, and no library is imported
that the caller's array does not come from:

| kind | known by | elements | a result becomes |
| --- | --- | --- | --- |
| PyTorch | `__torch_function__` | CPU: shared; else copied | a tensor on the same device |
| CuPy, Numba, RMM | `__cuda_array_interface__`, or DLPack | copied | a CuPy array, same device |
| JAX, array API | `__array_namespace__` | CPU: shared; else copied | as theirs, same device (1) |
| anything else | `__dlpack__`, host memory | shared | a NumPy array |

(1) Where JAX has split an array among several devices, a result of its shape is split likewise; one
of another shape, which such a split may not fit, is on the default device.

JAX also shows the CUDA interface, but as read-only memory: it goes by its own namespace, so that
its arrays need no CuPy.

Order of streams: elements are copied to the host on the stream that is current for the array's
device when the operation is called, which is then waited for once; where another library says that
it works on a stream of its own, CuPy waits for that one first. A result is complete on the device
when the operation returns. The host memory of CUDA arrays is pinned. What is copied so is copied
whole; `device_array` shows large arrays to operations that work where they are, or in slices
(`collectives.devices.staged`).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.arrays.adapter import ArrayAdapter, DeviceArray, overlap_reason
from collectives.arrays.cuda_adapter import device_memory, load_cupy
from collectives.arrays.torch_adapter import tensor

__all__ = ["adapter_for", "device_array"]

# DLPack's numbers of device types: CPU, pinned by CUDA, pinned by ROCm; and CUDA's own memory.
_DLPACK_HOST = (1, 3, 11)
_DLPACK_CUDA = (2, 13)


def device_array(x: object, least: int) -> tuple[ArrayAdapter, DeviceArray] | None:
    """Show an array of at least `least` bytes on a CUDA device where it is; None for others.

    What it was computed by, on its library's current stream, comes before what is done with it.
    """
    kind = type(x)
    if kind is np.ndarray or not hasattr(kind, "__cuda_array_interface__"):
        return None
    if getattr(x, "is_cpu", False) or getattr(x, "nbytes", least) < least:
        return None
    if not hasattr(kind, "__torch_function__"):  # which raises where a tensor has a gradient
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is None or (interface["data"][1] and hasattr(x, "__array_namespace__")):
            return None
    memory = adapter_for(x)
    if memory is None:
        return None
    shown = memory.resident()
    return None if shown is None or shown.buffer.nbytes < least else (memory, shown)


def adapter_for(x: object) -> ArrayAdapter | None:
    """Recognise an array of another library; None for what NumPy reads itself.

    Raises:
        TypeError: the array is in memory that is out of reach here; says what would help.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(type(x), "__torch_function__"):
        return tensor(x, torch)
    interface = getattr(x, "__cuda_array_interface__", None)
    standard = hasattr(x, "__array_namespace__")
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
        self._host: npt.NDArray[Any] = np.asarray(x)
        self.shape = self._host.shape
        self.dtype = self._host.dtype

    def why_constant(self) -> str | None:
        return None if self._host.flags.writeable else "arrays of this kind are immutable"

    def elements(self) -> npt.NDArray[Any]:
        return self._host

    def wrap(self, result: npt.NDArray[Any]) -> Any:
        # JAX compiles anew for an array that is bound to a device where there was an unbound one.
        bound = getattr(self._x, "committed", True)
        device = self._x.device if bound else None
        # An array on several devices names how its shape is shared among them as its device.
        if result.shape != self.shape and not getattr(device, "is_fully_replicated", True):
            device = None
        return self._x.__array_namespace__().asarray(result, device=device)

    def write(self, result: npt.NDArray[Any]) -> None:
        self._x[...] = self.wrap(result)


class _DlpackAdapter(ArrayAdapter):
    """Host memory that a library exports by DLPack without saying how to make such an array."""

    shared = True

    def __init__(self, x: Any) -> None:
        self._host: npt.NDArray[Any] = np.from_dlpack(x)
        self.shape = self._host.shape
        self.dtype = self._host.dtype

    def why_constant(self) -> str | None:
        if not self._host.flags.writeable:
            return f"NumPy {np.__version__} sees it as read-only"  # as all, before 2.0
        return overlap_reason(self.shape, self._host.strides)

    def elements(self) -> npt.NDArray[Any]:
        return self._host

    def wrap(self, result: npt.NDArray[Any]) -> Any:
        return result

    def write(self, result: npt.NDArray[Any]) -> None:
        pass


def _export(x: Any) -> ArrayAdapter:
    kind = int(x.__dlpack_device__()[0])
    if kind in _DLPACK_HOST:
        return _DlpackAdapter(x)
    if kind in _DLPACK_CUDA:
        cupy = load_cupy()
        return device_memory(cupy.from_dlpack(x), cupy, read_only=False)
    raise TypeError(
        f"its memory is on a device that cannot be reached from here (DLPack device type {kind})"
    )
