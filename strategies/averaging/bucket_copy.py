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
    """Return a gradient in host memory, in the dtype of its place."""
    # "same_kind" rejects complex to real, where values would be lost without an error.
    return array_ops.to_host(gradient).astype(view.dtype, casting="same_kind", copy=False)


def host_views(gradients: Sequence[Any], views: Sequence[Any], scale: float) -> list[Any] | None:
    """Return gradients as views for NumPy to copy into buckets; None to copy them with PyTorch.

    PyTorch copies tensors of a device, and 16-bit tensors that must be scaled, because it is faster
    there. It also returns None if all gradients are already in their places. For places on a device
    it returns the gradients themselves: one kernel copies all of a bucket.
    """
    # By the class, because the property of an instance builds its description in each call.
    if any(
        hasattr(type(view), "__cuda_array_interface__") and not getattr(view, "is_cpu", False)
        for view in views
    ):
        # Without autograd history.
        plain = [g.detach() if hasattr(g, "detach") else g for g in gradients]
        return [
            g if g is None else array_ops.astype(g, array_ops.dtype_name(view))
            for g, view in zip(plain, views, strict=True)
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
    # With None the caller copies nothing.
    return None if idle else seen


def copy_into(view: Any, gradient: Any, scale: float) -> None:
    """Write `scale * gradient` into its place, a NumPy array or a tensor; None counts as 0."""
    # The place still holds the result of the last step.
    if gradient is None:
        view[...] = 0
    elif isinstance(view, np.ndarray):
        np.multiply(host_view(gradient, view), scale, out=view, casting="same_kind")
    else:
        # A backward hook may have written the gradient to its place already.
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())
        if scale != 1:
            view.mul_(scale)
