"""Wire format of multi-frame messages: one header, followed by the long frames.

::

    head   [ magic | n | length 0 .. length n-1 | short frame | short frame | ... ]
    then   [ long frame ] [ long frame ]

Sender and receiver derive from the lengths which frames are short.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.core.errors import CollectiveError

__all__ = ["decode", "encode"]

_MAGIC = 0x51C0
_PREFIX = struct.Struct("<HxxI")  # magic, number of frames
_MOST_FRAMES = 1 << 16
_MOST_BYTES = 1 << 36

# Frames up to this length are copied into the header, because a copy costs less than a message.
# Their offsets are multiples of 16 bytes, so that arrays can view them.
_SHORT = 1 << 15
_HEAD = 1 << 18
_ALIGN = 16


def encode(frames: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Return the header and the long frames of a message.

    Args:
        frames: arrays of shape (n,), uint8.

    Raises:
        ValueError: too many frames, or too many bytes.
    """
    # The limits bound what a damaged header can make a receiver allocate.
    if len(frames) > _MOST_FRAMES or sum(frame.size for frame in frames) > _MOST_BYTES:
        raise ValueError(
            f"send: a message is too long, expected at most {_MOST_FRAMES} frames and "
            f"{_MOST_BYTES} bytes, got {len(frames)} and {sum(frame.size for frame in frames)}"
        )
    lengths = [frame.size for frame in frames]
    # Both sides compute the same places from the lengths.
    places = list(_offsets(lengths))
    ends = [at + n for at, n in zip(places, lengths, strict=True) if at is not None]
    start = _PREFIX.size + 8 * len(frames)
    head = np.empty(max([start, *ends]), np.uint8)
    _PREFIX.pack_into(head.data, 0, _MAGIC, len(frames))
    head[_PREFIX.size : start] = np.array(lengths, np.uint64).view(np.uint8)
    for frame, at in zip(frames, places, strict=True):
        if at is not None:
            head[at : at + frame.size] = frame
    return head, [frame for frame, at in zip(frames, places, strict=True) if at is None]


def decode(head: Array, source: int) -> list[tuple[int, int | None]]:
    """Return for each frame its length, and its offset in the header or None.

    Raises:
        CollectiveError: the data is not a header; nothing was allocated.
    """
    magic, count = _PREFIX.unpack_from(head.data) if head.size >= _PREFIX.size else (0, 0)
    start = _PREFIX.size + 8 * count
    good = magic == _MAGIC and count <= _MOST_FRAMES and start <= head.size
    lengths = head[_PREFIX.size : start].view(np.uint64).tolist() if good else []
    places = list(_offsets(lengths))
    ends = [at + n for at, n in zip(places, lengths, strict=True) if at is not None]
    # The last short frame ends the header, so its size is a check of all lengths.
    if not good or sum(lengths) > _MOST_BYTES or max([start, *ends]) != head.size:
        raise CollectiveError(
            f"channel: what rank {source} sent is not a message ({head.size} bytes, it begins with "
            f"{head[:16].tobytes().hex()})"
        )
    return list(zip(lengths, places, strict=True))


def _offsets(lengths: Sequence[int]) -> Iterator[int | None]:
    """Yield the offset of each frame in the header; None for a long frame."""
    end = _PREFIX.size + 8 * len(lengths)
    for length in lengths:
        # A dtype of 16 bytes can then be viewed without a copy.
        start = -(-end // _ALIGN) * _ALIGN
        if length <= _SHORT and start + length <= _HEAD:
            end = start + length
            yield start
        elif length:
            yield None
        else:
            # An empty frame has no message of its own.
            yield end
