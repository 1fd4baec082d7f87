"""State that other tasks hold, write and read, such as that of variables on ps tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from strategies.checkpoint.manifest import Manifest, SliceEntry
from strategies.checkpoint.storage import Location
from strategies.core import pytree

__all__ = [
    "RemoteRestore",
    "RemoteState",
    "RemoteTensor",
    "Written",
    "remote_restore_of",
    "with_remote_states",
]


class Written(NamedTuple):
    """A written file of a checkpoint.

    Attributes:
        file: its name.
        nbytes: its length.
        shapes: tensor name -> dtype and shape of the whole tensor.
        slices: tensor name and manifest entry of each slice.
    """

    file: str
    nbytes: int
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    slices: list[tuple[str, SliceEntry]]


class RemoteState(Protocol):
    """One version of a state, which other tasks keep unchanged until `close`."""

    def names(self) -> Sequence[str]:
        """Return the names of its tensors, as in the `state_dict` of the object."""

    def write(
        self, names: Mapping[str, str], part: Location, suffix: str, *, gently: bool
    ) -> list[Written]:
        """Let each task write its slices to a file, and return the files.

        Args:
            names: name in the state -> name in the checkpoint.
            part: directory to write to, from the `CheckpointTransaction`.
            suffix: suffix of the files' names, from the `CheckpointTransaction`.
            gently: whether the tasks give precedence to training.

        Raises:
            OpError: the error of a task, with its name.
        """

    def close(self) -> None:
        """Release the state; harmless when repeated."""


@dataclass(frozen=True, eq=False)
class RemoteTensor:
    """A tensor of a `RemoteState`.

    Attributes:
        state: the state.
        name: name of the tensor in the state.
    """

    state: RemoteState
    name: str


class RemoteRestore(Protocol):
    """A restore of a state whose parts other tasks read from a checkpoint."""

    def is_large(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether only the tasks read a tensor, given by its name in the state."""

    def read(
        self,
        names: Mapping[str, str],
        tensors: Mapping[str, npt.NDArray[Any]],
        path: Location,
        plan: Manifest,
    ) -> None:
        """Compare the state with the objects, and let each task read its parts; changes nothing.

        Args:
            names: name in the state -> name in the checkpoint.
            tensors: the tensors of the checkpoint that are not large.
            path: the checkpoint.
            plan: its manifest.

        Raises:
            ValueError: names, shapes or dtypes differ.
            OpError: the error of a task, with its name.
        """

    def load(self) -> None:
        """Let all tasks load their parts."""

    def close(self) -> None:
        """Release what the tasks have read; harmless when repeated."""


def remote_restore_of(thing: Any) -> RemoteRestore | None:
    """Return a restore of an object whose state other tasks hold; None for others."""
    # Looked up in the class, as for the other protocols of objects that can be saved.
    make = getattr(type(thing), "remote_restore", None)
    return None if make is None else make(thing)


def with_remote_states(thing: Any, states: list[RemoteState]) -> Any:
    """Replace objects whose state other tasks hold by dicts of their tensors, also in containers.

    Args:
        thing: object of a program.
        states: list to which the states of these objects are added.
    """
    make = getattr(type(thing), "remote_state", None)
    if make is not None:
        state = make(thing)
        states.append(state)
        return {name: RemoteTensor(state, name) for name in state.names()}
    if isinstance(thing, Mapping):
        made = {key: with_remote_states(value, states) for key, value in thing.items()}
        return thing if all(made[key] is value for key, value in thing.items()) else made
    children = pytree.children_of(thing)
    if children is None:
        return thing
    parts = [with_remote_states(child, states) for child in children]
    same = all(new is old for new, old in zip(parts, children, strict=True))
    return thing if same else pytree.with_children(thing, parts)
