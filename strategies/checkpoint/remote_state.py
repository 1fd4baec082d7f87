"""State that other tasks hold and write, such as that of variables on ps tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from strategies.checkpoint.manifest import SliceEntry
from strategies.checkpoint.storage import Location

__all__ = ["RemoteState", "RemoteTensor", "Written", "remote_state_of"]


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


def remote_state_of(thing: Any) -> RemoteState | None:
    """Return the current state of an object whose state other tasks hold; None for others."""
    # Looked up in the class, as for the other protocols of objects that can be saved.
    make = getattr(type(thing), "remote_state", None)
    return None if make is None else make(thing)
