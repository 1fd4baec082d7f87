"""Registry of shared arrays: one array per rank, addressable by every rank of the node.

Ranks create shared arrays collectively, so an array has the same number on all ranks. A call looks
its array up by address, so a slice of a shared array also counts as shared.
    segment of a shared array of 3 ranks     | rank 0's part | rank 1's part | rank 2's part |
                                             0               stride          2 stride
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from collectives.arrays.host_arrays import Array, address
from collectives.node import segment
from collectives.transport.transport import Deadline, Transport

__all__ = ["SharedLocation", "SharedArrays"]

_PAGE = 4096


class SharedLocation(NamedTuple):
    """A place in shared memory: the number of a shared array, and an offset in bytes."""

    number: int
    offset: int


class _Shared(NamedTuple):
    memory: weakref.ref[Array]  # kept alive by the rank's own array and its views
    bases: list[int]  # addresses of the ranks' parts
    stride: int  # bytes of a part


class SharedArrays:
    """The shared arrays of a group of ranks on one node.

    A rank unmaps an array when its program drops the last view. The memory is free once all ranks
    have done so. Numbers are never reused, so a plan for a dropped array never matches a later one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._all: dict[int, _Shared] = {}  # by number; `create` removes dropped arrays
        self._made = 0

    def __len__(self) -> int:
        return len(self._all)

    def create(
        self, nbytes: int, transport: Transport, directory: str, deadline: Deadline
    ) -> Array | None:
        """Allocate memory that all ranks can address; *collective*.

        Returns:
            shape (nbytes,), uint8: this rank's part; None on all ranks if memory is short.
        """
        stride = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        memory = segment.create(transport, 0, stride, directory, deadline)
        if memory is None:
            return None
        bases = [address(memory) + stride * rank for rank in range(self._size)]
        self._all = {n: shared for n, shared in self._all.items() if shared.memory() is not None}
        self._all[self._made] = _Shared(weakref.ref(memory), bases, stride)
        self._made += 1
        return memory[stride * self._rank : stride * self._rank + nbytes]

    def is_dropped(self, key: object) -> bool:
        """Return whether a plan's key refers to a dropped array."""
        places = (
            [part for part in key if isinstance(part, SharedLocation)] if type(key) is tuple else []
        )
        return any(place.number not in self._all for place in places)

    def views_of_all_ranks(self, place: SharedLocation, like: Array) -> list[Array]:
        """Return all ranks' data at a place, as flat arrays with the size and dtype of `like`."""
        shared, _, stride = self._all[place.number]
        memory = shared()
        assert memory is not None  # the caller has a view of it
        starts = [rank * stride + place.offset for rank in range(self._size)]
        return [memory[at : at + like.nbytes].view(like.dtype) for at in starts]

    def addresses(self, place: SharedLocation) -> Array:
        """Return the addresses of a place on all ranks, shape (size,), int64."""
        return np.array([base + place.offset for base in self._all[place.number].bases], np.int64)

    def location_of_pair(self, array: Array, out: Array | None = None) -> SharedLocation | None:
        """Return the place of an array that an operation changes in place.

        Args:
            array: flat.
            out: destination of the result; None for the array itself.

        Returns:
            None if the array is not in shared memory, or if `out` begins at another address.
        """
        if not self._all or not array.size:
            return None
        start = address(array)
        if out is not None and address(out) != start:
            return None
        return self.location_at(start, array.nbytes)

    def location_at(self, start: int, nbytes: int) -> SharedLocation | None:
        """Return the place of `nbytes` at an address; None if they are not in one shared array."""
        for number, shared in self._all.items():
            offset = start - shared.bases[self._rank]
            fits = offset >= 0 and 0 < nbytes <= shared.stride - offset
            # A dropped array's addresses may belong to other memory by now.
            if fits and shared.memory() is not None:
                return SharedLocation(number, offset)
        return None
