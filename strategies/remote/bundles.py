"""Many arrays as few frames of a message: the small ones side by side in the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.errors import DataLossError, InvalidArgumentError
from strategies.remote.wire import Array, dtype_named

__all__ = ["Layout", "name_of_dtype", "pack", "unpack"]

Layout = list[Any]
"""Per array [dtype, shape]."""

# Arrays up to this length are copied: a frame of its own costs a message, and 1,000 of them 1,000.
_SMALL = 1 << 15
_ALIGN = 16


def pack(arrays: Sequence[Array]) -> tuple[Layout, list[Array]]:
    """Return a description and the frames; long contiguous arrays are not copied.

    Raises:
        InvalidArgumentError: an array has no numeric dtype.
    """
    layout: Layout = []
    small: list[Array] = []
    large: list[Array] = []
    for array in arrays:
        layout.append([name_of_dtype(array), list(array.shape)])
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        (small if raw.size <= _SMALL else large).append(raw)
    bucket = np.empty(sum(_padded(raw.size) for raw in small), np.uint8)
    at = 0
    for raw in small:
        bucket[at : at + raw.size] = raw
        at += _padded(raw.size)
    return layout, [bucket, *large]


def unpack(layout: Layout, frames: Sequence[Any]) -> list[Array]:
    """Return the arrays, which share the memory of the frames.

    Raises:
        DataLossError: layout and frames do not fit each other.
    """
    try:
        bucket, *large = frames
        rest = iter(large)
        at = 0
        arrays = []
        for name, shape in layout:
            dtype = dtype_named(name)
            # As Python's integers, which do not overflow.
            length = dtype.itemsize
            for size in shape:
                if type(size) is not int or size < 0:
                    raise ValueError(f"shape {shape!r:.80}")
                length *= size
            if length <= _SMALL:
                raw = bucket[at : at + length]
                at += _padded(length)
            else:
                raw = next(rest)
            if raw.size != length:
                raise ValueError(f"{raw.size} bytes for {name} of shape {shape!r:.80}")
            arrays.append(raw.view(dtype).reshape(shape))
    except (ValueError, TypeError, StopIteration) as error:
        raise DataLossError(f"message: the arrays cannot be read: {error!r:.200}") from error
    return arrays


def _padded(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def name_of_dtype(array: Array) -> str:
    """Return the name of an array's dtype.

    Raises:
        InvalidArgumentError: it cannot be sent.
    """
    name: str = array.dtype.name
    try:
        known = dtype_named(name) == array.dtype
    except TypeError:
        known = False
    if not known:
        raise InvalidArgumentError(
            f"message: an array has a dtype that cannot be sent, expected a numeric one in this "
            f"machine's byte order, got {array.dtype}"
        )
    return name
