"""Restores by all ps tasks: each reads its parts from the files of a checkpoint.

The chief compares names, shapes and dtypes with the manifest, and decides about counts. All ps
tasks read and verify their parts before any of them changes a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strategies.checkpoint.manifest import DTYPES, Manifest
from strategies.checkpoint.storage import Location
from strategies.errors import DataLossError
from strategies.parameter_server import state_io
from strategies.parameter_server.task_requests import FILE_LIMIT, TaskRequests
from strategies.parameter_server.variable import ServedVariable
from strategies.rpc.wire import Array
from strategies.variables.variable_group import VariableState

__all__ = ["Restore"]


class Restore:
    """A state that the ps tasks read from a checkpoint and keep until `close`; see `RemoteRestore`.

    Args:
        requests: requests to the ps tasks.
        held: per ps, names of the parts in the order of their numbers.
        variables: the variables.
        like: returns name of a part -> current state, without elements.
        load: sends one load to each ps, given the facts of the message.
    """

    def __init__(
        self,
        requests: TaskRequests,
        held: Sequence[Sequence[str]],
        variables: Sequence[ServedVariable],
        like: Callable[[], Mapping[str, VariableState]],
        load: Callable[[Sequence[dict[str, Any]]], None],
    ) -> None:
        self._requests = requests
        self._held = held
        self._variables = variables
        self._like = like
        self._load = load

    def is_large(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether only the ps tasks read a tensor; see `RemoteRestore.is_large`."""
        # The name may be that of another object of the saver, such as "model/more".
        return name.startswith(("variable/", "optimizer/")) and state_io.is_large(name, shape)

    def read(
        self,
        names: Mapping[str, str],
        tensors: Mapping[str, Array],
        path: Location,
        plan: Manifest,
    ) -> None:
        """Let each ps read its parts; see `RemoteRestore.read`."""
        missing = set(names.values()) - plan.tensors.keys()
        if missing:
            raise DataLossError(
                f"restore: the checkpoint lacks arrays of its metadata, got no {sorted(missing)} "
                f"(checkpoint: {path})"
            )
        state = {
            # Arrays without memory have the shapes and dtypes to compare.
            name: tensors[stored]
            if stored in tensors
            else np.broadcast_to(np.zeros((), DTYPES[entry.dtype]), entry.shape)
            for name, stored in names.items()
            for entry in [plan.tensors[stored]]
        }
        states, updates = state_io.divided(state, self._variables, self._like(), len(self._held))
        told = [
            {
                # Absolute, because a ps may have another working directory.
                "path": str(path.absolute() if isinstance(path, Path) else path),
                "manifest": plan.identity(),
                "updates": count,
                "parts": parts,
            }
            for count, parts in zip(updates, self._parts(names, states), strict=True)
        ]
        self._requests.begin(self._requests.places)
        self._requests.ask("read", told, timeout=FILE_LIMIT)

    def load(self) -> None:
        """Let all ps tasks change their variables; see `RemoteRestore.load`."""
        self._load([self._requests.told] * len(self._held))

    def close(self) -> None:
        """Release what the ps tasks have read; harmless when repeated."""
        self._requests.close()

    def _parts(
        self, names: Mapping[str, str], states: Mapping[str, VariableState]
    ) -> list[list[Any]]:
        """Return per ps and part: counts; kind, tensor, start and shape of each array."""
        found: dict[str, list[Any]] = {}
        for variable in self._variables:
            for number, part in enumerate(variable.parts):
                state = states[part.name]
                arrays = [
                    [piece.kind, names[piece.name], piece.start, state.arrays[piece.kind].shape]
                    for piece in state_io.pieces(variable, number, state)
                    if piece.kind in state.arrays
                ]
                found[part.name] = [state.counts, arrays]
        return [[found[name] for name in held] for held in self._held]
