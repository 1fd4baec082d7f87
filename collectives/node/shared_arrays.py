"""Registry of shared arrays: one array per rank, addressable by every rank of the node.

The ranks make them together, so that all know them by the same numbers. An array that a call is
given is looked for by its address: a slice of a shared array is in shared memory, too.

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
    """A place in shared memory: the number of the shared array, and the bytes before the place."""

    number: int
    offset: int


class _Shared(NamedTuple):
    memory: weakref.ref[Array]  # kept alive by the rank's own array and its views
    bases: list[int]  # addresses of the ranks' parts
    stride: int  # bytes of a part


class SharedArrays:
    """The shared arrays of a group of ranks on one node.

    Each rank unmaps an array as soon as its program has dropped the array; the memory is free once
    all ranks have. Numbers are never reused, so that a plan of an array never fits a later array.
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
        """Make memory that all ranks can reach; *collective*.

        Returns:
            shape (nbytes,), uint8: this rank's own part; None on all ranks if there is no room.
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
        """Return whether a plan's key contains the place of a dropped array."""
        places = (
            [part for part in key if isinstance(part, SharedLocation)] if type(key) is tuple else []
        )
        return any(place.number not in self._all for place in places)

    def views_of_all_ranks(self, place: SharedLocation, like: Array) -> list[Array]:
        """Return what all ranks have at a place, as flat arrays like `like`."""
        shared, _, stride = self._all[place.number]
        memory = shared()
        assert memory is not None  # the caller has a view of it
        starts = [rank * stride + place.offset for rank in range(self._size)]
        return [memory[at : at + like.nbytes].view(like.dtype) for at in starts]

    def addresses(self, place: SharedLocation) -> Array:
        """Return the addresses at which all ranks have a place, shape (size,), int64."""
        return np.array([base + place.offset for base in self._all[place.number].bases], np.int64)

    def location_of_pair(self, array: Array, out: Array | None = None) -> SharedLocation | None:
        """Say where an array that is changed in place lies.

        Args:
            array: flat.
            out: where its change goes; the array itself if None.

        Returns:
            None if it lies in other memory, or if `out` does not begin where it does.
        """
        if not self._all or not array.size:
            return None
        start = address(array)
        if out is not None and address(out) != start:
            return None
        return self.location_at(start, array.nbytes)

    def location_at(self, start: int, nbytes: int) -> SharedLocation | None:
        """As `location_of_pair` an array that begins at an address."""
        for number, shared in self._all.items():
            offset = start - shared.bases[self._rank]
            fits = offset >= 0 and 0 < nbytes <= shared.stride - offset
            if fits and shared.memory() is not None:  # dropped: other memory may have its addresses
                return SharedLocation(number, offset)
        return None
