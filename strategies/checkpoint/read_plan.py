"""Read plan: which rank reads which slice, and how ranks redistribute them.

If all ranks need a whole tensor, each rank reads some of its slices and broadcasts them. So every
file is read once, by all ranks together. If a rank needs only a part of a tensor, each rank reads
the slices that overlap its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies import errors
from strategies.checkpoint import checkpoint, shards
from strategies.checkpoint.boxes import Box, contains, inside, whole
from strategies.checkpoint.manifest import DTYPES, Manifest
from strategies.checkpoint.shards import Target
from strategies.checkpoint.storage import Location
from strategies.checkpoint.write_plan import least_loaded
from strategies.core.process_group import ProcessGroup

__all__ = ["Wanted", "parts", "read_together", "distribute", "plan_reads"]

Arrays = dict[str, npt.NDArray[Any]]


Wanted = Mapping[str, Box] | Callable[[str, tuple[int, ...]], Box | None]
"""Tensor name -> box that a rank needs; or a function of name and shape."""


def plan_reads(slices: Wanted | None, plan: Manifest) -> dict[str, Box]:
    """Return the boxes of the tensors that a rank needs only in part.

    Raises:
        InvalidArgumentError: a box is not inside its tensor.
    """
    found = {}
    for name, entry in plan.tensors.items():
        if slices is None:
            box = None
        elif isinstance(slices, Mapping):
            box = slices.get(name)
        else:
            box = slices(name, entry.shape)
        if box is None:
            continue
        if not contains(box, entry.shape):
            raise errors.InvalidArgumentError(
                f"restore: expected a slice inside of {list(entry.shape)}, got {list(box.shape)} "
                f"from {list(box.start)} on (tensor: {name})"
            )
        found[name] = box
    return found


def read_together(
    comm: cc.Communicator, path: Location, plan: Manifest, wanted: Mapping[str, Box]
) -> Arrays:
    """Return all tensors of a checkpoint, those in `wanted` in part; *collective*.

    Args:
        comm: the ranks, all of which reach the files.
        path: the checkpoint.
        plan: its manifest.
        wanted: name -> box that this rank needs; it needs all of other tensors.

    Raises:
        OpError: as `checkpoint.restore`, the same on all ranks.
    """
    # Names of all ranks: one rank that needs a part excludes the tensor from the broadcasts.
    # A tensor is broadcast only if every rank needs all of it.
    cut = {name for names in comm.allgather_object(set(wanted)) for name in names}
    pieces = [
        (name, one.box)
        for name, entry in plan.tensors.items()
        if name not in cut
        for one in entry.slices
    ]
    sizes = [box.size * DTYPES[plan.tensors[name].dtype].itemsize for name, box in pieces]
    # The manifest is the same on all ranks, so all compute the same assignment.
    readers = least_loaded(sizes, comm.size)

    def read() -> Arrays:
        boxes = {name: wanted.get(name, whole(entry.shape)) for name, entry in plan.tensors.items()}
        found = {
            name: shards.empty(name, boxes[name].shape, entry.dtype)
            for name, entry in plan.tensors.items()
        }
        mine = {piece for piece, reader in zip(pieces, readers, strict=True) if reader == comm.rank}
        targets = {
            (name, one.box): [Target(boxes[name], found[name])]
            for name, entry in plan.tensors.items()
            for one in entry.slices
            if name in cut or (name, one.box) in mine
        }
        checkpoint.read(path, plan, targets)
        return found

    # Agree before the first broadcast, because a rank that failed to read has nothing to send.
    found = ProcessGroup(comm).run_then_agree("restore: read", read)
    for (name, box), size, reader in zip(pieces, sizes, readers, strict=True):
        # Empty slices have no bytes. All ranks skip them, as the manifest contains the sizes.
        if size:
            _give(comm, found[name], box, reader)
    return found


def distribute(
    comm: cc.Communicator | None, plan: Manifest, read: Mapping[str, npt.NDArray[Any]]
) -> Arrays:
    """Broadcast rank 0's tensors to all ranks; *collective*."""
    if comm is None or comm.size == 1:
        return dict(read)
    found = {}
    for name, entry in plan.tensors.items():
        array = np.empty(entry.shape, DTYPES[entry.dtype]) if comm.rank else read[name]
        if array.nbytes:
            _give(comm, array, whole(entry.shape), 0)
        found[name] = array
    return found


def parts(found: Arrays, wanted: Mapping[str, Box], plan: Manifest) -> Arrays:
    """Return the arrays, cut to the boxes in `wanted`."""
    result = dict(found)
    for name, box in wanted.items():
        if name in found:
            # A copy, so that the part does not keep the whole array in memory.
            result[name] = found[name][inside(box, whole(plan.tensors[name].shape))].copy()
    return result


def _give(comm: cc.Communicator, array: npt.NDArray[Any], box: Box, root: int) -> None:
    """Broadcast a box of the root's array; sent as bytes, whatever the dtype."""
    view = array[inside(box, whole(array.shape))]
    # A box may be a strided view, which cannot be sent as bytes.
    mine = np.ascontiguousarray(view)
    received = np.asarray(comm.broadcast(shards.as_bytes(mine), root=root))
    if comm.rank != root:
        view[...] = received.view(array.dtype).reshape(view.shape)
