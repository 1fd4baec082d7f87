"""Double-buffered in-memory commits.

::

    rank 0   commit 6   7 copied   7 kept   knows that all ranks have copied 7
    rank 1   commit 6   7 copied            has both; uses 7 if rank 0 survives to report it
    rank 2   (spare)               7        receives 7, with the place of a dead rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import collectives as cc

__all__ = ["NOTHING", "DoubleBuffer", "Commit"]


class Commit(NamedTuple):
    """A copy of the objects at one time.

    Attributes:
        number: number of the commit; -1 if it is incomplete.
        nodes: everything but the array elements, from `serialization.serialize`.
        tensors: name -> copy of an array; contiguous, in host memory.
        inputs: name -> positions of all ranks.
        place: place of this rank, or of the rank that it replaces.
        size: number of training ranks.
    """

    number: int
    nodes: Any
    tensors: Mapping[str, Any]
    inputs: Mapping[str, Any]
    place: int = 0
    size: int = 1


NOTHING = Commit(-1, {}, {}, {})


class DoubleBuffer:
    """Two copies, written alternately.

    A rank may die while some ranks have completed a commit and others have not. Keeping the
    previous copy lets all surviving ranks return to a commit that all of them have.

    Attributes:
        kept: the last copy that all ranks have.
        next: the copy before it, or one in progress; the next commit overwrites it.
    """

    def __init__(self) -> None:
        self.kept, self.next = NOTHING, NOTHING

    def places(self) -> dict[int, tuple[int, int]]:
        """Return number of each commit here -> (this rank's place, number of places)."""
        copies = [copy for copy in (self.kept, self.next) if copy.number >= 0]
        return {copy.number: (copy.place, copy.size) for copy in copies}

    def swap(self) -> None:
        """Keep the copy in `next`."""
        # Exchanged, so that the next commit reuses the memory of the older copy.
        self.kept, self.next = self.next, self.kept

    def rollback(self, number: int) -> None:
        """Keep the commit of this number; the other copy only keeps its memory."""
        if self.next.number == number:
            self.swap()
        self.next = self.next._replace(number=-1)

    def send_to(self, comm: cc.Communicator, places: Mapping[int, int]) -> None:
        """Send the kept copy to ranks without one; *collective*.

        Args:
            comm: the ranks; all existing copies are of the same commit.
            places: rank without a copy -> the place that it takes over.
        """
        # All copies have the same bits, so any rank with one may send it.
        giver = min(set(range(comm.size)) - places.keys())
        # Shapes and dtypes first: a receiver then allocates, and receives in place.
        facts = [(name, array.shape, array.dtype) for name, array in self.kept.tensors.items()]
        copy, facts = comm.broadcast_object((self.kept._replace(tensors={}), facts), giver)
        tensors = self.kept.tensors
        if comm.rank in places:
            tensors = {name: np.empty(shape, dtype) for name, shape, dtype in facts}
            copy = copy._replace(tensors=tensors, place=places[comm.rank])
            self.kept = copy._replace(number=-1)  # invalid until all arrays have arrived
        for array in tensors.values():
            # As bytes, which works for any dtype. Other ranks receive the bits they already have.
            flat = array.reshape(-1).view(np.uint8)
            comm.broadcast(flat, giver, out=flat)
        if comm.rank in places:
            self.kept = copy
