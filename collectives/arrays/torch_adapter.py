"""Adapter for PyTorch tensors on the host and on CUDA devices."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from collectives.arrays.adapter import ArrayAdapter, DeviceArray, dense_axes, overlap_reason
from collectives.arrays.cuda_adapter import has_cupy, load_cupy
from collectives.arrays.device import Device, DeviceBuffer, is_added, stored_as

__all__ = ["TensorFunctions", "as_tensor", "elements_of", "tensor", "tensor_functions"]


def tensor(x: Any, torch: Any) -> ArrayAdapter:
    """Return the adapter of a PyTorch tensor."""
    return _Tensor(x, torch)


class _Tensor(ArrayAdapter):
    """A PyTorch tensor, detached from its graph: results have no gradient."""

    def __init__(self, x: Any, torch: Any) -> None:
        self._torch = torch
        self._x = x
        self.shape = tuple(x.shape)
        self.dtype = _tensor_dtype(x.dtype)
        # Lazily conjugated or negated tensors have other bits in memory.
        self.shared = x.is_cpu and not (x.is_conj() or x.is_neg())
        # A lazy or device tensor is copied, so the copy may be overwritten.
        self.private = not self.shared
        self.pinnable = x.is_cuda

    def why_constant(self) -> str | None:
        return overlap_reason(self.shape, self._x.stride())

    def elements(self) -> npt.NDArray[Any]:
        if not self._x.is_cuda:
            return elements_of(self._x)
        nbytes = self._x.numel() * self.dtype.itemsize
        host = self.pinned(nbytes).view(self.dtype).reshape(self.shape)
        self.fetch(host)
        return host

    def pinned(self, nbytes: int) -> npt.NDArray[Any]:
        # `pin_memory` uses PyTorch's cache of pinned blocks.
        pinned = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        host: npt.NDArray[Any] = pinned.numpy()
        return host

    def fetch(self, into: npt.NDArray[Any]) -> None:
        # Synchronous: returns after the current stream has done the copy.
        as_tensor(into).copy_(self._x.detach())

    def wrap(self, result: npt.NDArray[Any]) -> Any:
        # The host result has no other owner, so a CPU tensor shares it.
        made = as_tensor(result).to(self._x.device)
        # The strides of `torch.empty_like`, because optimizers that work on lists of tensors are
        # fast only if a tensor and its gradient have the same strides.
        strided = len(self.shape) > 1 and not self._x.is_contiguous()  # 0.1 us
        if strided and result.shape == self.shape:
            like = self._torch.empty_like(self._x.detach())
            made = made if like.stride() == made.stride() else like.copy_(made)
        return made

    def show(self, memory: npt.NDArray[Any]) -> Any:
        return as_tensor(memory)

    def strides(self) -> tuple[int, ...] | None:
        strides = tuple(self._x.stride())
        return None if dense_axes(self.shape, strides) is None else strides

    def write(self, result: npt.NDArray[Any]) -> None:
        if self.shared:
            # Lets autograd refuse a backward pass that needs the old elements.
            self._torch.autograd.graph.increment_version(self._x)
        else:
            self._x.detach().copy_(as_tensor(result))

    def resident(self) -> DeviceArray | None:
        if not self._x.is_cuda or not has_cupy():
            return None
        # In place of lazy flags, the elements themselves.
        x = self._x.detach().resolve_conj().resolve_neg()
        flat = x.contiguous()
        stream = self._torch.cuda.current_stream(x.device)
        # CuPy may use another stream, so PyTorch's work must be complete.
        stream.synchronize()
        cupy = load_cupy()
        device = Device(cupy, cupy.cuda.Device(x.device.index))

        def show(tensor: Any) -> DeviceBuffer:
            # Same as CuPy's `asarray` in a third of its time: a step converts hundreds of tensors.
            memory = cupy.cuda.UnownedMemory(
                tensor.data_ptr(), tensor.nbytes, tensor, device.context.id
            )
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            view = cupy.ndarray((tensor.numel(),), stored_as(self.dtype), memptr=pointer)
            return DeviceBuffer(device, view, self.dtype)

        def new(shape: tuple[int, ...]) -> tuple[Any, DeviceBuffer]:
            array = self._torch.empty(shape, dtype=x.dtype, device=x.device)
            stream.synchronize()  # PyTorch's pool may return memory that earlier work still uses
            return array, show(array)

        def show_buffer(buffer: DeviceBuffer, shape: tuple[int, ...]) -> Any:
            raw = self._torch.as_tensor(buffer, device=self._x.device)
            return raw.view(self._x.dtype).reshape(shape)

        def write(buffer: DeviceBuffer) -> None:
            buffer.synchronize()
            if buffer.address != self._x.data_ptr():
                self._x.detach().copy_(show_buffer(buffer, self.shape))
                stream.synchronize()
            self._torch.autograd.graph.increment_version(self._x)

        is_own = bool(flat.data_ptr() == self._x.data_ptr())
        return DeviceArray(self.shape, self.dtype, show(flat), is_own, new, write, show_buffer)


def as_tensor(array: npt.NDArray[Any]) -> Any:
    """Return a PyTorch tensor that shares an array's memory.

    PyTorch rejects the dtypes of `ml_dtypes`, such as bfloat16: their bits become a tensor of
    integers, which is viewed with PyTorch's own dtype.
    """
    torch: Any = sys.modules["torch"]
    if is_added(array.dtype):
        bits = torch.from_numpy(array.view(f"i{array.itemsize}"))
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def elements_of(tensor: Any) -> npt.NDArray[Any]:
    """Return a tensor as a NumPy array: a view, or a copy if it is lazy or on another device."""
    array: npt.NDArray[Any]
    added = _added_dtype(tensor.dtype)
    if added is None:
        # `force` detaches, resolves lazy flags, and copies from a device.
        array = tensor.numpy(force=True)
    else:
        torch: Any = sys.modules["torch"]
        bits = getattr(torch, f"int{8 * added.itemsize}")
        array = tensor.detach().view(bits).numpy(force=True).view(added)
    return array


@functools.cache
def _added_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return the dtype of `ml_dtypes` for bfloat16 and float8, which NumPy lacks."""
    name = str(dtype).removeprefix("torch.")
    found = getattr(ml_dtypes, name, None) if name.startswith(("bfloat16", "float8")) else None
    return None if found is None else np.dtype(found)


@functools.cache
def _tensor_dtype(dtype: Any) -> np.dtype[Any]:
    torch: Any = sys.modules["torch"]
    return elements_of(torch.empty(0, dtype=dtype)).dtype


class TensorFunctions(NamedTuple):
    """Functions by which compiled code reads tensors and parameters.

    Attributes:
        tensor: the class.
        parameter: the class of parameters, whose results are tensors.
        describe: address of the C function that fills in a `DLTensor` without taking a reference.
        is_neg, empty_like, new_empty, increment_version: functions of PyTorch.
    """

    tensor: Any
    parameter: Any
    describe: int
    is_neg: Any
    empty_like: Any
    new_empty: Any
    increment_version: Any


# DLPack's `DLPackExchangeAPI`, since 1.2: the major version in the first half of the first word,
# then functions as addresses.
_EXCHANGE_MAJOR, _DESCRIBE = 1, 5


def tensor_functions(x: object) -> TensorFunctions | None:
    """Return the functions for a tensor; None for other objects, and if PyTorch lacks one."""
    torch = sys.modules.get("torch")
    # Absent while PyTorch is being imported.
    kinds = getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None)
    return _tensor_functions(torch) if type(x) in kinds else None


@functools.cache
def _tensor_functions(torch: Any) -> TensorFunctions | None:
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # since PyTorch 2.10
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = pointer(capsule, b"dlpack_exchange_api")
    if ctypes.c_uint32.from_address(table).value != _EXCHANGE_MAJOR:
        return None
    return TensorFunctions(
        torch.Tensor, torch.nn.Parameter,
        ctypes.c_int64.from_address(table + 8 * _DESCRIBE).value,
        torch.Tensor.is_neg, torch.empty_like, torch.Tensor.new_empty,
        torch.autograd.graph.increment_version,
    )  # fmt: skip
