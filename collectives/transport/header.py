"""Header of a point-to-point message; short arrays travel with it.

::

    header   [ magic | kind | dimensions | dtype | tag | shape | long dtype | elements, if short ]
    payload  [ elements ]
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.arrays import dtypes
from collectives.arrays.host_arrays import Array
from collectives.core.errors import CollectiveError
from collectives.transport.backoff import RankSet

__all__ = ["ARRAY", "OBJECT", "Envelope", "Header", "is_short", "read", "write"]

_MAGIC = 0xA11B
# Magic, kind, number of dimensions, bytes of a long dtype, a short dtype, tag.
_FIELDS = struct.Struct("<HBBI16sq")
_SHORT_DTYPE = 16

# Kinds of elements; a header stores the index.
ARRAY, OBJECT = "an array", "an object"
_KINDS = (ARRAY, OBJECT)

# Elements and a long dtype of up to 3 KiB travel in the header, because copying them costs less
# than a message of their own. With the header they stay within every MPI's eager limit
# (`signature_check.MESSAGE_BYTES`): a rank receives an arrived header at once, and must not wait
# for its sender.
_SHORT = 3 << 10


class Envelope(NamedTuple):
    """Metadata of an array that a rank has sent.

    Attributes:
        source: rank of the sender.
        tag: tag of the message.
        shape: shape of the array.
        dtype: dtype of the array.
    """

    source: int
    tag: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class Header(NamedTuple):
    """A received header.

    Attributes:
        envelope: metadata of the array.
        kind: `ARRAY`, or `OBJECT` for a pickled object.
        nbytes: bytes of the elements.
        elements: the elements, as bytes; None if they follow as a message of their own.
    """

    envelope: Envelope
    kind: str
    nbytes: int
    elements: Array | None


def is_short(array: Array, *, operation: str) -> bool:
    """Return whether an array's elements travel in its header.

    Raises:
        TypeError: the description of its dtype does not fit into a header.
    """
    long_bytes = len(_texts(array.dtype)[1])
    if long_bytes > _SHORT:
        raise TypeError(
            f"{operation}: the description of a structured dtype is too long, expected at most "
            f"{_SHORT} bytes, got {long_bytes}; send_object takes any object"
        )
    return array.nbytes + long_bytes <= _SHORT


def write(array: Array, flat: Array, tag: int, kind: str) -> Array:
    """Return the header of an array with these bytes; it includes them if they are short."""
    name, text = _texts(array.dtype)
    shape_end = _FIELDS.size + 8 * array.ndim
    start = shape_end + len(text)
    short = flat.size + len(text) <= _SHORT
    head = np.empty(start + flat.size * short, np.uint8)
    _FIELDS.pack_into(head.data, 0, _MAGIC, _KINDS.index(kind), array.ndim, len(text), name, tag)
    struct.pack_into(f"<{array.ndim}q", head.data, _FIELDS.size, *array.shape)
    if text:
        head[shape_end:start] = np.frombuffer(text, np.uint8)
    if short:
        head[start:] = flat
    return head


def read(head: npt.NDArray[np.uint8], source: int, ranks: RankSet) -> Header:
    """Parse a header that a rank has sent.

    Raises:
        CollectiveError: the bytes are not a header; raised before anything is allocated.
    """
    # Foreign messages may arrive, so the header is checked before its fields are used.
    magic = kind = ndim = long_bytes = tag = 0
    name = b""
    if head.size >= _FIELDS.size:
        magic, kind, ndim, long_bytes, name, tag = _FIELDS.unpack_from(head.data)
    start = _FIELDS.size + 8 * ndim + long_bytes
    if magic != _MAGIC or kind >= len(_KINDS) or start > head.size:
        raise CollectiveError(
            f"recv: the message of {ranks.name([source])} is not an array, it begins with "
            f"{head[:16].tobytes().hex()} ({ranks.where})"
        )
    shape = struct.unpack_from(f"<{ndim}q", head.data, _FIELDS.size)
    if long_bytes:
        name = head[start - long_bytes : start].tobytes()
    dtype = _dtype(name)
    nbytes = math.prod(shape) * dtype.itemsize
    elements = head[start:] if nbytes + long_bytes <= _SHORT else None
    return Header(Envelope(source, tag, shape, dtype), _KINDS[kind], nbytes, elements)


@functools.lru_cache(256)  # NumPy takes microseconds for each conversion
def _texts(dtype: np.dtype[Any]) -> tuple[bytes, bytes]:
    """Return a dtype's text for the header's field, and for behind the shape; one is empty."""
    text = dtypes.spelled(dtype).encode()
    return (text, b"") if len(text) <= _SHORT_DTYPE else (b"", text)


@functools.lru_cache(256)
def _dtype(text: bytes) -> np.dtype[Any]:
    return dtypes.named(text.rstrip(b"\0").decode())
