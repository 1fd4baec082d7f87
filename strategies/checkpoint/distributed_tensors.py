"""Sharded values: slices, and PyTorch's DTensor.

FSDP makes the parameters of a module distributed, and so are the states of their optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from strategies.checkpoint import state_protocols as kinds
from strategies.checkpoint.boxes import Box, Slice

__all__ = ["PartialReads", "dtensor_like", "slice_of"]


def slice_of(thing: Any) -> Slice | None:
    """Say what of a larger array this rank has; None for what is whole.

    Raises:
        TypeError: a distributed tensor whose elements are sums to be made, or strided.
    """
    if isinstance(thing, Slice):
        return thing
    if not _is_distributed(thing):
        return None
    local = thing.to_local()
    start, shape = [0] * thing.ndim, list(thing.shape)
    mesh = thing.device_mesh
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(thing.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise TypeError(f"expected a tensor of Shard and Replicate, got {thing.placements}")
        # As torch.chunk cuts: all as long as the first, but for the last ones.
        each = -(-shape[placement.dim] // mesh.size(axis))
        first = min(coordinate[axis] * each, shape[placement.dim])
        start[placement.dim] += first
        shape[placement.dim] = min(each, shape[placement.dim] - first)
    if tuple(shape) != tuple(local.shape):
        raise TypeError(f"expected {shape} elements on this rank, got {list(local.shape)}")
    return Slice(local, tuple(start), tuple(thing.shape))


def dtensor_like(tensor: Any, local: Any) -> Any:
    """Make a distributed tensor of this rank's part, cut as another one is."""
    made = local.to(tensor.to_local().device)
    return type(tensor).from_local(
        made,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class PartialReads:
    """Which arrays of a checkpoint this rank wants only in part, by what its program has.

    Args:
        things: by name, as `Saver` has them.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        self._exact: dict[str, Any] = {}  # name of an array -> what has a part of it
        self._states: dict[str, Any] = {}  # where states of a parameter stand -> the parameter
        for name, thing in things.items():
            self._look(thing, name)

    @property
    def names(self) -> list[str]:
        """Of arrays that this rank has a part of, and of parameters that its optimizer has."""
        return [*self._exact, *self._states]

    def of(self, name: str) -> Any:
        """Return what has a part of an array, or is a parameter to whose state it belongs."""
        return self._exact.get(name, self._states.get(name.rpartition("/")[0]))

    def box(self, name: str, shape: tuple[int, ...]) -> Box | None:
        """Return which elements of an array this rank wants; None for all."""
        part = slice_of(self.of(name))
        return None if part is None or part.shape != shape else part.box

    def _look(self, thing: Any, name: str) -> None:
        kind = kinds.protocol_of(thing)
        if kind is not None:
            if kind.methods[0] == "state_dict":
                self._look_at_state(thing, name)
        elif slice_of(thing) is not None:
            self._exact[name] = thing
        elif isinstance(thing, Mapping):
            for key, value in thing.items():
                self._look(value, f"{name}/{key}")
        elif (parts := kinds.parts_of(thing)) is not None:
            label = kinds.labels(thing)
            for index, value in enumerate(parts):
                self._look(value, f"{name}/{label(index)}")

    def _look_at_state(self, thing: Any, name: str) -> None:
        groups = getattr(thing, "param_groups", None)
        if groups is None:
            state = thing.state_dict() if hasattr(thing, "parameters") else {}
            self._exact |= {f"{name}/{key}": x for key, x in state.items() if _is_distributed(x)}
            return
        # An optimizer that has made no step has no states yet, but as many places for them.
        parameters = [parameter for group in groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            if _is_distributed(parameter):
                self._states[f"{name}/state/{number}"] = parameter


def _is_distributed(thing: Any) -> bool:
    """Whether it is a distributed tensor, of which there is none unless its module is there."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(thing, module.DTensor)
