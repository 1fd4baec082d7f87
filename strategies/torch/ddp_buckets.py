"""DDP buckets moved to node-shared memory and reduced in place.

DDP makes buckets of its own, and gives each to `allreduce` again and again, but for the one of the
first backward pass. Before the second one it tells its ranks of the last buckets; some models have
these from the beginning. So a bucket that was announced stays, and one that comes again. The memory
below it is exchanged::

    before    bucket -> storage -> private memory     its views, such as `.grad`, know the storage
    after     bucket -> storage -> shared memory      private memory is given back

From then on nothing is copied. PyTorch exchanges memory only by a private method: where that is
missing, or does something else, buckets stay where they are, and are reduced there.

DDP says nowhere that it is the caller; the names of functions of PyTorch 2.4 to 2.13 do. Under
other names nothing is announced, and a bucket moves when it comes again; or a bucket is an
all-reduce like all others, and stays.

The ranks move a bucket together, or not at all: in DDP's `join` a rank that has no more data takes
part with buckets that are new each time. The others find out by a `MismatchError`, and stay.
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

# Where the engine of autograd is called, and with it DDP's reducer, in C++.
_AUTOGRAD = "torch.autograd.graph"

# Where DDP makes its last buckets, which C++ does: in a forward pass, or in that of a rank that has
# no more data.
_DDP, _REBUILD = "torch.nn.parallel.distributed", ("_pre_forward", "main_hook")


class _SharedRegion:
    """Shared memory for one bucket, and for another one of its size when that is gone."""

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.is_free = False

    def free(self) -> None:
        self.is_free = True


class DdpBuckets:
    """The buckets that come to one process group.

    Args:
        comm: its ranks, which share a node.
    """

    def __init__(self, comm: cc.Communicator) -> None:
        self._comm = comm
        self._can_swap = _can_swap()
        self._regions: list[_SharedRegion] = []
        self._announced = 0  # buckets that will come, and stay
        # Storages that have come once; those that stay, and were moved if all ranks could.
        self._once: weakref.WeakSet[Any] = weakref.WeakSet()
        self._staying: weakref.WeakSet[Any] = weakref.WeakSet()

    def expect(self, count: int) -> None:
        """Take it that the next new buckets, so many, will come again and again."""
        self._announced = count

    def allreduce(
        self, tensor: torch.Tensor, how: Reduction, limit: float, codec: cc.Compression
    ) -> None:
        """Reduce a bucket in place, and move it if it has come before; *collective*."""
        if self._can_swap:
            self._look_at(tensor, limit)
        operations.allreduce(self._comm, [tensor], how, limit, codec)

    def _look_at(self, tensor: torch.Tensor, limit: float) -> None:
        storage = tensor.untyped_storage()
        if storage in self._staying:
            return
        if storage not in self._once:
            if not self._announced:
                self._once.add(storage)
                return
            self._announced -= 1
        self._staying.add(storage)
        nbytes = storage.nbytes()
        if nbytes and tensor.nbytes == nbytes and tensor.is_contiguous():
            try:
                region = self._region(nbytes, limit)
            except cc.MismatchError as error:
                if not operations.differs_in_memory(error):
                    raise
                return
            shared = torch.from_numpy(region.memory)
            shared.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            storage._swap_data_ptr_(shared.untyped_storage())
            weakref.finalize(storage, region.free)

    def _region(self, nbytes: int, limit: float) -> _SharedRegion:
        """Return shared memory that no rank uses any more, or new."""
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
        made = _SharedRegion(self._comm.shared_empty(nbytes, np.uint8, timeout=limit))
        self._regions.append(made)
        return made


def _can_swap() -> bool:
    """Tell whether this PyTorch exchanges the memory below two storages."""
    try:
        one, other = torch.ones(4), torch.zeros(4)
        view = one[1:]
        one.untyped_storage()._swap_data_ptr_(other.untyped_storage())
        return bool(view.tolist() == [0, 0, 0] and other.tolist() == [1, 1, 1, 1])
    except (AttributeError, RuntimeError, TypeError):
        return False


def is_ddp_bucket(tensor: torch.Tensor, frame: FrameType) -> bool:
    """Tell whether this is a bucket of DDP, or the sparse gradient that is one by itself.

    Of DDP's reducer, which C++ calls, the engine of autograd is the caller; it also is of an
    operation in a backward pass that C++ starts otherwise. A bucket is flat, and all of its memory.
    """
    if frame.f_globals.get("__name__") != _AUTOGRAD:
        return False
    if tensor.is_sparse:
        return True
    return bool(tensor.dim() == 1 and tensor.nbytes == tensor.untyped_storage().nbytes())


def starts_rebuild(frame: FrameType) -> bool:
    """Tell whether this calls a broadcast by which DDP says what its last buckets are.

    Before the second forward pass rank 0 tells the order of the parameters, and then the size of
    each bucket, so that the last of these broadcasts has as many elements as there are buckets.
    """
    code = frame.f_code
    return code.co_name in _REBUILD and frame.f_globals.get("__name__") == _DDP
