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
    """Whether this is an array of another library than NumPy."""
    if isinstance(value, (np.ndarray, np.generic)) or not array_ops.is_array(value):
        return False
    return bool(array_api_compat.is_array_api_obj(value))


def is_whole(value: Any) -> bool:
    """Whether the numbers are integers."""
    return array_ops.dtype_name(value).startswith(("bool", "int", "uint"))


def numpy_dtype(array: Any) -> np.dtype[Any]:
    """Return NumPy's dtype of the same numbers."""
    return array.dtype if isinstance(array, np.ndarray) else np.dtype(array_ops.dtype_name(array))


def detached(array: Any) -> Any:
    """Return a tensor of PyTorch out of sight of its differentiation, other arrays as they are."""
    return array.detach() if hasattr(array, "detach") else array


def copied(value: Any, dtype: Any) -> Any:
    """Return a copy in the library of the value, NumPy's for numbers; of a dtype if not None."""
    if not is_foreign(value):
        return np.array(value, dtype=dtype)
    array = detached(value)
    if dtype is not None:
        name = str(dtype) if str(dtype).startswith("torch.") else np.dtype(dtype).name
        array = array_ops.astype(array, name.removeprefix("torch."))
    return array if array_api_compat.is_jax_array(array) else array_ops.copy(array)


def differentiated(component: Any, initial_value: Any) -> Any:
    """Let PyTorch differentiate by a tensor, if it does so by the initial value."""
    if getattr(initial_value, "requires_grad", False) and hasattr(component, "requires_grad_"):
        return component.requires_grad_()
    return component


def view(component: Any) -> Any:
    """Return a shared array as one replica sees it; None for JAX's, which are replaced."""
    if isinstance(component, np.ndarray):
        shown = component.view()
        shown.flags.writeable = False
        return shown
    if array_api_compat.is_jax_array(component) or not hasattr(component, "detach"):
        return None
    return component.detach().requires_grad_(component.requires_grad)


def increased(array: Any, delta: Any) -> Any:
    """Add to an array where it is; JAX's is replaced."""
    if array_api_compat.is_jax_array(array):
        return array + delta
    with array_ops.device_context(array):
        array[...] += delta
    return array
