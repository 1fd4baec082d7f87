"""Arrays of 0 rows in the library, the dtype and on the kind of device of others.

A rank that has run out of rows takes part in a step with none, in code that expects tensors of
PyTorch on a GPU, say. Where it has a batch it cuts the rows off. Where it never had one, another
rank describes its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np

from strategies import arrays

__all__ = ["Form", "form_of", "like"]

_LIBRARIES: dict[str, Callable[[Any], bool]] = {
    "torch": array_api_compat.is_torch_array,
    "cupy": array_api_compat.is_cupy_array,
    "jax": array_api_compat.is_jax_array,
}


@dataclass(frozen=True)
class Form:
    """What another rank needs to make an array of 0 rows.

    Attributes:
        library: of `_LIBRARIES`, or "numpy".
        dtype: its name there; of NumPy the dtype itself.
        shape: without the rows.
        device: "cpu", "cuda", ...; which one of these is for the rank to choose.
    """

    library: str
    dtype: Any
    shape: tuple[int, ...]
    device: str

    def make(self) -> Any:
        """Return such an array.

        Raises:
            RuntimeError: this process has no such library, or no such device.
        """
        try:
            return self._made((0, *self.shape))
        except Exception as error:
            raise RuntimeError(
                f"in_step: this rank has had no batch and cannot make one of 0 rows, expected "
                f"{self.dtype} of {self.library} on {self.device}, as others have: {error}"
            ) from error

    def _made(self, shape: tuple[int, ...]) -> Any:
        if self.library == "torch":
            torch = importlib.import_module("torch")
            return torch.empty(shape, dtype=getattr(torch, self.dtype), device=self.device)
        if self.library == "cupy":
            return importlib.import_module("cupy").empty(shape, self.dtype)
        if self.library == "jax":
            jax = importlib.import_module("jax")
            device = jax.local_devices(backend=self.device)[0]
            return jax.device_put(np.empty(shape, self.dtype), device)
        return np.empty(shape, self.dtype)


def like(leaf: Any) -> Any:
    """Return 0 rows of an array, where it is; of other sequences as a NumPy array.

    Raises:
        ValueError: it has no rows.
    """
    array = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    if not array.shape:
        raise ValueError(f"in_step: expected arrays of shape (n, ...), got {leaf!r:.40}")
    return array[:0]


def form_of(array: Any) -> Form:
    """Describe an array for ranks that have none."""
    shape = tuple(array.shape[1:])
    for library, belongs in _LIBRARIES.items():
        if belongs(array):
            return Form(library, arrays.dtype_name(array), shape, _device(array, library))
    return Form("numpy", np.asarray(array).dtype, shape, "cpu")


def _device(array: Any, library: str) -> str:
    """Return the kind of an array's device, as its library calls it."""
    if library == "torch":
        return str(array.device.type)
    return "cuda" if library == "cupy" else str(next(iter(array.devices())).platform)
