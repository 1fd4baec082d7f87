"""How a message of several frames is written into one letter and the parcels that follow it.

::

    letter   [ magic | n | length 0 .. length n-1 | short frame | short frame | ... ]
    parcels  [ long frame ] [ long frame ]

Which frames are short follows from the lengths, on both sides alike.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from collectives.arrays.host import Array
from collectives.errors import CollectiveError

__all__ = ["read", "write"]

_MAGIC = 0x51C0
_START = struct.Struct("<HxxI")  # magic, number of frames
_MOST_FRAMES = 1 << 16
_MOST_BYTES = 1 << 36

# A frame up to this length is copied into the letter: up to here a copy costs less than a message
# of its own. Frames in a letter begin at multiples of 16 bytes, so that they can be seen as arrays.
_SHORT = 1 << 15
_LETTER = 1 << 18
_ALIGN = 16


def write(frames: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Return the letter and the parcels of a message.

    Args:
        frames: shape (n,), uint8, each.

    Raises:
        ValueError: too many frames, or too many bytes.
    """
    if len(frames) > _MOST_FRAMES or sum(frame.size for frame in frames) > _MOST_BYTES:
        raise ValueError(
            f"send: a message is too long, expected at most {_MOST_FRAMES} frames and "
            f"{_MOST_BYTES} bytes, got {len(frames)} and {sum(frame.size for frame in frames)}"
        )
    lengths = [frame.size for frame in frames]
    places = list(_places(lengths))
    ends = [at + n for at, n in zip(places, lengths, strict=True) if at is not None]
    head = _START.size + 8 * len(frames)
    letter = np.empty(max([head, *ends]), np.uint8)
    _START.pack_into(letter.data, 0, _MAGIC, len(frames))
    letter[_START.size : head] = np.array(lengths, np.uint64).view(np.uint8)
    for frame, at in zip(frames, places, strict=True):
        if at is not None:
            letter[at : at + frame.size] = frame
    return letter, [frame for frame, at in zip(frames, places, strict=True) if at is None]


def read(letter: Array, source: int) -> list[tuple[int, int | None]]:
    """Return length, and place in the letter if it has one, of each frame of a message.

    Raises:
        CollectiveError: this is no letter; nothing has been allocated by then.
    """
    magic, count = _START.unpack_from(letter.data) if letter.size >= _START.size else (0, 0)
    head = _START.size + 8 * count
    good = magic == _MAGIC and count <= _MOST_FRAMES and head <= letter.size
    lengths = letter[_START.size : head].view(np.uint64).tolist() if good else []
    places = list(_places(lengths))
    ends = [at + n for at, n in zip(places, lengths, strict=True) if at is not None]
    if not good or sum(lengths) > _MOST_BYTES or max([head, *ends]) != letter.size:
        raise CollectiveError(
            f"channel: what rank {source} sent is no message ({letter.size} bytes, it begins with "
            f"{letter[:16].tobytes().hex()})"
        )
    return list(zip(lengths, places, strict=True))


def _places(lengths: Sequence[int]) -> Iterator[int | None]:
    """Yield where in the letter each frame begins; None for a parcel."""
    end = _START.size + 8 * len(lengths)
    for length in lengths:
        start = -(-end // _ALIGN) * _ALIGN
        if length <= _SHORT and start + length <= _LETTER:
            end = start + length
            yield start
        elif length:
            yield None
        else:
            yield end
