"""Boxes: index ranges of arrays that ranks hold, read or write.

::

    array of shape (5, 4)        Box((0, 0), (2, 4))    rows 0 and 1
    a a a a                      Box((2, 0), (3, 2))    b
    a a a a                      Box((2, 2), (3, 2))    c
    b b c c
    b b c c                      The three tile it: each element is in exactly one box.
    b b c c
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Box", "Slice", "check_tiles", "inside", "contains", "overlap", "split", "whole"]


class Box(NamedTuple):
    """A block of an array: `shape` elements from index `start`, per dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slice:
    """The part of a larger array that this rank holds or reads.

    Args:
        array: host array or tensor with the elements.
        start: index of its first element in the whole array.
        shape: shape of the whole array.

    Raises:
        ValueError: the part is not inside the whole array.

    Example:
        >>> import numpy as np
        >>> Slice(np.ones((2, 3)), start=(4, 0), shape=(6, 3)).box
        Box(start=(4, 0), shape=(2, 3))
    """

    array: Any
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        # The dataclass is frozen; plain integers, because NumPy's do not fit in JSON.
        object.__setattr__(self, "start", tuple(map(int, self.start)))
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if not contains(self.box, self.shape):
            raise ValueError(
                f"Slice: expected an array inside the whole one, got shape {self.box.shape} "
                f"from {self.start} on, of {self.shape}"
            )

    @property
    def box(self) -> Box:
        """Box of the array's elements."""
        return Box(self.start, tuple(self.array.shape))


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all elements of an array."""
    return Box((0,) * len(shape), tuple(shape))


def overlap(one: Box, other: Box) -> Box | None:
    """Return the common elements of two boxes of one array; None if they are disjoint.

    Example:
        >>> overlap(Box((0, 0), (2, 4)), Box((1, 3), (4, 4)))
        Box(start=(1, 3), shape=(1, 1))
    """
    start = tuple(map(max, one.start, other.start))
    ends = zip(one.start, one.shape, other.start, other.shape, strict=True)
    shape = tuple(
        min(a + n, b + m) - first for first, (a, n, b, m) in zip(start, ends, strict=True)
    )
    # A box with an extent of 0 overlaps nothing, not even itself.
    return Box(start, shape) if all(extent > 0 for extent in shape) else None


def inside(box: Box, outer: Box) -> tuple[Any, ...]:
    """Return the index of the elements of `box` in the array of `outer`; it selects a view."""
    index = [
        slice(first - begin, first - begin + extent)
        for first, extent, begin in zip(box.start, box.shape, outer.start, strict=True)
    ]
    return (*index, ...)  # the ellipsis makes NumPy return a view even for 0 dimensions


def split(box: Box, count: int) -> list[Box]:
    """Cut a box along its first axis longer than 1, so that each part is contiguous in it.

    Args:
        box: box to cut.
        count: number of parts, at most the length of that axis. Lengths differ by at most one.

    Example:
        >>> split(Box((2, 0), (3, 4)), 2)
        [Box(start=(2, 0), shape=(2, 4)), Box(start=(4, 0), shape=(1, 4))]
    """
    # Axes of length 1 in front do not break contiguity, so the first longer axis is the one to cut.
    axis = next((axis for axis, extent in enumerate(box.shape) if extent > 1), None)
    if axis is None or count < 2:
        return [box]
    extent = box.shape[axis]
    parts = []
    each, more = divmod(extent, min(count, extent))
    place = box.start[axis]
    for number in range(min(count, extent)):
        # The first `more` parts get one element more, so the lengths differ by at most one.
        length = each + (number < more)
        start = (*box.start[:axis], place, *box.start[axis + 1 :])
        parts.append(Box(start, (*box.shape[:axis], length, *box.shape[axis + 1 :])))
        place += length
    return parts


def check_tiles(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that each element of an array is in exactly one of `boxes`.

    Raises:
        ValueError: a box is not inside the array, two overlap, or elements are missing.
    """
    for box in boxes:
        if not contains(box, shape):
            raise ValueError(f"a slice is not inside {list(shape)}, got {_text(box)}")
    if not boxes:
        raise ValueError("no slice holds any of it")
    # Sweep along the axis with the most cuts, because the fewest boxes overlap there.
    axis = max(range(len(shape)), key=lambda i: len({box.start[i] for box in boxes}), default=None)
    # Empty boxes hold no element, so they cannot overlap another box.
    filled = [box for box in boxes if box.size]
    if axis is None:
        if len(filled) > 1:
            raise ValueError("two slices hold the same element")
    else:
        _check_apart(sorted(filled, key=lambda box: box.start[axis]), axis)
    # Boxes that are inside and disjoint tile the array if their sizes add up to its size.
    missing = math.prod(shape) - sum(box.size for box in filled)
    if missing:
        raise ValueError(f"slices hold all but {missing} of {math.prod(shape)} elements")


def _check_apart(boxes: Sequence[Box], axis: int) -> None:
    """Check that no two boxes overlap; they are sorted along the axis."""
    # A sweep: for tensors cut along one axis it takes O(n log n), where comparing all pairs takes
    # O(n^2). A manifest may list 100,000 slices.
    open_: list[Box] = []
    for box in boxes:
        # Boxes that end before this one cannot overlap it or any later one.
        open_ = [one for one in open_ if one.start[axis] + one.shape[axis] > box.start[axis]]
        for one in open_:
            if overlap(one, box) is not None:
                raise ValueError(f"slices overlap, got {_text(one)} and {_text(box)}")
        open_.append(box)


def contains(box: Box, shape: Sequence[int]) -> bool:
    """Return whether all elements of a box are inside an array of this shape."""
    return len(box.start) == len(box.shape) == len(shape) and all(
        first >= 0 and extent >= 0 and first + extent <= end
        for first, extent, end in zip(box.start, box.shape, shape, strict=True)
    )


def _text(box: Box) -> str:
    return f"{list(box.shape)} from {list(box.start)} on"
