"""Restores of one ps task: states that it has read from a checkpoint and not loaded yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.checkpoint import checkpoint, manifest, shards
from strategies.checkpoint.async_writer import AsyncWriter
from strategies.checkpoint.boxes import Box
from strategies.checkpoint.shards import Target
from strategies.checkpoint.storage import resolve
from strategies.errors import CancelledError, FailedPreconditionError
from strategies.rpc.server_requests import ServerRequest
from strategies.variables.variable_group import VariableState

__all__ = ["RestoreServer"]


class _Restore:
    """A restore of another task, from its request until this request ends.

    Attributes:
        work: the request, which has no reply.
        states: state of each variable, in order; empty before they are read.
        updates: number of updates.
    """

    def __init__(self, work: ServerRequest) -> None:
        self.work = work
        self.states: list[VariableState] = []
        self.updates = 0


class RestoreServer:
    """Restores of one ps task; for the thread of the variables."""

    def __init__(self) -> None:
        self._restores: dict[tuple[int, int], _Restore] = {}

    def begin(self, work: ServerRequest) -> None:
        """Begin a restore, which lasts until this request ends."""
        # Without a reply: the request ends with its task, so a dead chief leaves no arrays.
        self._restores[_key(work)] = _Restore(work)

    def read(self, work: ServerRequest) -> None:
        """Read and verify the states of all variables in a thread, then reply."""
        restore = self._find(work)

        def read() -> None:
            try:
                restore.states = _states(work.arguments)
                restore.updates = work.arguments["updates"]
            except BaseException as error:  # its thread has no caller
                work.fail(error)
                return
            work.reply()

        AsyncWriter().start(read)

    def take(self, work: ServerRequest) -> tuple[list[VariableState], int]:
        """Return the states that were read, and the number of updates."""
        restore = self._find(work)
        return restore.states, restore.updates

    def end(self, work: ServerRequest) -> None:
        """Drop the states if this is the request that began the restore."""
        restore = self._restores.get(_key(work)) if "restore" in work.arguments else None
        if restore is not None and restore.work is work:
            del self._restores[_key(work)]

    def _find(self, work: ServerRequest) -> _Restore:
        if _key(work) not in self._restores:
            raise CancelledError("restore: it has ended")
        return self._restores[_key(work)]


def _key(work: ServerRequest) -> tuple[int, int]:
    return work.source, work.arguments["restore"]


def _states(told: Mapping[str, Any]) -> list[VariableState]:
    path = resolve(told["path"])
    plan = manifest.read(path)
    if plan.identity() != told["manifest"]:
        raise FailedPreconditionError(
            f"restore: this task sees another checkpoint than the chief, expected a directory that "
            f"all tasks share (checkpoint: {path})"
        )
    states, targets = [], []
    for counts, arrays in told["parts"]:
        state = VariableState(counts, {})
        for kind, name, start, shape in arrays:
            array = shards.empty(name, tuple(shape), plan.tensors[name].dtype)
            state.arrays[kind] = array
            targets.append((name, Target(Box(tuple(start), array.shape), array)))
        states.append(state)
    checkpoint.fill(path, plan, targets)
    return states
