"""Encoding of arrays and structures as raw frames; decoding runs no code.

::

    layout      per array [dtype, shape]; shape is None for a scalar
    frames      [ small arrays, concatenated ] [ long array ] ... [ long array ] [ structure ]

Arrays are sent as raw bytes, each long array in a frame of its own. The structure frame is omitted
if all values are arrays or scalars. Otherwise it contains the list of values in msgpack, where an
index into the layout replaces each array. Values may be text, numbers, None, lists, dicts, tuples,
and arrays of objects of these types. Tuples and arrays of objects nest at most `DEEPEST` levels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import msgpack
import numpy as np
import numpy.typing as npt

from strategies.core import array_ops
from strategies.errors import DataLossError

__all__ = [
    "DEEPEST",
    "Array",
    "Frame",
    "Layout",
    "Packed",
    "dtype_named",
    "is_numeric",
    "pack",
    "unpack",
]

Array: TypeAlias = npt.NDArray[Any]
Frame: TypeAlias = bytes | Array
Layout: TypeAlias = list[Any]
"""Per array [dtype, shape]; the shape is None for a scalar."""

_DTYPES = {
    np.dtype(code).name: np.dtype(code)
    for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}
_TUPLE, _OBJECTS, _ARRAY = 1, 2, 3  # types of msgpack extensions

# Arrays up to this length are copied into one frame, because each frame costs a message.
_SMALL = 1 << 15  # bytes
_ALIGN = 16  # bytes; alignment of the frames

DEEPEST = 32
"""Most nested levels of msgpack extensions. Decoding a level uses 40 KiB of the thread's stack;
200 levels overflowed it and crashed the process."""


class Packed(NamedTuple):
    """Encoded values."""

    layout: Layout
    frames: list[Frame]


def pack(values: Sequence[Any], operation: str = "message") -> Packed:
    """Encode values as layout and frames.

    Args:
        values: numeric arrays of any library in host memory, NumPy scalars, numbers, text, None,
            and tuples, lists, dicts and NumPy arrays of objects of these. Long contiguous arrays
            are not copied.
        operation: prefix of error messages.

    Raises:
        TypeError: a value has another type, or tuples and arrays of objects nest too deeply.
    """
    found = [value for value in values if _travels(value)]
    rest = None
    if len(found) < len(values):
        found = []
        # Collected again by `_pack`, which numbers the arrays in the order in which it visits them.
        rest = _pack(list(values), found, operation, DEEPEST)
    layout: Layout = []
    small: list[Array] = []
    frames: list[Frame] = []
    for value in found:
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        layout.append([_name(value.dtype, operation), shape])
        # A view of a contiguous array, so the caller must not change it until the reply.
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        (small if raw.size <= _SMALL else frames).append(raw)
    # One array needs no copy, and then has no padding either; `_arrays` expects that.
    if small:
        frames.insert(0, small[0] if len(small) == 1 else _side_by_side(small))
    if rest is not None:
        frames.append(rest)
    return Packed(layout, frames)


def unpack(layout: Layout, frames: Sequence[Array]) -> list[Any]:
    """Decode values; arrays share the memory of their frames.

    Args:
        layout: from `pack`.
        frames: uint8 arrays of shape (n,), aligned to 16 bytes.

    Raises:
        DataLossError: layout and frames do not match, or objects nest too deeply.
    """
    try:
        found, rest = _arrays(layout, frames) if layout else ([], frames)
        if not rest:
            return found
        (last,) = rest
        values = _unpack(last.data, found, DEEPEST)
        if not isinstance(values, list):
            raise ValueError("not a list")
        return values
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise DataLossError(f"message: the values cannot be read: {error!r:.200}") from error


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the numeric dtype of a name, including the dtypes of ml_dtypes.

    Raises:
        TypeError: the name is unknown.
    """
    # Not `np.dtype(name)`, which also parses structured dtypes.
    if name in _DTYPES:
        return _DTYPES[name]
    found = getattr(ml_dtypes, str(name), None)
    if not isinstance(found, type):
        raise TypeError(f"message: no numeric dtype has this name: {name!r:.80}")
    dtype = np.dtype(found)
    _name(dtype, "message")
    return dtype


@functools.cache  # NumPy builds the name on every access
def _name(dtype: np.dtype[Any], operation: str) -> str:
    """Return the name of a dtype that its name describes completely."""
    # The layout has no byte order: both sides use the machine's.
    if not is_numeric(dtype) or not dtype.isnative:
        raise TypeError(
            f"{operation}: an array of this dtype cannot be sent, expected a numeric one in this "
            f"machine's byte order, got {dtype}"
        )
    name: str = dtype.name
    return name


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is numeric, including the dtypes of ml_dtypes."""
    kinds = "biufcV"  # V: the kind of ml_dtypes' 16-bit floats is void
    return dtype.kind in kinds and dtype.names is None and not dtype.hasobject


def _travels(value: Any) -> bool:
    """Return whether a value is an array or scalar with an entry in the layout."""
    return isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject


# Arrays.


def _side_by_side(small: Sequence[Array]) -> Array:
    together = np.empty(sum(_pad(raw.size) for raw in small), np.uint8)
    at = 0
    for raw in small:
        together[at : at + raw.size] = raw
        at += _pad(raw.size)
    return together


def _arrays(layout: Layout, frames: Sequence[Array]) -> tuple[list[Any], Sequence[Array]]:
    """Return arrays and scalars, and the remaining frames."""
    described = [(dtype_named(name), shape or (), shape is None) for name, shape in layout]
    lengths = [_product(shape, dtype.itemsize) for dtype, shape, _ in described]
    small = sum(length <= _SMALL for length in lengths)
    # Frame 0 contains all small arrays, if there are any.
    used, at, end = min(small, 1), 0, 0
    found = []
    for (dtype, shape, is_scalar), length in zip(described, lengths, strict=True):
        if length <= _SMALL:
            # One step: slice, view and reshape would take three times as long.
            array = np.ndarray(shape, dtype, frames[0], at)
            end = at + length
            at = _pad(end)
        else:
            # `view` and `reshape` raise if the length is wrong.
            array = frames[used].view(dtype).reshape(shape)
            used += 1
        # Indexing by () turns an array without axes into a NumPy scalar.
        found.append(array[()] if is_scalar else array)
    expected = at if small > 1 else end  # a single array was not copied, so it has no padding
    if small and frames[0].size != expected:
        raise ValueError(f"{frames[0].size} bytes, expected {expected} of small arrays")
    return found, frames[used:]


def _pad(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def _product(sizes: Sequence[Any], unit: int = 1) -> int:
    for size in sizes:  # Python's integers do not overflow
        # NumPy would infer a negative size.
        if type(size) is not int or size < 0:
            raise ValueError(f"shape {sizes!r:.80}")
        unit *= size
    return unit


# Structures, in msgpack.


def _pack(value: Any, found: list[Any], operation: str, levels: int) -> bytes:
    """Encode values with at most `levels` nested extensions."""
    extension = functools.partial(_extension, found=found, operation=operation, levels=levels)
    try:
        # `strict_types` passes tuples to `_extension`; by default msgpack turns them into lists.
        # Surrogates represent bytes of file names that are not UTF-8 (PEP 383).
        packed: bytes = msgpack.packb(
            value, default=extension, strict_types=True, unicode_errors="surrogatepass"
        )
    except (OverflowError, ValueError) as error:
        raise TypeError(f"{operation}: this cannot be sent: {error}") from error
    return packed


def _extension(value: Any, found: list[Any], operation: str, levels: int) -> msgpack.ExtType:
    """Encode a type unknown to msgpack; append arrays to `found` and encode their index."""
    if isinstance(value, complex):
        value = np.complex128(value)
    is_tuple = isinstance(value, tuple)
    if not is_tuple and not isinstance(value, np.generic):
        array = array_ops.host(value) if hasattr(value, "__dlpack_device__") else None
        if array is None:
            raise TypeError(
                f"{operation}: this cannot be sent, expected numbers, text, arrays in host memory, "
                f"and tuples, lists and dicts of them, got {type(value).__name__}"
            )
        value = array
    if not is_tuple and _travels(value):
        found.append(value)
        return msgpack.ExtType(_ARRAY, str(len(found) - 1).encode())
    if not levels:
        raise TypeError(
            f"{operation}: this is nested too deeply, expected at most {DEEPEST} tuples and arrays "
            f"of objects in one another, got more"
        )
    # msgpack has neither tuples nor arrays of objects, so their content is packed on its own.
    content = list(value) if is_tuple else [list(value.shape), value.ravel().tolist()]
    inner = _pack(content, found, operation, levels - 1)
    return msgpack.ExtType(_TUPLE if is_tuple else _OBJECTS, inner)


def _unpack(data: Any, found: Sequence[Any], levels: int) -> Any:
    extension = functools.partial(_from_extension, found=found, levels=levels)
    # Keys of dicts may be numbers, which msgpack rejects by default.
    return msgpack.unpackb(
        data, ext_hook=extension, unicode_errors="surrogatepass", strict_map_key=False
    )


def _from_extension(code: int, data: bytes, found: Sequence[Any], levels: int) -> Any:
    if code == _ARRAY:
        return found[int(data)]
    if code not in (_TUPLE, _OBJECTS):
        raise ValueError(f"extension {code}")
    if not levels:
        raise ValueError(f"more than {DEEPEST} levels of tuples and arrays of objects")
    content = _unpack(data, found, levels - 1)
    if code == _TUPLE:
        return tuple(content)
    shape, elements = content
    if _product(shape) != len(elements):
        raise ValueError(f"{len(elements)} elements for shape {shape}")
    # Filled one by one: `np.array` would turn elements that are lists into further axes.
    objects = np.empty(len(elements), object)
    for index, element in enumerate(elements):
        objects[index] = element
    return objects.reshape(shape)
