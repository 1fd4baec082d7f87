"""Arrays of other libraries: how their elements come to host memory, and how results go back.

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
whole; `resident` shows large arrays to operations that work where they are, or in slices
(`collectives.operations.on_devices`).
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.arrays.device import BFLOAT16, Device, DeviceBuffer, stored_as

__all__ = ["Foreign", "Resident", "foreign", "nccl", "resident"]

# DLPack's numbers of device types: CPU, pinned by CUDA, pinned by ROCm; and CUDA's own memory.
_DLPACK_HOST = (1, 3, 11)
_DLPACK_CUDA = (2, 13)


class Resident(NamedTuple):
    """An array in the memory of a CUDA device.

    Attributes:
        shape, dtype: as of NumPy arrays.
        buffer: its elements in order: its own memory, or a copy where its strides need one.
        is_own: whether it is its own memory.
        new: makes an array of its kind, on its device, and returns it with its memory.
        write: makes the elements of a buffer the array's; complete when the buffer is settled.
        show: sees the memory of a buffer as an array of its kind, of a shape.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    buffer: DeviceBuffer
    is_own: bool
    new: Callable[[], tuple[Any, DeviceBuffer]]
    write: Callable[[DeviceBuffer], None]
    show: Callable[[DeviceBuffer, tuple[int, ...]], Any]


class Foreign(ABC):
    """An array of another library.

    Attributes:
        shape: as the array says.
        dtype: as NumPy names it.
        shared: what is written into `elements` is written into the array.
        private: `elements` is memory of its own, free for any use. Some kinds say neither.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shared: bool = False
    private: bool = False

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

    def resident(self) -> Resident | None:
        """Show an array on a CUDA device where it is; None for others."""
        return None


def resident(x: object, least: int) -> tuple[Foreign, Resident] | None:
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
    memory = foreign(x)
    if memory is None:
        return None
    shown = memory.resident()
    return None if shown is None or shown.buffer.nbytes < least else (memory, shown)


def foreign(x: object) -> Foreign | None:
    """Recognise an array of another library; None for what NumPy reads itself.

    Raises:
        TypeError: the array is in memory that is out of reach here; says what would help.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(type(x), "__torch_function__"):
        return _Tensor(x, torch)
    interface = getattr(x, "__cuda_array_interface__", None)
    standard = hasattr(x, "__array_namespace__")
    if interface is not None and not (standard and interface["data"][1]):
        cupy = _cupy()
        return _DeviceMemory(cupy.asarray(x), cupy, bool(interface["data"][1]))
    if standard:
        return _Standard(x)
    if hasattr(x, "__dlpack_device__"):
        return _exported(x)
    return None


class _Tensor(Foreign):
    """A tensor of PyTorch, without its history: results have no gradient."""

    def __init__(self, x: Any, torch: Any) -> None:
        self._torch = torch
        self._x = x
        self.shape = tuple(x.shape)
        self.dtype = _tensor_dtype(x.dtype)
        # A tensor that is conjugated or negated when it is read has other bits in memory.
        self.shared = x.is_cpu and not (x.is_conj() or x.is_neg())
        self.private = not self.shared

    def why_constant(self) -> str | None:
        return _why_repeated(self.shape, self._x.stride())

    def elements(self) -> npt.NDArray[Any]:
        if not self._x.is_cuda:
            return _tensor_elements(self._x, self._torch)
        # Not asynchronous: returns when the stream that is current here has done the copy.
        pinned = self._torch.empty(self.shape, dtype=self._x.dtype, pin_memory=True)
        return _tensor_elements(pinned.copy_(self._x.detach()), self._torch)

    def wrap(self, result: npt.NDArray[Any]) -> Any:
        if result.dtype == BFLOAT16:
            bits = self._torch.from_numpy(result.view(np.int16))
            return bits.view(self._torch.bfloat16).to(self._x.device)
        return self._torch.from_numpy(result).to(self._x.device)

    def write(self, result: npt.NDArray[Any]) -> None:
        if self.shared:
            # Lets autograd refuse a backward pass that needs the old elements.
            self._torch.autograd.graph.increment_version(self._x)
        else:
            self._x.detach().copy_(self.wrap(result))

    def resident(self) -> Resident | None:
        if not self._x.is_cuda or not _has_cupy():
            return None
        x = self._x.detach().resolve_conj().resolve_neg()
        flat = x.contiguous()
        stream = self._torch.cuda.current_stream(x.device)
        stream.synchronize()
        cupy = _cupy()

        def show(tensor: Any) -> DeviceBuffer:
            raw = cupy.asarray(tensor.reshape(-1).view(self._torch.uint8))
            view = raw.view(stored_as(self.dtype))
            return DeviceBuffer(Device(cupy, view.device), view, self.dtype)

        def new() -> tuple[Any, DeviceBuffer]:
            array = self._torch.empty_like(flat)
            stream.synchronize()  # PyTorch's pool may give memory that earlier work still uses
            return array, show(array)

        def as_tensor(buffer: DeviceBuffer, shape: tuple[int, ...]) -> Any:
            raw = self._torch.as_tensor(buffer, device=self._x.device)
            return raw.view(self._x.dtype).reshape(shape)

        def write(buffer: DeviceBuffer) -> None:
            buffer.settle()
            if buffer.address != self._x.data_ptr():
                self._x.detach().copy_(as_tensor(buffer, self.shape))
                stream.synchronize()
            self._torch.autograd.graph.increment_version(self._x)

        is_own = bool(flat.data_ptr() == self._x.data_ptr())
        return Resident(self.shape, self.dtype, show(flat), is_own, new, write, as_tensor)


def _tensor_elements(tensor: Any, torch: Any) -> npt.NDArray[Any]:
    """View a tensor as NumPy array; what is lazy in it, or on another device, is copied."""
    array: npt.NDArray[Any]
    if tensor.dtype == torch.bfloat16:  # which PyTorch cannot show to NumPy
        array = tensor.detach().view(torch.int16).numpy(force=True).view(BFLOAT16)
    else:
        array = tensor.numpy(force=True)
    return array


@functools.cache
def _tensor_dtype(dtype: Any) -> np.dtype[Any]:
    torch: Any = sys.modules["torch"]
    return _tensor_elements(torch.empty(0, dtype=dtype), torch).dtype


class _DeviceMemory(Foreign):
    """Memory of a CUDA device, as CuPy sees it."""

    private = True

    def __init__(self, view: Any, cupy: Any, read_only: bool) -> None:
        self._cupy = cupy
        self._view = view
        self.shape = view.shape
        self.dtype = np.dtype(view.dtype)
        self._read_only = read_only

    def why_constant(self) -> str | None:
        if self._read_only:
            return "it is read-only"
        return _why_repeated(self.shape, self._view.strides)

    def elements(self) -> npt.NDArray[Any]:
        with self._view.device:
            pinned = self._cupy.cuda.alloc_pinned_memory(max(1, self._view.nbytes))
            host: npt.NDArray[Any] = np.ndarray(self.shape, self.dtype, buffer=pinned)
            self._view.get(out=host)  # waits for the current stream
        return host

    def wrap(self, result: npt.NDArray[Any]) -> Any:
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

    def resident(self) -> Resident:
        device = Device(self._cupy, self._view.device)
        kind = stored_as(self.dtype)
        with self._view.device:
            flat = self._cupy.ascontiguousarray(self._view)

        def show(array: Any) -> DeviceBuffer:
            return DeviceBuffer(device, array.reshape(-1).view(kind), self.dtype)

        def new() -> tuple[Any, DeviceBuffer]:
            with self._view.device:
                array = self._cupy.empty(self.shape, self.dtype)
            device.put()  # the pool may give memory that earlier work still uses
            return array, show(array)

        def as_array(buffer: DeviceBuffer, shape: tuple[int, ...]) -> Any:
            return buffer.view.view(self.dtype).reshape(shape)

        def write(buffer: DeviceBuffer) -> None:
            if buffer.address != self._view.data.ptr:
                with self._view.device:
                    self._view[...] = as_array(buffer, self.shape)
                buffer.device.put()

        is_own = bool(flat.data.ptr == self._view.data.ptr)
        return Resident(self.shape, self.dtype, show(flat), is_own, new, write, as_array)

    def _wait(self) -> None:
        # Pinned memory is read by the device after the call that started the copy; CuPy's pool
        # would give it to someone else as soon as the last array on it is gone.
        self._cupy.cuda.get_current_stream().synchronize()


class _Standard(Foreign):
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


class _Exported(Foreign):
    """Host memory that a library exports by DLPack without saying how to make such an array."""

    shared = True

    def __init__(self, x: Any) -> None:
        self._host: npt.NDArray[Any] = np.from_dlpack(x)
        self.shape = self._host.shape
        self.dtype = self._host.dtype

    def why_constant(self) -> str | None:
        if not self._host.flags.writeable:
            return f"NumPy {np.__version__} sees it as read-only"  # as all, before 2.0
        return _why_repeated(self.shape, self._host.strides)

    def elements(self) -> npt.NDArray[Any]:
        return self._host

    def wrap(self, result: npt.NDArray[Any]) -> Any:
        return result

    def write(self, result: npt.NDArray[Any]) -> None:
        pass


def _exported(x: Any) -> Foreign:
    kind = int(x.__dlpack_device__()[0])
    if kind in _DLPACK_HOST:
        return _Exported(x)
    if kind in _DLPACK_CUDA:
        cupy = _cupy()
        return _DeviceMemory(cupy.from_dlpack(x), cupy, read_only=False)
    raise TypeError(
        f"its memory is on a device that cannot be reached from here (DLPack device type {kind})"
    )


def _why_repeated(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    pairs = zip(shape, strides, strict=True)
    if 0 not in shape and any(n > 1 and stride == 0 for n, stride in pairs):
        return "several of its elements are the same memory"
    return None


@functools.cache
def _has_cupy() -> bool:
    """Tell whether CuPy can be used; PyTorch's tensors do without it."""
    try:
        _cupy()
    except TypeError:
        return False
    return True


def _cupy() -> Any:
    """Import CuPy, which can be imported without a device, but then fails at every allocation."""
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
    """Import CuPy's NCCL, which may be a stub that is not `available`; None where there is none."""
    try:
        from cupy.cuda import nccl as library
    except ImportError:
        return None
    return library
