"""Creation of variables on ps tasks.

::

    initial value   the chief's, sent to all tasks; each ps takes its rows
    initializer     each ps makes its rows, and nobody else any
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

__all__ = ["VariableFactory", "VariableSpec", "refuse_no_optimizer", "wanted"]

Array = npt.NDArray[Any]
Initializer = Callable[..., npt.ArrayLike]
Piece = Array | Callable[[], Array]


class VariableSpec(NamedTuple):
    """A variable as its maker describes it.

    Attributes:
        name: of it.
        shape: of the whole.
        dtype: of the whole.
        number: of the parts into which it is cut.
        value: what this task would have it start from; None if there is an initializer.
        initializer: (first row, last row, shape, dtype) -> rows.
        seen: makes of it what replicas compute with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    number: int
    value: Array | None
    initializer: Initializer
    seen: ReplicaView

    def rows(self, first: int, last: int) -> Array:
        """Return some rows, as the initializer makes them, in memory that nobody else has.

        Raises:
            ValueError: it makes others than these.
        """
        rows = take_ownership(
            lambda: to_host(self.initializer(first, last, self.shape, self.dtype)), self.dtype
        )
        partition.check_shape("variable", rows, (last - first, *self.shape[1:]), self.name)
        return rows


class VariableFactory:
    """Makes the variables of a strategy; all tasks call it alike.

    Args:
        cluster: of the tasks.
        ranks: all of them.
        shard: what this ps holds, if it is one.
        variables: name -> variable, those that are there.
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
            strategy: whose it is.
            name: of it.
            described: looks at what this task was given.
            resident: whether workers have a copy.

        Returns:
            The variable, and what each of its parts starts from.
        """
        call = f"variable {name}"
        wanted = self._ranks.run_then_agree(call, described)
        parts = self._ranks.run_then_agree(call, lambda: self._cut_parts(wanted))
        self._ranks.agree(f"variable {name} {wanted.dtype} {wanted.shape} {parts} {resident}")
        copy = value = wanted.value
        if value is not None:
            first = value
            copy = value = self._ranks.raise_together(
                "variable", lambda: self._cluster.comm.broadcast(first, root=self._chief)
            )
        elif resident:
            copy = self._ranks.run_then_agree(call, lambda: wanted.rows(0, wanted.shape[0]))
        own = copy if resident else None
        variable = ServedVariable(
            name, wanted.shape, wanted.dtype, parts, strategy, own, wanted.seen
        )
        if value is not None:
            return variable, variable.pieces(value)
        ends = itertools.pairwise(variable.offsets)
        return variable, [partial(wanted.rows, first, last) for first, last in ends]

    def _cut_parts(self, wanted: VariableSpec) -> list[Part]:
        """Return the parts of a new variable."""
        name = wanted.name
        parts = parts_of(name, wanted.shape, wanted.dtype, wanted.number, self._choice)
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
        """On a ps: take over its parts of a variable; *collective*.

        All of them are made before any ps has one, so that an initializer that fails leaves nothing
        behind.

        Args:
            variable: from `make`.
            pieces: likewise.
            optimizer: of which each part gets a copy.
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
                self._shard.add(name, piece, optimizer=optimizer, resident=variable.resident)

        self._ranks.run_then_agree(f"variable {variable.name} is there", take)


def _as_function(piece: Piece) -> Piece:
    """Return what a part starts from; if it was still to be made, as a function that is done."""
    if not callable(piece):
        return piece
    made = [piece()]
    return made.pop  # holds it no longer: an update copies what others hold


def refuse_no_optimizer(name: str, optimizer: Optimizer | None) -> None:
    """Refuse a variable of which nobody has said how it is updated.

    Raises:
        ValueError: this is one.
    """
    if optimizer is None:
        raise ValueError(
            f"variable: nobody has said how it is updated, expected an optimizer of the strategy "
            f"or of the variable, or DistributedOptimizer(..., strategy=strategy) before, got none "
            f"(variable: {name})"
        )


def wanted(
    name: str,
    initial_value: Any,
    dtype: Any,
    shape: Sequence[int] | None,
    partitioner: Partitioner | None,
) -> VariableSpec:
    """Take in what `ParameterServerStrategy.variable` is given.

    Raises:
        ValueError: the partitioner's answer, or the shape of an initializer, is of no use.
    """
    given: Any = initial_value
    of_torch = str(dtype).startswith("torch.")
    kind = str(dtype).removeprefix("torch.") if of_torch else dtype
    value = None
    if shape is None:
        given = given() if callable(given) else given
        value = np.array(to_host(given), dtype=kind)
        sizes, found = value.shape, value.dtype
    else:
        sizes, found = _checked_shape(given, shape, name), np.dtype(kind or np.float32)
    number = number_of_parts(name, sizes, found, partitioner)
    return VariableSpec(name, sizes, found, number, value, initial_value, ReplicaView(given))


def _checked_shape(initializer: Any, shape: Sequence[int], name: str) -> tuple[int, ...]:
    """Return the shape that an initializer is to fill."""
    sizes = tuple(map(operator.index, shape))
    if not callable(initializer) or not sizes or min(sizes) < 0:
        raise ValueError(
            f"variable: expected an initializer, and a shape of at least one axis, got "
            f"{type(initializer).__name__} and {sizes} (variable: {name})"
        )
    return sizes
