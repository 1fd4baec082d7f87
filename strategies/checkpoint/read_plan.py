"""Read plan: which rank reads which slice, and how ranks redistribute them.

Of tensors that all ranks want whole, each rank reads some slices as they lie in the files, and
gives them to the others, so that all files are read once, by all ranks together. What a rank wants
only a part of it reads itself: the slices in which there is some of it.
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
"""Tensor name -> the elements that a rank wants; or a function of name and shape."""


def plan_reads(slices: Wanted | None, plan: Manifest) -> dict[str, Box]:
    """Return of which tensors of a checkpoint a rank wants only a part, and which.

    Raises:
        InvalidArgumentError: a box does not lie inside of its tensor.
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
    """Return all tensors of a checkpoint, those in `plan_reads` only in part; *collective*.

    Args:
        comm: the ranks, all of which reach the files.
        path: of the checkpoint.
        plan: its manifest.
        wanted: name -> which elements this rank wants; of other tensors it wants all.

    Raises:
        OpError: as `checkpoint.restore`, the same on all ranks.
    """
    cut = {name for names in comm.allgather_object(set(wanted)) for name in names}
    pieces = [
        (name, one.box)
        for name, entry in plan.tensors.items()
        if name not in cut
        for one in entry.slices
    ]
    sizes = [box.size * DTYPES[plan.tensors[name].dtype].itemsize for name, box in pieces]
    readers = least_loaded(sizes, comm.size)

    def read() -> Arrays:
        boxes = {name: wanted.get(name, whole(entry.shape)) for name, entry in plan.tensors.items()}
        found = {
            name: shards.empty(name, boxes[name].shape, entry.dtype)
            for name, entry in plan.tensors.items()
        }
        mine = {piece for piece, reader in zip(pieces, readers, strict=True) if reader == comm.rank}
        targets = {
            (name, one.box): Target(boxes[name], found[name])
            for name, entry in plan.tensors.items()
            for one in entry.slices
            if name in cut or (name, one.box) in mine
        }
        checkpoint.read(path, plan, targets)
        return found

    found = ProcessGroup(comm).run_then_agree("restore: read", read)
    for (name, box), size, reader in zip(pieces, sizes, readers, strict=True):
        if size:
            _give(comm, found[name], box, reader)
    return found


def distribute(
    comm: cc.Communicator | None, plan: Manifest, read: Mapping[str, npt.NDArray[Any]]
) -> Arrays:
    """Give all ranks the tensors that rank 0 has read; *collective*."""
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
    """Return the arrays, of those in `plan_reads` only a part."""
    result = dict(found)
    for name, box in wanted.items():
        if name in found:
            result[name] = found[name][inside(box, whole(plan.tensors[name].shape))].copy()
    return result


def _give(comm: cc.Communicator, array: npt.NDArray[Any], box: Box, root: int) -> None:
    """Give all ranks some elements of one rank's array; sent as bytes, whatever its dtype."""
    view = array[inside(box, whole(array.shape))]
    mine = np.ascontiguousarray(view)
    received = np.asarray(comm.broadcast(shards.as_bytes(mine), root=root))
    if comm.rank != root:
        view[...] = received.view(array.dtype).reshape(view.shape)
