"""Tensors of PyTorch, seen as arrays whose elements lie in order in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Array", "has_arithmetic", "lend", "plain", "shown"]

Array = npt.NDArray[Any]

# What NumPy does not have, or PyTorch does not show to it -> what is shown instead, and as what it
# is read. Numbers of 8 bits are moved, and have no arithmetic here.
_SHOWN_AS = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.complex32: (torch.int32, np.dtype(np.uint32)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(np.uint8)),
    torch.float8_e4m3fnuz: (torch.uint8, np.dtype(np.uint8)),
    torch.float8_e5m2: (torch.uint8, np.dtype(np.uint8)),
    torch.float8_e5m2fnuz: (torch.uint8, np.dtype(np.uint8)),
}


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Tell whether numbers of this dtype can be added, and not only moved."""
    return dtype is torch.bfloat16 or dtype not in _SHOWN_AS


def shown(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor on the host as an array of its shape."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    known = _SHOWN_AS.get(tensor.dtype)
    if known is None:
        array: Array = tensor.numpy()
        return array
    stored, dtype = known
    return np.asarray(tensor.view(stored).numpy().view(dtype))


def plain(tensor: torch.Tensor) -> Array | None:
    """Return the memory of a tensor as an array where that takes no more than to ask for it.

    So it is for nearly all tensors that are reduced: 1 us, where `lend` takes 4.
    """
    if tensor.requires_grad or tensor.dtype in _SHOWN_AS:
        return None
    try:
        return tensor.numpy() if tensor.is_contiguous() else None
    except (RuntimeError, TypeError):  # sparse, on a device, conjugate, ...
        return None


def lend(tensor: torch.Tensor) -> tuple[Array, Callable[[], Any] | None]:
    """Return a tensor's elements as an array, and what writes them back where it is a copy.

    Args:
        tensor: on the host or on a device, of any strides.
    """
    own = tensor.detach()
    if own.is_cpu and own.is_contiguous() and not (own.is_conj() or own.is_neg()):
        return shown(own), None
    copy = own.resolve_conj().resolve_neg().to("cpu").contiguous()
    if copy.data_ptr() == own.data_ptr():
        copy = copy.clone()
    return shown(copy), lambda: own.copy_(copy)
