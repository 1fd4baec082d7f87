"""Copies of gradients of any library into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.core import array_ops

__all__ = ["host_view", "host_views", "copy_into"]

Array = npt.NDArray[Any]


def host_view(gradient: Any, view: Array) -> Array:
    """See a gradient in host memory, in the dtype of its place."""
    return array_ops.to_host(gradient).astype(view.dtype, casting="same_kind", copy=False)


def host_views(gradients: Sequence[Any], views: Sequence[Any], scale: float) -> list[Any] | None:
    """See gradients in host memory, if NumPy brings all of them to their places as fast as any.

    Not tensors of a device, nor those of 16 bits that are to be scaled, which PyTorch does better;
    nor if all of them are in their places, with nothing to do. For places on a device they are as
    they are: one kernel brings all of a bucket there.
    """
    if any(_is_on_device(view) for view in views):
        return [
            g if g is None else array_ops.astype(_constant(g), array_ops.dtype_name(view))
            for g, view in zip(gradients, views, strict=True)
        ]
    seen: list[Any] = []
    idle = scale == 1
    for gradient, view in zip(gradients, views, strict=True):
        if gradient is None:
            seen.append(None)
            idle = False
        elif isinstance(view, np.ndarray):
            seen.append(host_view(gradient, view))
            idle = False
        else:
            memory = array_ops.host(gradient)
            if memory is None or (scale != 1 and memory.itemsize == 2):
                return None
            seen.append(memory)
            idle = idle and gradient.data_ptr() == view.data_ptr()
    return None if idle else seen


def _is_on_device(view: Any) -> bool:
    shows = hasattr(type(view), "__cuda_array_interface__")
    return shows and not getattr(view, "is_cpu", False)


def _constant(gradient: Any) -> Any:
    """See a tensor without its history."""
    return gradient.detach() if hasattr(gradient, "detach") else gradient


def copy_into(view: Any, gradient: Any, scale: float) -> None:
    """Write `scale * gradient` into its place, an array of NumPy or a tensor; None counts as 0."""
    if gradient is None:
        view[...] = 0
    elif isinstance(view, np.ndarray):
        np.multiply(host_view(gradient, view), scale, out=view, casting="same_kind")
    else:
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())
        if scale != 1:
            view.mul_(scale)
