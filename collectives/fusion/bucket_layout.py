"""Assignment of arrays to buckets and offsets, as pure integers."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

__all__ = [
    "BucketLayout",
    "ArraySlice",
    "FusedChunk",
    "lay_out",
    "offsets",
    "split_by_bytes",
    "summary",
    "merge_adjacent",
]

# Alignment of arrays in bytes: a cache line, and a multiple of every element size.
ALIGNMENT = 64


class ArraySlice(NamedTuple):
    """Elements of an array: its number, the first element, and the end (exclusive)."""

    array: int
    start: int
    stop: int


class FusedChunk(NamedTuple):
    """Pieces of arrays of one dtype that one call reduces.

    Attributes:
        dtype: dtype of the arrays.
        pieces: the pieces, in memory order.
        first: first byte of the portion in the sequence of all portions.
        nbytes: bytes of the portion.
        whole: whether the portion is one long array, reduced without packing.
    """

    dtype: Any
    pieces: tuple[ArraySlice, ...]
    first: int
    nbytes: int
    whole: bool = False


def lay_out(
    sizes: Sequence[int], dtypes: Sequence[Any], order: Iterable[int], limits: tuple[int, int]
) -> list[tuple[int, ...]]:
    """Group arrays into buckets.

    Each dtype has its own buckets. A bucket is full once it reaches its limit of bytes. Buckets are
    sorted by the readiness of their last array, the order in which they can be reduced.

    Args:
        sizes: bytes of the arrays.
        dtypes: dtypes of the arrays.
        order: indices of all arrays, in the order in which they become ready.
        limits: bytes of the first bucket, and of the later ones.

    Returns:
        The indices of the arrays of each bucket, in the given order.

    Example:
        >>> lay_out([4, 4, 4, 9], ["float32"] * 4, [3, 2, 1, 0], (4, 8))
        [(3,), (2, 1), (0,)]
    """
    # Only the first bucket is small; later ones start while it is being reduced.
    limit = limits[0]
    full: list[tuple[int, tuple[int, ...]]] = []  # when the last array is ready, and all arrays
    filling: dict[Any, tuple[list[int], int]] = {}  # dtype -> arrays, bytes
    when: dict[int, int] = {}
    for at, i in enumerate(order):
        when[i] = at
        # `pop`, so that a full bucket is not filled further.
        members, nbytes = filling.pop(dtypes[i], ([], 0))
        members.append(i)
        nbytes += sizes[i]
        if nbytes < limit:
            filling[dtypes[i]] = members, nbytes
        else:
            full.append((at, tuple(members)))
            limit = limits[1]
    # Buckets below their limit; the last array of one may be ready before that of a full bucket.
    full += [(when[members[-1]], tuple(members)) for members, _ in filling.values()]
    return [members for _, members in sorted(full)]


def offsets(sizes: Sequence[int], order: Iterable[int]) -> tuple[list[int], int]:
    """Place arrays in memory one after the other, in a given order.

    Returns:
        The first byte of each array, and the total number of bytes.

    Example:
        >>> offsets([8, 100], [1, 0])
        ([128, 0], 192)
    """
    starts = [0] * len(sizes)
    at = 0
    for i in order:
        starts[i] = at
        at += _pad(sizes[i])
    return starts, at


def merge_adjacent(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent arrays into memory spans.

    Args:
        parts: first byte and bytes of each array, as placed by `offsets`.

    Returns:
        The first byte and the end (exclusive) of each span, including padding.

    Example:
        >>> merge_adjacent([(128, 8), (0, 100), (256, 4)])
        [(0, 192), (256, 320)]
    """
    joined: list[tuple[int, int]] = []
    for start, size in sorted(parts):
        if not size:
            continue
        # The padding between adjacent arrays is reduced with them: one call per span, not per
        # array.
        stop = start + _pad(size)
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


class BucketLayout:
    """Memory layout of arrays in the order in which their buckets fill: from the last to the first.

    Args:
        sizes: bytes of the arrays.
        dtypes: dtypes of the arrays.
        limits: bytes of the first bucket, and of the later ones.

    Attributes:
        sizes: as above.
        starts: first byte of each array.
        total: bytes of the memory.
    """

    def __init__(
        self, sizes: Sequence[int], dtypes: Sequence[Any], limits: tuple[int, int]
    ) -> None:
        self.sizes = sizes
        self._dtypes, self._limits = dtypes, limits
        # Backward passes produce the gradients of the last layer first, as in PyTorch's DDP.
        last_first = range(len(sizes) - 1, -1, -1)
        # In the order of the buckets, so that a bucket of the first step is one span of memory.
        self.starts, self.total = offsets(
            sizes, [i for group in self.groups(last_first) for i in group]
        )

    def groups(self, order: Iterable[int]) -> list[tuple[int, ...]]:
        """Group the arrays into buckets for an order of readiness, as `lay_out`."""
        return lay_out(self.sizes, self._dtypes, order, self._limits)

    def spans(self, members: Iterable[int]) -> list[tuple[int, int]]:
        """Return the memory spans of the arrays of a bucket, as `merge_adjacent`."""
        return merge_adjacent((self.starts[i], self.sizes[i]) for i in members)


def split_by_bytes(
    counts: Sequence[int], dtypes: Sequence[Any], limit: int, whole: int = sys.maxsize
) -> tuple[list[FusedChunk], list[int], int]:
    """Cut arrays into portions of at most `limit` bytes; each long array is its own portion.

    The arrays of a dtype are adjacent, long arrays first.

    Args:
        counts: elements of the arrays.
        dtypes: NumPy dtypes of the arrays.
        limit: most bytes of a portion of short arrays; a multiple of every element size.
        whole: smallest long array, in bytes.

    Returns:
        The portions, the first byte of each array, and the total number of bytes.

    Example:
        >>> import numpy as np
        >>> (first, second), starts, total = split_by_bytes([3, 2], [np.dtype("int8")] * 2, 4)
        >>> first.pieces
        (ArraySlice(array=0, start=0, stop=3), ArraySlice(array=1, start=0, stop=1))
        >>> second.pieces, second.first, starts
        ((ArraySlice(array=1, start=1, stop=2),), 4, [0, 3])
    """
    cut: list[FusedChunk] = []
    starts = [0] * len(counts)
    at = 0
    for dtype in dict.fromkeys(dtypes):
        members = [(i, counts[i]) for i, other in enumerate(dtypes) if other == dtype]
        # At least 1, because an empty array is never a portion.
        least = max(1, -(-whole // dtype.itemsize))
        for i, count in members:
            if count >= least:
                starts[i], nbytes = at, count * dtype.itemsize
                cut.append(FusedChunk(dtype, (ArraySlice(i, 0, count),), at, nbytes, True))
                at += _pad(nbytes)
        members = [(i, count) for i, count in members if count < least]
        for pieces, first in _cut_pieces(members, limit // dtype.itemsize):
            # No padding between short arrays, because an array may continue in the next portion.
            place = at + first * dtype.itemsize
            count = 0
            for piece in pieces:
                # The piece with the first element gives the place of the array.
                if piece.start == 0:
                    starts[piece.array] = place + count * dtype.itemsize
                count += piece.stop - piece.start
            cut.append(FusedChunk(dtype, tuple(pieces), place, count * dtype.itemsize))
        at += _pad(sum(count for _, count in members) * dtype.itemsize)
    return cut, starts, at


def _cut_pieces(
    members: Sequence[tuple[int, int]], most: int
) -> Iterator[tuple[list[ArraySlice], int]]:
    """Yield the pieces of each portion of arrays of one dtype, and the offset in elements."""
    pieces: list[ArraySlice] = []
    first, room = 0, most
    for index, count in members:
        start = 0
        while start < count:
            stop = min(count, start + room)
            pieces.append(ArraySlice(index, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield pieces, first
                pieces, first, room = [], first + most, most
    if pieces:
        yield pieces, first


def summary(kinds: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Describe arrays in one line; a checksum keeps lines distinct after they are cut."""
    text = " ".join(f"{name}{list(shape)}" for name, shape in kinds)
    return f"{zlib.crc32(text.encode()):08x} {text}"


def _pad(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
