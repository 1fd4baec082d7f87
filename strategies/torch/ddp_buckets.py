"""DDP buckets moved to node-shared memory and reduced in place.

DDP allocates its own buckets and passes each to `allreduce` in every step, except the bucket of the
first backward pass. Before the second one it broadcasts the sizes of the final buckets; some models
have these from the start. So announced buckets, and buckets that are passed twice, are permanent.
Their memory is swapped::

    before    bucket -> storage -> private memory     views, such as `.grad`, refer to the storage
    after     bucket -> storage -> shared memory      private memory is freed

From then on nothing is copied. PyTorch can swap memory only by a private method. If the method is
missing or behaves differently, buckets are reduced in their private memory.

DDP does not identify itself as the caller; function names of PyTorch 2.4 to 2.13 do. With other
names nothing is announced. Then buckets are moved when they are passed twice, or are treated as
ordinary all-reduces.

The ranks move a bucket together or not at all. In DDP's `join` a rank without more data takes part
with buckets that are new each time. The other ranks then get a `MismatchError` and move nothing.
"""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

import numpy as np
import torch

import collectives as cc
from strategies.torch import operations
from strategies.torch.operations import Reduction
from strategies.torch.tensor_views import Array

__all__ = ["DdpBuckets", "is_ddp_bucket", "starts_rebuild"]

# Module that calls the autograd engine, and thereby DDP's reducer in C++.
_AUTOGRAD = "torch.autograd.graph"

# Functions in which C++ allocates DDP's final buckets: a forward pass, or the `join` of a rank that
# has no more data.
_DDP, _REBUILD = "torch.nn.parallel.distributed", ("_pre_forward", "main_hook")


class _SharedRegion:
    """Shared memory for one bucket, reused for another one of its size after that is freed."""

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.is_free = False

    def free(self) -> None:
        self.is_free = True


class DdpBuckets:
    """The buckets of one process group.

    Args:
        comm: the ranks, which share a node.
    """

    def __init__(self, comm: cc.Communicator) -> None:
        self._comm = comm
        # Tested once per group by swapping two small tensors.
        self._can_swap = _can_swap()
        self._regions: list[_SharedRegion] = []
        self._announced = 0  # number of permanent buckets still to be passed
        # Storages passed once; and permanent ones, which were moved if all ranks could.
        self._once: weakref.WeakSet[Any] = weakref.WeakSet()
        self._staying: weakref.WeakSet[Any] = weakref.WeakSet()

    def expect(self, count: int) -> None:
        """Treat the next `count` new buckets as permanent."""
        self._announced = count

    def allreduce(
        self, tensor: torch.Tensor, how: Reduction, limit: float, codec: cc.Compression
    ) -> None:
        """Reduce a bucket in place, and move it if it is permanent; *collective*."""
        if self._can_swap:
            self._look_at(tensor, limit)
        operations.allreduce(self._comm, [tensor], how, limit, codec)

    def _look_at(self, tensor: torch.Tensor, limit: float) -> None:
        storage = tensor.untyped_storage()
        # Already shared, or not to be moved: the common case after the second step.
        if storage in self._staying:
            return
        # A bucket seen for the first time may be temporary, so it is only noted.
        if storage not in self._once:
            if not self._announced:
                self._once.add(storage)
                return
            # Also for buckets that cannot move, which count among the announced ones.
            self._announced -= 1
        self._staying.add(storage)
        nbytes = storage.nbytes()
        # Views into a larger storage must not lose the rest of it.
        if nbytes and tensor.nbytes == nbytes and tensor.is_contiguous():
            try:
                region = self._region(nbytes, limit)
            except cc.MismatchError as error:
                # In `join` some ranks pass new buckets and are in `allreduce` already.
                if not operations.differs_in_memory(error):
                    raise
                return
            shared = torch.from_numpy(region.memory)
            # The content moves before the pointer: the gradients are in the bucket.
            shared.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            storage._swap_data_ptr_(shared.untyped_storage())
            # The storage owns the shared memory now; once DDP frees it, the region may be reused.
            weakref.finalize(storage, region.free)

    def _region(self, nbytes: int, limit: float) -> _SharedRegion:
        """Return shared memory that no rank uses any more, or allocate some."""
        # Ranks free storages at different times, so a region must be free on all of them.
        usable = [
            number
            for number, region in enumerate(self._regions)
            if region.is_free and region.memory.nbytes == nbytes
        ]
        everyones = self._comm.allgather_object(usable, timeout=limit)
        for number in usable:
            if all(number in numbers for numbers in everyones):
                self._regions[number].is_free = False
                return self._regions[number]
        # Collective: all ranks agree in the exchange above that no region is free.
        made = _SharedRegion(self._comm.shared_empty(nbytes, np.uint8, timeout=limit))
        self._regions.append(made)
        return made


def _can_swap() -> bool:
    """Return whether this PyTorch swaps the memory of two storages."""
    # A view must see the new memory as well, because `.grad` are views of buckets.
    try:
        one, other = torch.ones(4), torch.zeros(4)
        view = one[1:]
        one.untyped_storage()._swap_data_ptr_(other.untyped_storage())
        return bool(view.tolist() == [0, 0, 0] and other.tolist() == [1, 1, 1, 1])
    except (AttributeError, RuntimeError, TypeError):
        return False


def is_ddp_bucket(tensor: torch.Tensor, frame: FrameType) -> bool:
    """Return whether this is a bucket of DDP, or a sparse gradient, which is a bucket by itself.

    C++ calls DDP's reducer, so the caller is the autograd engine. The same holds for an operation
    in a backward pass that C++ starts otherwise. A bucket is 1-D and covers all of its memory.
    """
    if frame.f_globals.get("__name__") != _AUTOGRAD:
        return False
    if tensor.is_sparse:
        return True
    return bool(tensor.dim() == 1 and tensor.nbytes == tensor.untyped_storage().nbytes())


def starts_rebuild(frame: FrameType) -> bool:
    """Return whether this frame calls the broadcast that announces DDP's final buckets.

    Before the second forward pass rank 0 broadcasts the order of the parameters, and then the size
    of each bucket. So the number of elements of the last broadcast is the number of buckets.
    """
    code = frame.f_code
    return code.co_name in _REBUILD and frame.f_globals.get("__name__") == _DDP
