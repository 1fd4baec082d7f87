"""Creation of variables on ps tasks.

::

    initial value   broadcast from the chief to all tasks; each ps keeps its rows
    initializer     each ps creates its own rows only
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies.cluster.cluster import Cluster
from strategies.cluster.scopes import PlacementRequest
from strategies.core.process_group import ProcessGroup
from strategies.optimizers import Optimizer
from strategies.parameter_server.server import ParameterServer
from strategies.parameter_server.variable import (
    Owner,
    Part,
    ServedVariable,
    number_of_parts,
    parts_of,
)
from strategies.replicas.replica_view import ReplicaView, to_host
from strategies.variables import partition
from strategies.variables.array_input import take_ownership
from strategies.variables.partition import Partitioner

__all__ = ["VariableFactory", "VariableSpec", "wanted"]

Array = npt.NDArray[Any]
Initializer = Callable[..., npt.ArrayLike]
Piece = Array | Callable[[], Array]


class VariableSpec(NamedTuple):
    """Description of a variable to create.

    Attributes:
        name: name of the variable.
        shape: shape of the whole.
        dtype: dtype of the whole.
        number: number of parts.
        value: initial value on this task; None with an initializer.
        initializer: (first row, last row, shape, dtype) -> rows.
        seen: converts the copy for replicas.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    number: int
    value: Array | None
    initializer: Initializer
    seen: ReplicaView

    def rows(self, first: int, last: int) -> Array:
        """Return rows from the initializer, in memory without other references.

        Raises:
            ValueError: the initializer returns rows of the wrong shape.
        """
        rows = take_ownership(
            lambda: to_host(self.initializer(first, last, self.shape, self.dtype)), self.dtype
        )
        partition.check_shape("variable", rows, (last - first, *self.shape[1:]), self.name)
        return rows


class VariableFactory:
    """Create the variables of a strategy; *collective*: all tasks make the same calls.

    Args:
        cluster: cluster of the tasks.
        ranks: all tasks.
        shard: parameter server of this task, on ps tasks.
        variables: name -> existing variable.
        choice: `PlacementRequest` -> index of the ps for a part.
    """

    def __init__(
        self,
        cluster: Cluster,
        ranks: ProcessGroup,
        shard: ParameterServer | None,
        variables: Mapping[str, ServedVariable],
        choice: Callable[[PlacementRequest], int],
    ) -> None:
        self._cluster = cluster
        self._chief = cluster.training_ranks[0]
        self._servers = tuple(cluster.ranks_of("ps"))
        self._ranks = ranks
        self._shard = shard
        self._variables = variables
        self._choice = choice

    def make(
        self, strategy: Owner, name: str, described: Callable[[], VariableSpec], *, resident: bool
    ) -> tuple[ServedVariable, Sequence[Piece]]:
        """Agree on a new variable; *collective*.

        Args:
            strategy: strategy of the variable.
            name: name of the variable.
            described: returns the description from this task's arguments.
            resident: whether workers have a copy.

        Returns:
            The variable, and the initial value of each part.
        """
        call = f"variable {name}"
        wanted = self._ranks.run_then_agree(call, described)
        # After all tasks have a description: `choice` may count its calls, which must be equal.
        parts = self._ranks.run_then_agree(call, lambda: self._cut_parts(wanted))
        # Before the broadcast, which requires equal shapes and dtypes.
        self._ranks.agree(f"variable {name} {wanted.dtype} {wanted.shape} {parts} {resident}")
        copy = value = wanted.value
        if value is not None:
            first = value
            # Replaces the own value on all tasks, also on the chief, by the one that was broadcast.
            copy = value = self._ranks.raise_together(
                "variable", lambda: self._cluster.comm.broadcast(first, root=self._chief)
            )
        elif resident:
            # Every task computes its copy, without messages.
            copy = self._ranks.run_then_agree(call, lambda: wanted.rows(0, wanted.shape[0]))
        own = copy if resident else None
        variable = ServedVariable(
            name, wanted.shape, wanted.dtype, parts, strategy, own, wanted.seen
        )
        if value is not None:
            return variable, variable.pieces(value)
        # Functions rather than arrays: each ps calls only those of its own parts.
        ends = itertools.pairwise(variable.offsets)
        return variable, [partial(wanted.rows, first, last) for first, last in ends]

    def _cut_parts(self, wanted: VariableSpec) -> list[Part]:
        """Return the parts of a new variable."""
        name = wanted.name
        parts = parts_of(name, wanted.shape, wanted.dtype, wanted.number, self._choice)
        # A variable may be named like a part of another one, such as `w/part_0`.
        taken = {part.name for known in self._variables.values() for part in known.parts}
        if both := taken & {part.name for part in parts}:
            raise ValueError(
                f"variable: a part of it has a name that is taken, expected new ones, got "
                f"{sorted(both)} (variable: {name})"
            )
        return parts

    def hold(
        self, variable: ServedVariable, pieces: Sequence[Piece], optimizer: Optimizer | None
    ) -> None:
        """Store the parts of a variable on their ps tasks; *collective*.

        All parts are created before the first is stored, so that a failing initializer leaves no
        partial variable.

        Args:
            variable: from `make`.
            pieces: from `make`.
            optimizer: optimizer; each part gets a copy.
        """
        own = self._cluster.comm.rank
        mine = [
            (part.name, piece)
            for part, piece in zip(variable.parts, pieces, strict=True)
            if self._shard is not None and self._servers[part.task] == own
        ]
        made = self._ranks.run_then_agree(
            f"variable {variable.name} is made",
            lambda: [(name, _as_function(piece)) for name, piece in mine],
        )

        def take() -> None:
            for name, piece in made:
                assert self._shard is not None
                self._shard.values.add(name, piece, optimizer, resident=variable.resident)

        # No task returns before all parts exist, so that no push arrives too early.
        self._ranks.run_then_agree(f"variable {variable.name} is there", take)


def _as_function(piece: Piece) -> Piece:
    """Return the initial value of a part; a computed value as a function that releases it."""
    if not callable(piece):
        return piece
    made = [piece()]
    return made.pop  # keeps no reference: with one, the first update would copy the value


def wanted(
    name: str,
    initial_value: Any,
    dtype: Any,
    shape: Sequence[int] | None,
    partitioner: Partitioner | None,
) -> VariableSpec:
    """Check the arguments of `ParameterServerStrategy.variable`.

    Raises:
        ValueError: the result of the partitioner or the shape of an initializer is invalid.
    """
    given: Any = initial_value
    # By name, so that PyTorch need not be imported.
    of_torch = str(dtype).startswith("torch.")
    kind = str(dtype).removeprefix("torch.") if of_torch else dtype
    value = None
    if shape is None:
        given = given() if callable(given) else given
        # A copy, so that the variable never shares memory with the caller's array.
        value = np.array(to_host(given), dtype=kind)
        sizes, found = value.shape, value.dtype
    else:
        sizes, found = _checked_shape(given, shape, name), np.dtype(kind or np.float32)
    number = number_of_parts(name, sizes, found, partitioner)
    return VariableSpec(name, sizes, found, number, value, initial_value, ReplicaView(given))


def _checked_shape(initializer: Any, shape: Sequence[int], name: str) -> tuple[int, ...]:
    """Return the shape for an initializer."""
    sizes = tuple(map(operator.index, shape))
    if not callable(initializer) or not sizes or min(sizes) < 0:
        raise ValueError(
            f"variable: expected an initializer, and a shape of at least one axis, got "
            f"{type(initializer).__name__} and {sizes} (variable: {name})"
        )
    return sizes
