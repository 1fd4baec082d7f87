"""How an array from one rank to another is announced, and travels along if it is short.

::

    head     [ magic | kind | dimensions | dtype | tag | shape | elements, if short ]
    payload  [ elements ]
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.arrays.host import Array
from collectives.errors import CollectiveError
from collectives.transport.waiting import Ranks

__all__ = ["ARRAY", "OBJECT", "SHORT", "Envelope", "Head", "read", "write"]

_MAGIC = 0xA11B
_FIELDS = struct.Struct("<HBBxxxx16sq")  # magic, kind, number of dimensions, name of dtype, tag

# What the elements are; in the head its number.
ARRAY, OBJECT = "an array", "an object"
_KINDS = (ARRAY, OBJECT)

# Elements up to so many bytes travel in the head: their copies cost less than a message of its own.
# With the head no more than what every MPI sends without asking first (`compare.LETTER_BYTES`): who
# looks whether a head has come takes it at once, and must not wait for its sender.
SHORT = 3 << 10


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


class Head(NamedTuple):
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


def write(array: Array, flat: Array, tag: int, kind: str) -> Array:
    """Return the head of an array, whose elements are these bytes; with them if they are short."""
    start = _FIELDS.size + 8 * array.ndim
    short = flat.size <= SHORT
    head = np.empty(start + flat.size * short, np.uint8)
    name = _name(array.dtype)
    _FIELDS.pack_into(head.data, 0, _MAGIC, _KINDS.index(kind), array.ndim, name, tag)
    struct.pack_into(f"<{array.ndim}q", head.data, _FIELDS.size, *array.shape)
    if short:
        head[start:] = flat
    return head


def read(head: npt.NDArray[np.uint8], source: int, ranks: Ranks) -> Head:
    """Read a head that a rank has sent.

    Raises:
        CollectiveError: this is not a head; nothing has been allocated by then.
    """
    magic = kind = ndim = tag = 0
    name = b""
    if head.size >= _FIELDS.size:
        magic, kind, ndim, name, tag = _FIELDS.unpack_from(head.data)
    start = _FIELDS.size + 8 * ndim
    if magic != _MAGIC or kind >= len(_KINDS) or start > head.size:
        raise CollectiveError(
            f"recv: what {ranks.name([source])} sent is not an array, it begins with "
            f"{head[:16].tobytes().hex()} ({ranks.where})"
        )
    shape = struct.unpack_from(f"<{ndim}q", head.data, _FIELDS.size)
    dtype = _dtype(name)
    nbytes = math.prod(shape) * dtype.itemsize
    elements = head[start:] if nbytes <= SHORT else None
    return Head(Envelope(source, tag, shape, dtype), _KINDS[kind], nbytes, elements)


@functools.cache  # NumPy takes microseconds for either
def _name(dtype: np.dtype[Any]) -> bytes:
    return str(dtype.name).encode()


@functools.cache
def _dtype(name: bytes) -> np.dtype[Any]:
    return np.dtype(name.rstrip(b"\0").decode())
