"""Buckets whose gradients are reduced to the rank that updates them (ZeRO, stage 1).

The parameters of one dtype are one bucket in memory that the ranks of a node share, ordered by rank
first. A step runs three operations on it::

                    rank 0's part   rank 1's part
    reduce-scatter  [ a0 b0         | a1 b1 ]        each rank gets the average of its part
    update          [ A0 B0 ]         [ A1 B1 ]      by the slots of that part, which replaces it
    all-gather      [ A0 B0         | A1 B1 ]        all ranks get all parameters

Source: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: memory optimizations toward training
trillion parameter models", arXiv:1910.02054, section 5.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import collectives as cc
from collectives import extend
from strategies.averaging import bucket_copy
from strategies.averaging.parameter_spec import ParameterSpec
from strategies.checkpoint.boxes import Box, Slice, inside, whole
from strategies.core import array_ops

__all__ = ["ShardedBuckets", "box_of", "part_of"]


def box_of(shape: tuple[int, ...], rank: int, size: int) -> Box:
    """Return the part of an array that a rank updates.

    The array is cut along its first axis of at least `size` rows, otherwise along its longest. All
    ranks update a number without axes.

    Example:
        >>> [box_of((1, 5), rank, 2).shape for rank in range(2)], box_of((), 1, 2).shape
        ([(1, 2), (1, 3)], ())
    """
    if not shape:
        return Box((), ())
    long = [axis for axis, extent in enumerate(shape) if extent >= size]
    axis = long[0] if long else shape.index(max(shape))
    first, last = (shape[axis] * r // size for r in (rank, rank + 1))
    start = [0] * len(shape)
    start[axis] = first
    return Box(tuple(start), (*shape[:axis], last - first, *shape[axis + 1 :]))


def part_of(value: Any, box: Box, shape: tuple[int, ...]) -> Any:
    """Return the part of a state in a box; unchanged if it is that part, or no array of the shape.

    Args:
        value: a state of a parameter: an array, a `Slice` or a number.
        box: the part that this rank updates.
        shape: shape of the parameter.

    Raises:
        ValueError: a slice is another part.
    """
    if isinstance(value, Slice):
        if (value.box, value.shape) != (box, shape):
            raise ValueError(
                f"load_state_dict: a slice of another number of ranks, expected {box} of {shape}, "
                f"got {value.box} of {value.shape}; restore checkpoints of slices by Saver"
            )
        return value.array
    if tuple(getattr(value, "shape", (-1,))) == shape:
        return array_ops.copy(value[inside(box, whole(shape))])
    return value


class _Block(NamedTuple):
    """A rank's part of a leaf: its box in the leaf as an index, and its place in the bucket."""

    box: tuple[Any, ...]
    place: Any


class ShardedBuckets:
    """One bucket per dtype; with the methods of `GradientBuckets`, all *collective*.

    Args:
        comm: the ranks.
        op: reduction of the gradients, which are scaled before.

    Attributes:
        buckets: whether places exist; None before.
        members: numbers of the leaves: all of them, so that no part moves between ranks.
        places: {}, because backward hooks cannot write to several parts.
    """

    def __init__(self, comm: cc.Communicator, op: Any) -> None:
        self._comm, self._op = comm, op
        self._blocks: dict[int, list[_Block]] = {}
        self._scatters: list[Callable[[], Any]] = []
        self._gathers: list[Callable[[], Any]] = []
        self.buckets: bool | None = None
        self.members: list[int] = []
        self.places: dict[int, Any] = {}

    def make(
        self, leaves: Sequence[ParameterSpec], wanted: set[int], bucket_bytes: int | None
    ) -> None:
        """Make places for all leaves, in the first step."""
        if self.buckets:
            return
        for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
            self._add(
                {i: leaf.shape for i, leaf in enumerate(leaves) if leaf.dtype == dtype}, dtype
            )
        self.members, self.buckets = sorted(self._blocks), True

    def reduce(self, gradients: Sequence[Any], scale: float) -> list[Any]:
        """Reduce one gradient for each leaf, None as zeros; return this rank's part of each."""
        for i, gradient in zip(self.members, gradients, strict=True):
            for block in self._blocks[i]:
                part = None if gradient is None else gradient[block.box]
                bucket_copy.copy_into(block.place, part, scale)
        for scatter in self._scatters:
            scatter()
        return [self._blocks[i][self._comm.rank].place for i in self.members]

    def gather(self, parameters: Sequence[Any], parts: Sequence[Any]) -> None:
        """Give all ranks the parts of parameters that each has updated.

        Args:
            parameters: array of each leaf, changed in place.
            parts: this rank's part of each leaf.
        """
        own = [array_ops.to_host(part) for part in parts]
        for i, part in zip(self.members, own, strict=True):
            self._blocks[i][self._comm.rank].place[...] = part
        for gather in self._gathers:
            gather()
        for i, part in zip(self.members, own, strict=True):
            value = parameters[i]
            # A view of the parameter has been updated in place.
            is_view = isinstance(value, np.ndarray) and np.may_share_memory(value, part)
            for rank, block in enumerate(self._blocks[i]):
                if rank != self._comm.rank or not is_view:
                    _write(value, block)

    def restore_feedback(self) -> None:
        """Do nothing: without compression no rounding error is kept."""

    def close(self) -> None:
        """Release the places."""
        self.buckets, self.members = None, []
        self._blocks, self._scatters, self._gathers = {}, [], []

    def _add(self, shapes: Mapping[int, tuple[int, ...]], dtype: str) -> None:
        """Make a bucket of leaves of one dtype."""
        size, rank = self._comm.size, self._comm.rank
        boxes = [{i: box_of(shape, r, size) for i, shape in shapes.items()} for r in range(size)]
        counts = [sum(box.size for box in own.values()) for own in boxes]
        bounds = list(itertools.accumulate(counts, initial=0))
        memory = self._comm.shared_empty(bounds[-1], np.dtype(dtype))
        end = 0
        for own in boxes:
            for i, box in own.items():
                place = memory[end : end + box.size].reshape(box.shape)
                index = inside(box, whole(shapes[i]))
                self._blocks.setdefault(i, []).append(_Block(index, place))
                end += box.size
        part = memory[bounds[rank] : bounds[rank + 1]]
        plan_scatter: Any = self._comm.plan_reduce_scatter
        self._scatters.append(plan_scatter(memory, op=self._op, out=part, counts=counts))
        plan_gather: Any = self._comm.plan_allgather
        self._gathers.append(plan_gather(part, out=memory))


def _write(parameter: Any, block: _Block) -> None:
    if isinstance(parameter, np.ndarray):
        parameter[block.box] = block.place
    elif hasattr(parameter, "copy_"):  # a tensor on a device
        parameter[block.box].copy_(extend.as_tensor(block.place))
    else:
        parameter[block.box] = array_ops.on_same_device(parameter, block.place)
