"""Arrays, numbers and text as raw frames, and back; nothing that is read can run code.

Values that are numeric arrays travel as they are, one frame each. All others go into one last
frame of msgpack: text, scalars, and arrays of objects, whose elements may in turn be arrays, up to
`DEEPEST` in one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import ml_dtypes
import msgpack
import numpy as np
import numpy.typing as npt

from strategies.errors import DataLossError

__all__ = ["DEEPEST", "Array", "Frame", "Layout", "dtype_named", "pack", "unpack"]

Array: TypeAlias = npt.NDArray[Any]
Frame: TypeAlias = bytes | Array
Layout: TypeAlias = list[Any]
"""Per value [dtype, shape] if it has a frame of its own, None if it is in the last frame."""

_KINDS = "biufcV"  # V: the 16-bit floats of ml_dtypes call themselves void
_DTYPES = {
    np.dtype(code).name: np.dtype(code)
    for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}
_NUMBERS, _OBJECTS = 1, 2  # types of msgpack extensions

DEEPEST = 32
"""Extensions of msgpack in one another, at most. Each costs its reader 40 KiB of a thread's stack,
which ends the process where it ends: seen with 200."""


def pack(values: Sequence[Any]) -> tuple[Layout, list[Frame]]:
    """Describe values and return them as frames.

    Args:
        values: NumPy arrays and scalars, numbers, `str` and `bytes`; arrays of objects may hold
            any of these, in at most `DEEPEST` levels. Contiguous numeric arrays are not copied.

    Raises:
        TypeError: something else, or arrays of objects that are nested more deeply.
    """
    layout: Layout = []
    frames: list[Frame] = []
    others = []
    for value in values:
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            layout.append([_checked(value.dtype).name, list(value.shape)])
            frames.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        else:
            layout.append(None)
            others.append(value)
    if others:
        frames.append(_pack_objects(others, DEEPEST))
    return layout, frames


def unpack(layout: Layout, frames: Sequence[Array]) -> list[Any]:
    """Return the values; arrays share the memory of their frames.

    Args:
        layout: from `pack`.
        frames: shape (n,), uint8, each, beginning at a multiple of 16 bytes.

    Raises:
        DataLossError: layout and frames do not fit each other, or objects are nested too deeply.
    """
    try:
        own = sum(part is not None for part in layout)
        if len(frames) != own + (own < len(layout)):
            raise ValueError(f"{len(layout)} values in {len(frames)} frames")
        remaining = iter(frames)
        arrays = [None if part is None else _array(part, next(remaining)) for part in layout]
        objects = _unpack_objects(frames[-1].data, DEEPEST) if own < len(layout) else []
        if len(objects) != len(layout) - own:
            raise ValueError(f"{len(objects)} objects, expected {len(layout) - own}")
        others = iter(objects)
        return [
            next(others) if part is None else array
            for part, array in zip(layout, arrays, strict=True)
        ]
    except (ValueError, TypeError, KeyError, StopIteration, msgpack.UnpackException) as error:
        raise DataLossError(f"message: the values cannot be read: {error!r:.200}") from error


def _array(part: Any, frame: Array) -> Array:
    name, shape = part
    return frame.view(dtype_named(name)).reshape(_sizes(shape))


def _sizes(shape: Any) -> tuple[int, ...]:
    # A size below 0 would mean "whatever fits" to NumPy.
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape!r:.80}")
    return tuple(shape)


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the numeric dtype of this name, those of ml_dtypes included.

    Raises:
        TypeError: there is none.
    """
    # Not `np.dtype(name)`, which understands a small language.
    if name in _DTYPES:
        return _DTYPES[name]
    found = getattr(ml_dtypes, str(name), None)
    if not isinstance(found, type):
        raise TypeError(f"message: no numeric dtype has this name: {name!r:.80}")
    return _checked(np.dtype(found))


def _checked(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype whose name says all of it."""
    if dtype.kind not in _KINDS or dtype.names is not None or not dtype.isnative:
        raise TypeError(f"message: dtype must be numeric and native, got {dtype}")
    return dtype


def _pack_objects(values: list[Any], levels: int) -> bytes:
    """Write values in which arrays of objects are nested in at most so many levels."""
    extension = partial(_extension, levels=levels)
    try:
        packed: bytes = msgpack.packb(
            values, default=extension, strict_types=True, unicode_errors="surrogatepass"
        )
    except (OverflowError, ValueError) as error:
        raise TypeError(f"message: this cannot be sent: {error}") from error
    return packed


def _unpack_objects(data: Any, levels: int) -> list[Any]:
    extension = partial(_from_extension, levels=levels)
    values = msgpack.unpackb(
        data, ext_hook=extension, unicode_errors="surrogatepass", strict_map_key=True
    )
    if not isinstance(values, list):
        raise ValueError("no list")
    return values


def _extension(value: Any, levels: int) -> msgpack.ExtType:
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype == object:
            if not levels:
                raise TypeError(
                    f"message: arrays of objects are nested too deeply, expected at most {DEEPEST} "
                    f"in one another"
                )
            content = [list(array.shape), array.ravel().tolist()]
            return msgpack.ExtType(_OBJECTS, _pack_objects(content, levels - 1))
        shape = None if isinstance(value, np.generic) else list(array.shape)
        content = [_checked(array.dtype).name, shape, array.tobytes()]
        return msgpack.ExtType(_NUMBERS, msgpack.packb(content))
    raise TypeError(f"message: expected arrays, numbers or text, got {type(value).__name__}")


def _from_extension(code: int, data: bytes, levels: int) -> Any:
    if code == _OBJECTS:
        if not levels:
            raise ValueError(f"arrays of objects in more than {DEEPEST} levels")
        shape, elements = _unpack_objects(data, levels - 1)
        sizes = _sizes(shape)
        if math.prod(sizes) != len(elements):
            raise ValueError(f"{len(elements)} elements for shape {sizes}")
        objects = np.empty(len(elements), object)
        for index, element in enumerate(elements):
            objects[index] = element
        return objects.reshape(sizes)
    if code == _NUMBERS:
        name, shape, raw = msgpack.unpackb(data)
        array = np.frombuffer(raw, dtype_named(name)).copy()
        return array.reshape(())[()] if shape is None else array.reshape(_sizes(shape))
    raise ValueError(f"extension {code}")
