"""Array operations for any library: NumPy on the host, array-api-compat elsewhere."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from collectives import extend

__all__ = [
    "COMPUTE",
    "astype",
    "device_context",
    "on_same_device",
    "byte_views",
    "copy",
    "dtype_name",
    "to_host",
    "full",
    "host",
    "in_memory_order",
    "is_array",
    "to_device_of",
    "on_several_devices",
    "overwrite",
    "device_key",
    "put",
    "shards",
    "take",
    "arithmetic_dtype",
]

COMPUTE = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
}
"""dtype of a variable -> dtype of its slots and of the arithmetic."""

# Bytes of a device array that are copied to the host at a time: enough to reach the bus bandwidth.
_SLICE_BYTES = 64 << 20

_CPU, _CPU_PINNED = 1, 3  # DLPack's device types whose memory the processor reads

# One lock for all arrays: creating shards is short, and a lock per array would need a registry.
_taking_apart = threading.Lock()


def is_array(thing: Any) -> bool:
    """Return whether an object is an array of any library."""
    return hasattr(thing, "shape") and hasattr(thing, "dtype")


def on_several_devices(array: Any) -> bool:
    """Return whether an object is a JAX array on several devices, sharded or replicated."""
    # Checks the type, because the attribute of the array would create its shards.
    return hasattr(type(array), "addressable_shards") and len(array.devices()) > 1


def shards(array: Any) -> Sequence[Any]:
    """Return the shards of a JAX array on this process's devices.

    Call this before any other access to the shards. If several threads create the shards at once,
    each adds all of them to the array, which then has too many (seen with JAX 0.10).
    """
    with _taking_apart:
        return array.addressable_shards  # type: ignore[no-any-return]


def host(array: Any) -> npt.NDArray[Any] | None:
    """Return a NumPy view of an array; None if it is on a device."""
    if isinstance(array, (np.ndarray, np.generic)):
        return np.asarray(array)
    if on_several_devices(array):
        # All shards are on devices of one platform.
        there = shards(array)[0].device.platform == "cpu"
        return np.asarray(array) if there else None
    device = getattr(array, "__dlpack_device__", None)
    # DLPack's device tuple: type first, then the number of the device.
    if device is None or device()[0] not in (_CPU, _CPU_PINNED):
        return None
    # NumPy reads JAX arrays on the CPU without a copy.
    if not hasattr(array, "detach"):
        return np.asarray(array)
    return extend.elements_of(array)  # of PyTorch


def in_memory_order(array: Any) -> Any:
    """Return a one-dimensional view of a dense array, in memory order."""
    # A transposed or channels-last tensor: `reshape` would copy it, in another order.
    if hasattr(array, "as_strided") and not array.is_contiguous():
        return array.as_strided((array.numel(),), (1,))
    return array.reshape(-1)


def to_host(array: Any) -> npt.NDArray[Any]:
    """Return an array in host memory, as a view if possible."""
    found = host(array)
    if found is None and hasattr(array, "__cuda_array_interface__") and hasattr(array, "get"):
        # CuPy copies on the current device of the thread, which may be another one.
        with device_context(array):
            found = array.get()  # CuPy
    if found is None:
        found = host(array_api_compat.to_device(array, "cpu"))
    assert found is not None
    return np.asarray(found)


def byte_views(array: Any) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the memory of an array of any library, in the order of its elements.

    Yields:
        arrays of shape (n,) in host memory, as views if the array is there.

    Raises:
        TypeError: its elements are objects.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        # Through PyTorch's views, because NumPy lacks some of its dtypes.
        dense = array.detach()
        parts = [dense]
        if dense.is_sparse:
            dense = dense.coalesce()
            parts = [dense.indices(), dense.values()]
        for part in parts:
            # Conjugate and negative views are flags in PyTorch; their memory is not yet changed.
            whole = part.resolve_conj().resolve_neg().contiguous().reshape(-1)
            for piece in whole.view(torch.uint8).split(_SLICE_BYTES) if len(whole) else ():
                yield piece.cpu().numpy()
    elif hasattr(array, "get") and hasattr(array, "__cuda_array_interface__"):  # CuPy
        flat = array_api_compat.array_namespace(array).ascontiguousarray(array).reshape(-1)
        step = max(1, _SLICE_BYTES // flat.itemsize)
        for start in range(0, flat.size, step):
            yield flat[start : start + step].get().view(np.uint8)
    else:
        whole = np.ascontiguousarray(array).reshape(-1)
        if whole.dtype.hasobject:
            raise TypeError(f"expected numbers, got an array of {whole.dtype}")
        yield whole.view(np.uint8)


def device_context(array: Any) -> AbstractContextManager[Any]:
    """Return a context in which this thread computes on an array's device; only CuPy needs one."""
    if hasattr(type(array), "__cuda_array_interface__") and hasattr(array, "get"):
        return array.device  # type: ignore[no-any-return]
    return nullcontext()


def device_key(array: Any) -> tuple[Any, Any]:
    """Return the library and the device of an array, equal for arrays that can be combined."""
    return array_api_compat.array_namespace(array), array_api_compat.device(array)


def dtype_name(array: Any) -> str:
    """Return the name of an array's dtype, the same for all libraries."""
    return _name(array.dtype)


# Cached, because steps convert the dtype of each gradient to text.
@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def astype(array: Any, name: str) -> Any:
    """Return an array converted to a dtype, or itself; overflow gives infinity."""
    if isinstance(array, (np.ndarray, np.generic)):
        with np.errstate(over="ignore"):
            # `asarray` turns scalars of NumPy into arrays, which callers index.
            return np.asarray(array).astype(name, copy=False)
    if dtype_name(array) == name:
        return array
    xp = array_api_compat.array_namespace(array)
    return xp.astype(array, getattr(xp, name))


def arithmetic_dtype(array: Any) -> Any:
    """Return an array in the dtype of its arithmetic: float32 for 16-bit floats, else itself."""
    name = dtype_name(array)
    return astype(array, COMPUTE.get(name, name))


def full(like: Any, number: float, name: str) -> Any:
    """Return a new array filled with a number, with the shape and device of `like`."""
    if isinstance(like, np.ndarray):
        # `zeros` gets cleared pages from the system, without touching them.
        return np.full(like.shape, number, name) if number else np.zeros(like.shape, name)
    xp, device = device_key(like)
    return xp.full(tuple(like.shape), number, dtype=getattr(xp, name), device=device)


def on_same_device(like: Any, array: Any) -> Any:
    """Return an array on the device of `like`: itself, or a copy of a host array."""
    if isinstance(like, np.ndarray) or not isinstance(array, np.ndarray):
        return array
    xp, device = device_key(like)
    if array_api_compat.is_jax_array(like):  # JAX may keep reading the memory
        array = array.copy()
    return xp.asarray(array, device=device)


def to_device_of(like: Any, array: Any) -> Any:
    """Return an array on the device of `like`, an array of its library; itself if it is there.

    A host array is copied to the device of `like`. A device array stays if `like` is a NumPy array.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return on_same_device(like, np.asarray(array))
    if isinstance(like, np.ndarray):
        return array
    xp, there = device_key(like)
    if there is None or array_api_compat.device(array) == there:
        return array
    if array_api_compat.is_jax_array(array):
        return array.to_device(there)
    # The new memory belongs to the current device in CuPy.
    with device_context(like):
        return xp.asarray(array, device=there)


def overwrite(array: Any, values: Any) -> Any:
    """Overwrite an array and return it; return the values if it is immutable."""
    if array_api_compat.is_jax_array(array):
        return values
    with device_context(array):
        array[...] = values
    return array


def copy(array: Any) -> Any:
    """Return a copy on the same device."""
    if isinstance(array, np.ndarray):
        return array.copy()
    return array_api_compat.array_namespace(array).asarray(array, copy=True)


def take(array: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Return a copy of some rows."""
    if isinstance(array, np.ndarray):
        return array.take(rows, axis=0)
    xp, device = device_key(array)
    return xp.take(array, xp.asarray(rows, device=device), axis=0)


def put(array: Any, rows: npt.NDArray[np.int64], values: Any) -> Any:
    """Overwrite some rows, each given once; return the array, or a new JAX array."""
    if isinstance(array, np.ndarray):
        array[rows] = values
        return array
    if array_api_compat.is_jax_array(array):
        return array.at[rows].set(values)
    xp, device = device_key(array)
    array[xp.asarray(rows, device=device)] = values
    return array
