"""`Saver`: saves and restores the objects of a program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from strategies import errors
from strategies.checkpoint import serialization
from strategies.checkpoint import state_protocols as kinds
from strategies.checkpoint.checkpoint_manager import CheckpointManager
from strategies.checkpoint.distributed_tensors import PartialReads
from strategies.checkpoint.remote_state import RemoteState, with_remote_states
from strategies.checkpoint.restoring import Put, restore_into
from strategies.checkpoint.storage import Location
from strategies.core.process_group import ProcessGroup

__all__ = ["Saver"]

_THINGS = "things"
"""Key in the metadata of a checkpoint for the JSON of the objects."""


class Saver:
    """Saves modules, optimizers, schedules, inputs, generators, pytrees and plain values.

    Objects with state are saved and restored by their own methods: `state_dict` and
    `load_state_dict`, variables, `ShardedInput`, generators of NumPy, PyTorch and Python (also the
    module `random`). Arrays of NumPy and PyTorch are restored in place. Pass values that cannot
    change in place, such as arrays of JAX, numbers and text, to each `save`, and read them as
    `saver[name]` after `restore`. Dicts, lists, tuples and containers of JAX may hold all of these.
    Nothing is pickled, and arrays have readable names in the file.

    Replicas are equal, so rank 0's objects are saved. Generators and random keys of JAX are saved
    per rank if they differ; a rank that the save lacked keeps the state of its program. If the
    checkpoints are sharded, all ranks write, and objects may be parts: a `Slice`, distributed
    tensors of PyTorch (DTensor), modules and optimizers that contain them. All methods but
    `saver[name]` are *collective*. If the manager is sharded without ranks, the ps tasks of a
    `ParameterServerStrategy` among the objects, also inside containers, write its variables in one
    version, and read them.

    Args:
        checkpoints: manager that stores the checkpoints; its ranks call the methods.
        things: the objects to save, by name.

    Raises:
        ValueError: there is nothing to save, or an object has the name "metric".

    Example:
        >>> import tempfile, numpy as np, strategies
        >>> weights, rng = np.zeros(2), np.random.default_rng(1)
        >>> checkpoints = strategies.CheckpointManager(tempfile.mkdtemp())
        >>> saver = Saver(checkpoints, weights=weights, rng=rng, epoch=0)
        >>> path = saver.save(1, epoch=1)
        >>> numbers, weights[:] = rng.random(3), 7
        >>> saver.restore(), saver["epoch"], weights.tolist()
        (1, 1, [0.0, 0.0])
        >>> bool((rng.random(3) == numbers).all())
        True
    """

    def __init__(self, checkpoints: CheckpointManager, /, **things: Any) -> None:
        if not things or "metric" in things:
            raise ValueError(
                f"Saver: expected objects by name, as model=model, except metric, which is an "
                f"argument of save, got {', '.join(things) or 'nothing to save'}"
            )
        self._checkpoints = checkpoints
        self._ranks = ProcessGroup(checkpoints.comm)
        self._things = things

    @property
    def checkpoints(self) -> CheckpointManager:
        """The checkpoint manager."""
        return self._checkpoints

    def __getitem__(self, name: str) -> Any:
        """Return the object of a name, as last passed to `save` or restored."""
        return self._things[name]

    def __contains__(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        return name in self._things

    def arrays(self) -> Iterator[Any]:
        """Yield the arrays of all objects, without copies."""
        yield from serialization.serialize(self._things, None)[0].values()

    def save(self, step: int, /, *, metric: float | None = None, **new: Any) -> Location:
        """Write a checkpoint of the current state of all objects.

        Args:
            step: training step, >= 0.
            metric: quality of the model, for the rule `best` of the manager.
            new: name -> new object, for names whose object was replaced.

        Returns:
            The directory of the checkpoint.

        Raises:
            InvalidArgumentError: a name is unknown, or an object cannot be stored; names its place.
            OpError: as `CheckpointManager.save`; on all ranks.
        """
        remote: list[RemoteState] = []

        def collected() -> tuple[serialization.Arrays, Any]:
            unknown = new.keys() - self._things.keys()
            if unknown:
                raise errors.InvalidArgumentError(
                    f"save: unknown {', '.join(sorted(unknown))}, expected names passed to Saver, "
                    f"{', '.join(self._things)}"
                )
            self._things |= new
            # On all ranks, because comparing their generators is collective.
            things = self._things
            if self._checkpoints.asks_tasks:
                things = with_remote_states(things, remote)
            found, nodes = serialization.serialize(things, self._ranks.comm)
            # They took part in `serialize`, but need no copies from the device.
            if self._ranks.rank and not self._checkpoints.sharded:
                return {}, {}  # rank 0 writes
            return {name: kinds.to_host(array) for name, array in found.items()}, nodes

        # A failure on one rank raises on all ranks before the collective save.
        try:
            tensors, nodes = self._ranks.run_then_agree("save: collect", collected)
            metadata = {_THINGS: nodes}
            return self._checkpoints.save(tensors, step=step, metadata=metadata, metric=metric)
        except BaseException:
            # Otherwise the tasks would keep the state; after a save the manager releases it.
            for state in remote:
                state.close()
            raise

    def restore(self, path: str | os.PathLike[str] | None = None) -> int | None:
        """Restore the newest complete checkpoint, if there is one.

        Contents of the checkpoint without an object of that name are ignored.

        Args:
            path: another checkpoint, such as `checkpoints.best()`, as rank 0 sees it.

        Returns:
            The step of the checkpoint; None without a checkpoint, and nothing has changed.

        Raises:
            NotFoundError: the checkpoint lacks one of the names.
            InvalidArgumentError: containers, shapes or dtypes differ from those of the objects, or
                `Saver` did not write the checkpoint; no object has changed.
            OpError: as `CheckpointManager.restore_or_none`; the error of a ps task names it, and no
                object has changed.
            Exception: the error of an object's own method, such as that of a module with layers of
                other sizes; objects may have changed. All errors are raised on all ranks.
        """
        remote = self._checkpoints.asks_tasks
        parts = self._ranks.run_then_agree(
            "restore: look", lambda: PartialReads(self._things, remote=remote)
        )
        try:
            return self._restore(path, parts)
        finally:
            for restore in parts.restores.values():
                restore.close()

    def _restore(self, path: str | os.PathLike[str] | None, parts: PartialReads) -> int | None:
        found = self._checkpoints.restore_or_none(path, slices=parts.box, unread=parts.is_remote)
        if found is None:
            return None

        def compared() -> tuple[dict[str, Any], list[Put]]:
            nodes = found.metadata.get(_THINGS)
            if not isinstance(nodes, dict):
                raise errors.InvalidArgumentError(
                    f"restore: not a checkpoint of Saver, expected {_THINGS!r} in its metadata, "
                    f"got {list(found.metadata)} (checkpoint: {found.path})"
                )
            result = restore_into(nodes, found.tensors, self._things, self._ranks.comm, parts)
            # After all else has been compared, because this takes the longest.
            for restore, names in parts.chosen:
                restore.read(names, found.tensors, found.path, found.manifest)
            return result

        def change() -> None:
            for put in puts:
                put()

        # Compare on all ranks before any rank changes an object, so that a mismatch on one rank
        # leaves all objects untouched.
        new, puts = self._ranks.run_then_agree("restore: compare", compared)
        self._ranks.run_then_agree("restore: change", change)
        # At last, because an error above must leave the old objects in place.
        self._things |= new
        return found.step
