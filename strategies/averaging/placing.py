"""Gradients of any library, written to their places in buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from strategies import arrays

__all__ = ["host", "put"]

Array = npt.NDArray[Any]


def host(gradient: Any, view: Array) -> Array:
    """See a gradient in host memory, in the dtype of its place."""
    return arrays.fetched(gradient).astype(view.dtype, casting="same_kind", copy=False)


def put(view: Any, gradient: Any, scale: float) -> None:
    """Write `scale * gradient` into its place, an array of NumPy or a tensor; None counts as 0."""
    if gradient is None:
        view[...] = 0
    elif isinstance(view, np.ndarray):
        np.multiply(host(gradient, view), scale, out=view, casting="same_kind")
    else:
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())
        if scale != 1:
            view.mul_(scale)
