"""Header of a point-to-point message; short arrays travel with it.

::

    head     [ magic | kind | dimensions | dtype | tag | shape | long dtype | elements, if short ]
    payload  [ elements ]

A dtype longer than its field, such as a structured one, follows the shape.
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

# What the elements are; in the head its number.
ARRAY, OBJECT = "an array", "an object"
_KINDS = (ARRAY, OBJECT)

# Elements, and a long dtype, up to so many bytes travel in the head: their copies cost less than a
# message of its own. With the head no more than what every MPI sends without asking first
# (`signature_check.MESSAGE_BYTES`): a rank that finds a head takes it at once, and must not wait
# for its sender.
_SHORT = 3 << 10


class Envelope(NamedTuple):
    """What is known of an array that a rank has sent, beside its elements.

    Attributes:
        source: who has sent it.
        tag: the number that it was sent with.
        shape: of the array.
        dtype: of the array.
    """

    source: int
    tag: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class Header(NamedTuple):
    """What has come of an array.

    Attributes:
        envelope: what is known of it.
        kind: `ARRAY`, or `OBJECT` for the pickle of one.
        nbytes: of its elements.
        elements: as bytes; None if they are a message of their own.
    """

    envelope: Envelope
    kind: str
    nbytes: int
    elements: Array | None


def is_short(array: Array, *, operation: str) -> bool:
    """Tell whether an array's elements travel in its head.

    Raises:
        TypeError: the description of its dtype does not fit into a head.
    """
    long_bytes = len(_texts(array.dtype)[1])
    if long_bytes > _SHORT:
        raise TypeError(
            f"{operation}: the description of a structured dtype is too long, expected at most "
            f"{_SHORT} bytes, got {long_bytes}; send_object takes any object"
        )
    return array.nbytes + long_bytes <= _SHORT


def write(array: Array, flat: Array, tag: int, kind: str) -> Array:
    """Return the head of an array, whose elements are these bytes; with them if they are short."""
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
    """Read a head that a rank has sent.

    Raises:
        CollectiveError: this is not a head; nothing has been allocated by then.
    """
    magic = kind = ndim = long_bytes = tag = 0
    name = b""
    if head.size >= _FIELDS.size:
        magic, kind, ndim, long_bytes, name, tag = _FIELDS.unpack_from(head.data)
    start = _FIELDS.size + 8 * ndim + long_bytes
    if magic != _MAGIC or kind >= len(_KINDS) or start > head.size:
        raise CollectiveError(
            f"recv: what {ranks.name([source])} sent is not an array, it begins with "
            f"{head[:16].tobytes().hex()} ({ranks.where})"
        )
    shape = struct.unpack_from(f"<{ndim}q", head.data, _FIELDS.size)
    if long_bytes:
        name = head[start - long_bytes : start].tobytes()
    dtype = _dtype(name)
    nbytes = math.prod(shape) * dtype.itemsize
    elements = head[start:] if nbytes + long_bytes <= _SHORT else None
    return Header(Envelope(source, tag, shape, dtype), _KINDS[kind], nbytes, elements)


@functools.lru_cache(256)  # NumPy takes microseconds in either direction
def _texts(dtype: np.dtype[Any]) -> tuple[bytes, bytes]:
    """Return the text of a dtype: in its field of the head, or after the shape; one is empty."""
    text = dtypes.spelled(dtype).encode()
    return (text, b"") if len(text) <= _SHORT_DTYPE else (b"", text)


@functools.lru_cache(256)
def _dtype(text: bytes) -> np.dtype[Any]:
    return dtypes.named(text.rstrip(b"\0").decode())
