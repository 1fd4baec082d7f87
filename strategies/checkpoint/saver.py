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
from strategies.checkpoint.restoring import Put, restore_into
from strategies.checkpoint.storage import Location
from strategies.core.process_group import ProcessGroup

__all__ = ["Saver"]

_THINGS = "things"
"""Where in the metadata of a checkpoint the JSON of the things stands."""


class Saver:
    """Checkpoints of modules, optimizers, schedules, inputs, generators, trees and plain values.

    Things are taken as they are. Those with a state of their own give it and get it back: whatever
    has `state_dict` and `load_state_dict`, variables, `ShardedInput`, generators of NumPy, PyTorch
    and Python (also the module `random`). Arrays of NumPy and PyTorch get their numbers back in
    place. What cannot be changed in place, such as arrays of JAX, numbers and text, is handed over
    at each `save` and read as `saver[name]` after `restore`. Dicts, lists, tuples and containers of
    JAX may hold any of it. Nothing is pickled, and arrays have readable names in the file.

    Replicas are equal, so rank 0's things are saved; but of generators, and of random keys of JAX,
    each rank's where they differ. A rank that was not there keeps what its program gave it. Where
    the checkpoints are sharded all ranks write, and things may be parts: a `Slice`, distributed
    tensors of PyTorch (DTensor), modules and optimizers that have such. All methods but
    `saver[name]` are *collective*.

    Args:
        checkpoints: where to, and among which ranks.
        things: what to save, by name.

    Raises:
        ValueError: nothing to save, or a thing is called "metric".

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
                f"Saver: expected things by name, as model=model, and none called metric, which "
                f"is an argument of save, got {', '.join(things) or 'nothing to save'}"
            )
        self._checkpoints = checkpoints
        self._ranks = ProcessGroup(checkpoints.comm)
        self._things = things

    @property
    def checkpoints(self) -> CheckpointManager:
        """Where to, as given."""
        return self._checkpoints

    def __getitem__(self, name: str) -> Any:
        """Return a thing: the one that was given last, or restored since."""
        return self._things[name]

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a thing of this name."""
        return name in self._things

    def arrays(self) -> Iterator[Any]:
        """Give the arrays of all things as they are, one after the other."""
        yield from serialization.serialize(self._things, None)[0].values()

    def save(self, step: int, /, *, metric: float | None = None, **new: Any) -> Location:
        """Write a checkpoint of all things as they are now.

        Args:
            step: training step, >= 0.
            metric: how good the model is, for the rule `best` of the checkpoints.
            new: by their names, those things that are no longer the same objects.

        Returns:
            The directory of the checkpoint.

        Raises:
            InvalidArgumentError: a thing has no such name, or cannot be stored; the message says
                where it is.
            OpError: as `CheckpointManager.save`; on all ranks.
        """

        def collected() -> tuple[serialization.Arrays, Any]:
            unknown = new.keys() - self._things.keys()
            if unknown:
                raise errors.InvalidArgumentError(
                    f"save: unknown {', '.join(sorted(unknown))}, expected names that Saver was "
                    f"given, {', '.join(self._things)}"
                )
            self._things |= new
            found, nodes = serialization.serialize(self._things, self._ranks.comm)
            if self._ranks.rank and not self._checkpoints.sharded:
                return {}, {}  # rank 0 writes
            return {name: kinds.to_host(array) for name, array in found.items()}, nodes

        tensors, nodes = self._ranks.run_then_agree("save: collect", collected)
        metadata = {_THINGS: nodes}
        return self._checkpoints.save(tensors, step=step, metadata=metadata, metric=metric)

    def restore(self, path: str | os.PathLike[str] | None = None) -> int | None:
        """Go on from the newest complete checkpoint, if there is one.

        What the checkpoint holds of things that this saver was not given is passed over.

        Args:
            path: of another checkpoint, such as `checkpoints.best()`, as rank 0 sees it.

        Returns:
            The step of the checkpoint; None where there is none, and nothing has changed.

        Raises:
            NotFoundError: it does not hold one of the things.
            InvalidArgumentError: containers, shapes or dtypes are not those of the things, or the
                checkpoint is not one of `Saver`; no thing has changed.
            OpError: as `CheckpointManager.restore_or_none`.
            Exception: what a thing's own method answers, such as that of a module with layers of
                other sizes; things may have changed. All errors are raised on all ranks.
        """
        parts = self._ranks.run_then_agree("restore: look", lambda: PartialReads(self._things))
        found = self._checkpoints.restore_or_none(path, slices=parts.box)
        if found is None:
            return None

        def compared() -> tuple[dict[str, Any], list[Put]]:
            nodes = found.metadata.get(_THINGS)
            if not isinstance(nodes, dict):
                raise errors.InvalidArgumentError(
                    f"restore: not a checkpoint of Saver, expected {_THINGS!r} in its metadata, "
                    f"got {list(found.metadata)} (checkpoint: {found.path})"
                )
            return restore_into(nodes, found.tensors, self._things, self._ranks.comm, parts)

        def change() -> None:
            for put in puts:
                put()

        new, puts = self._ranks.run_then_agree("restore: compare", compared)
        self._ranks.run_then_agree("restore: change", change)
        self._things |= new
        return found.step
