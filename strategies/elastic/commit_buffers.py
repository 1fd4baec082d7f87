"""Double-buffered in-memory commits.

::

    rank 0   commit 6   7 made   7 kept     knows that all have made theirs
    rank 1   commit 6   7 made              has two, and goes on from 7 if rank 0 lives to say so
    rank 2   (in reserve)        7          is given one, with the place of a dead rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import collectives as cc

__all__ = ["NOTHING", "DoubleBuffer", "Commit"]


class Commit(NamedTuple):
    """Things as they were.

    Attributes:
        number: of the commit; -1 if it is not whole.
        nodes: all but the numbers in arrays, as `serialization.serialize` gives it.
        tensors: copies of the arrays, by name; contiguous, in host memory.
        inputs: positions of all ranks, by name.
        place: this rank's number then, or that of the rank in whose place it is.
        size: how many ranks there were.
    """

    number: int
    nodes: Any
    tensors: Mapping[str, Any]
    inputs: Mapping[str, Any]
    place: int = 0
    size: int = 1


NOTHING = Commit(-1, {}, {}, {})


class DoubleBuffer:
    """Two copies, whose memory is used in turns.

    Attributes:
        kept: the last one that all ranks have.
        next: the one after it, or the one before it, which may be written over.
    """

    def __init__(self) -> None:
        self.kept, self.next = NOTHING, NOTHING

    def places(self) -> dict[int, tuple[int, int]]:
        """Return this rank's place among how many, by the numbers of the commits that it has."""
        copies = [copy for copy in (self.kept, self.next) if copy.number >= 0]
        return {copy.number: (copy.place, copy.size) for copy in copies}

    def swap(self) -> None:
        """Keep the next one."""
        self.kept, self.next = self.next, self.kept

    def rollback(self, number: int) -> None:
        """Keep the commit of this number; of the other copy there is only memory."""
        if self.next.number == number:
            self.swap()
        self.next = self.next._replace(number=-1)

    def send_to(self, comm: cc.Communicator, places: Mapping[int, int]) -> None:
        """Give ranks the kept copy that have none; *collective*.

        Args:
            comm: the ranks; those that have a copy have the same one.
            places: of those that have none: in whose place they are.
        """
        giver = min(set(range(comm.size)) - places.keys())
        facts = [(name, array.shape, array.dtype) for name, array in self.kept.tensors.items()]
        copy, facts = comm.broadcast_object((self.kept._replace(tensors={}), facts), giver)
        tensors = self.kept.tensors
        if comm.rank in places:
            tensors = {name: np.empty(shape, dtype) for name, shape, dtype in facts}
            copy = copy._replace(tensors=tensors, place=places[comm.rank])
            self.kept = copy._replace(number=-1)  # until it is whole
        for array in tensors.values():
            # As bytes: 16-bit floats of other libraries, too. All others have these bits already.
            flat = array.reshape(-1).view(np.uint8)
            comm.broadcast(flat, giver, out=flat)
        if comm.rank in places:
            self.kept = copy
