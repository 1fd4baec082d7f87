"""One replica's array of a variable, of any library."""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np

from strategies.core import array_ops

__all__ = [
    "copied",
    "detached",
    "differentiated",
    "increased",
    "is_foreign",
    "is_whole",
    "numpy_dtype",
    "view",
]


def is_foreign(value: Any) -> bool:
    """Return whether this is an array of another library than NumPy."""
    # A NumPy scalar is not foreign, although array-api-compat accepts it.
    if isinstance(value, (np.ndarray, np.generic)) or not array_ops.is_array(value):
        return False
    return bool(array_api_compat.is_array_api_obj(value))


def is_whole(value: Any) -> bool:
    """Return whether the dtype is an integer or bool."""
    return array_ops.dtype_name(value).startswith(("bool", "int", "uint"))


def numpy_dtype(array: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of an array of any library."""
    return array.dtype if isinstance(array, np.ndarray) else np.dtype(array_ops.dtype_name(array))


def detached(array: Any) -> Any:
    """Return a tensor without its autograd history; other arrays unchanged."""
    return array.detach() if hasattr(array, "detach") else array


def copied(value: Any, dtype: Any) -> Any:
    """Return a copy in the value's library (NumPy for numbers), converted to `dtype` if set."""
    if not is_foreign(value):
        # `np.array` copies even an array of the right dtype: the caller keeps its own.
        return np.array(value, dtype=dtype)
    array = detached(value)
    if dtype is not None:
        # `np.dtype` does not know PyTorch's dtypes.
        name = str(dtype) if str(dtype).startswith("torch.") else np.dtype(dtype).name
        array = array_ops.astype(array, name.removeprefix("torch."))
    # JAX arrays cannot change, so they need no copy.
    return array if array_api_compat.is_jax_array(array) else array_ops.copy(array)


def differentiated(component: Any, initial_value: Any) -> Any:
    """Make a tensor require gradients if the initial value does."""
    # A parameter is a leaf of autograd, and stays one after the copy.
    if getattr(initial_value, "requires_grad", False) and hasattr(component, "requires_grad_"):
        return component.requires_grad_()
    return component


def view(component: Any) -> Any:
    """Return a replica's view of a shared array; None for JAX arrays, which are replaced."""
    if isinstance(component, np.ndarray):
        shown = component.view()
        # Read-only, because another replica's thread reads the same memory.
        shown.flags.writeable = False
        return shown
    if array_api_compat.is_jax_array(component) or not hasattr(component, "detach"):
        return None
    # A tensor object per replica, because each has its own `.grad`.
    return component.detach().requires_grad_(component.requires_grad)


def increased(array: Any, delta: Any) -> Any:
    """Add to an array in place; JAX arrays are replaced."""
    if array_api_compat.is_jax_array(array):
        return array + delta
    # CuPy computes on the device of the thread, which may be another one.
    with array_ops.device_context(array):
        array[...] += delta
    return array
