"""Buckets of DDP, moved to where all ranks of the node reduce them in place.

DDP makes buckets of its own, and gives each to `allreduce` again and again, but for the one of the
first backward pass. The second time that a bucket comes, the memory below it is exchanged::

    before    bucket -> storage -> private memory     its views, such as `.grad`, know the storage
    after     bucket -> storage -> shared memory      private memory is given back

From then on nothing is copied. PyTorch exchanges memory only by a private method: where that is
missing, or does something else, buckets stay where they are, and are reduced there.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np
import torch

import collectives as cc
from strategies.torch import moves
from strategies.torch.moves import Reduction
from strategies.torch.tensors import Array

__all__ = ["Buckets"]


class _Region:
    """Shared memory for one bucket, and for another one of its size when that is gone."""

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.is_free = False

    def free(self) -> None:
        self.is_free = True


class Buckets:
    """The buckets that come to one process group.

    Args:
        comm: its ranks, which share a node.
    """

    def __init__(self, comm: cc.Communicator) -> None:
        self._comm = comm
        self._regions: list[_Region] = []
        # Storage -> where its memory is; None until it comes a second time.
        self._seen: weakref.WeakKeyDictionary[Any, _Region | None] = weakref.WeakKeyDictionary()

    def allreduce(
        self, tensor: torch.Tensor, how: Reduction, limit: float, codec: cc.Compression
    ) -> None:
        """Reduce a bucket in place, and move it if it has come before; *collective*."""
        if _can_swap():
            self._look_at(tensor, limit)
        moves.allreduce(self._comm, [tensor], how, limit, codec)

    def _look_at(self, tensor: torch.Tensor, limit: float) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen[storage] = None
        elif self._seen[storage] is None:
            nbytes = storage.nbytes()
            whole = tensor.nbytes == nbytes and tensor.is_contiguous()
            if whole and nbytes:
                self._seen[storage] = region = self._region(nbytes, limit)
                shared = torch.from_numpy(region.memory)
                shared.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
                storage._swap_data_ptr_(shared.untyped_storage())
                weakref.finalize(storage, region.free)

    def _region(self, nbytes: int, limit: float) -> _Region:
        """Return shared memory that no rank uses any more, or new."""
        known = [region for region in self._regions if region.memory.nbytes == nbytes]
        if known:
            free = np.array([region.is_free for region in known])
            free = self._comm.allreduce(free, op=cc.MIN, timeout=limit)
            if free.any():
                region = known[int(free.argmax())]
                region.is_free = False
                return region
        made = _Region(self._comm.shared_empty(nbytes, np.uint8, timeout=limit))
        self._regions.append(made)
        return made


@functools.cache
def _can_swap() -> bool:
    """Tell whether this PyTorch exchanges the memory below two storages."""
    try:
        one, other = torch.ones(4), torch.zeros(4)
        view = one[1:]
        one.untyped_storage()._swap_data_ptr_(other.untyped_storage())
        return bool(view.tolist() == [0, 0, 0] and other.tolist() == [1, 1, 1, 1])
    except (AttributeError, RuntimeError, TypeError):
        return False
