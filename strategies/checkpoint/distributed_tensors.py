"""Sharded values: slices, and PyTorch's DTensor.

FSDP makes the parameters of a module distributed, and thereby the states of their optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from strategies.checkpoint import state_protocols as kinds
from strategies.checkpoint.boxes import Box, Slice
from strategies.checkpoint.remote_state import RemoteRestore, remote_restore_of
from strategies.core import pytree

__all__ = ["PartialReads", "dtensor_like", "slice_of"]


def slice_of(thing: Any) -> Slice | None:
    """Return this rank's part of a larger array; None for a whole array.

    Raises:
        TypeError: a DTensor with other placements than Shard and Replicate, or an uneven shard.
    """
    if isinstance(thing, Slice):
        return thing
    if not _is_distributed(thing):
        return None
    local = thing.to_local()
    start, shape = [0] * thing.ndim, list(thing.shape)
    mesh = thing.device_mesh
    # Coordinates are those of the mesh, not ranks of the manager's communicator.
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(thing.placements):
        # Several ranks hold the same box then, and `assign_writers` divides it among them.
        if placement.is_replicate():
            continue
        # By name, because PyTorch moved the class between modules. `_StridedShard` and `Partial`
        # are rejected: their parts are not boxes of the whole tensor.
        if type(placement).__name__ != "Shard":
            raise TypeError(f"expected a tensor of Shard and Replicate, got {thing.placements}")
        # As torch.chunk cuts: all chunks have the length of the first, except the last ones.
        each = -(-shape[placement.dim] // mesh.size(axis))
        # Trailing ranks may have no rows, if there are fewer chunks than ranks.
        first = min(coordinate[axis] * each, shape[placement.dim])
        start[placement.dim] += first
        shape[placement.dim] = min(each, shape[placement.dim] - first)
    # A guard against other ways of sharding: a wrong box would store elements at wrong places.
    if tuple(shape) != tuple(local.shape):
        raise TypeError(f"expected {shape} elements on this rank, got {list(local.shape)}")
    return Slice(local, tuple(start), tuple(thing.shape))


def dtensor_like(tensor: Any, local: Any) -> Any:
    """Return a distributed tensor of this rank's part, with the layout of `tensor`."""
    # The device of the old part, since checkpoints are read into host memory.
    made = local.to(tensor.to_local().device)
    return type(tensor).from_local(
        made,
        tensor.device_mesh,
        tensor.placements,
        # `run_check` would communicate among the ranks of the mesh.
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class PartialReads:
    """Arrays of a checkpoint that this rank reads only in part, derived from its objects.

    Args:
        things: name -> object, as in `Saver`.
        remote: whether other tasks read the state that they hold.

    Attributes:
        restores: name of an object -> its restore by other tasks.
        chosen: per restore, name in the state -> name in the checkpoint; set by `restore_into`.
    """

    def __init__(self, things: Mapping[str, Any], *, remote: bool = False) -> None:
        self.restores: dict[str, RemoteRestore] = {}
        self.chosen: list[tuple[RemoteRestore, dict[str, str]]] = []
        self._remote = remote
        self._exact: dict[str, Any] = {}  # name of an array -> the object with a part of it
        # An optimizer names its states by the parameter's number, as in its `state_dict`.
        self._states: dict[str, Any] = {}  # prefix of a parameter's states -> the parameter
        for name, thing in things.items():
            self._look(thing, name)

    @property
    def names(self) -> list[str]:
        """Names of the arrays, and prefixes of the states of distributed parameters."""
        return [*self._exact, *self._states]

    def of(self, name: str) -> Any:
        """Return the object that holds a part of an array, or the parameter of a state."""
        return self._exact.get(name, self._states.get(name.rpartition("/")[0]))

    def box(self, name: str, shape: tuple[int, ...]) -> Box | None:
        """Return the box of an array that this rank reads; None for the whole array."""
        part = slice_of(self.of(name))
        # Only states of the parameter's shape are distributed like it; its step counter is whole.
        return None if part is None or part.shape != shape else part.box

    def is_remote(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether only other tasks read an array."""
        return any(
            name.startswith(f"{prefix}/") and restore.is_large(name[len(prefix) + 1 :], shape)
            for prefix, restore in self.restores.items()
        )

    def _look(self, thing: Any, name: str) -> None:
        kind = kinds.protocol_of(thing)
        restore = remote_restore_of(thing) if self._remote else None
        if restore is not None:
            self.restores[name] = restore
        elif kind is not None:
            if kind.methods[0] == "state_dict":
                self._look_at_state(thing, name)
        elif slice_of(thing) is not None:
            self._exact[name] = thing
        elif isinstance(thing, Mapping):
            for key, value in thing.items():
                self._look(value, f"{name}/{key}")
        elif (parts := pytree.children_of(thing)) is not None:
            label = pytree.child_labels(thing)
            for index, value in enumerate(parts):
                self._look(value, f"{name}/{label(index)}")

    def _look_at_state(self, thing: Any, name: str) -> None:
        groups = getattr(thing, "param_groups", None)
        if groups is None:
            state = thing.state_dict() if hasattr(thing, "parameters") else {}
            self._exact |= {f"{name}/{key}": x for key, x in state.items() if _is_distributed(x)}
            return
        # Before its first step an optimizer has no states, but their names are known.
        parameters = [parameter for group in groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            if _is_distributed(parameter):
                self._states[f"{name}/state/{number}"] = parameter
        # Of `DistributedOptimizer(shard_state=True)`, whose parameters are whole.
        for number, part in enumerate(getattr(thing, "shards", ())):
            self._states[f"{name}/state/{number}"] = part


def _is_distributed(thing: Any) -> bool:
    """Return whether it is a DTensor, without importing PyTorch for the check."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(thing, module.DTensor)
