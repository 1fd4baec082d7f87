"""A named array that training changes, on all replicas alike or on each for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from strategies.checks import choice
from strategies.replicas import context, reductions
from strategies.replicas.context import Meeting, ReplicaStrategy
from strategies.variables.partition import check_shape

__all__ = ["Aggregation", "Synchronization", "Variable"]

Array = npt.NDArray[Any]
Synchronization = Literal["auto", "on_write", "on_read"]
Aggregation = Literal["none", "sum", "mean", "only_first_replica"]


class Variable:
    """An array with a name, a fixed shape and a fixed dtype; strategies make them.

    There are two kinds. What is written to an "on_write" variable inside a replica is combined over
    all replicas, in the way of its aggregation, so that it is the same on all of them; its replicas
    in one process share one array. An "on_read" variable has an array for each replica, which
    writes to its own; they are combined when the variable is read outside of replicas.

    Args:
        initial_value: shape (...), copied.
        name: what checkpoints and errors call it.
        dtype: of the variable, that of `initial_value` if None.
        synchronization: "on_write", which is also "auto", or "on_read".
        aggregation: how values of different replicas are combined: "sum", "mean",
            "only_first_replica", or "none" if there is no way.
        strategy: whose replicas have it; None for an array that knows nothing of replicas.

    Raises:
        ValueError: no such synchronization or aggregation, or the mean of integers.
    """

    __slots__ = ("_components", "_read_only", "aggregation", "name", "strategy", "synchronization")

    def __init__(
        self,
        initial_value: npt.ArrayLike,
        *,
        name: str,
        dtype: Any = None,
        synchronization: Synchronization = "auto",
        aggregation: Aggregation = "none",
        strategy: ReplicaStrategy | None = None,
    ) -> None:
        value = np.array(initial_value, dtype=dtype)
        self.name = name
        self.strategy = strategy
        kind = _chosen("synchronization", synchronization, Synchronization)
        self.synchronization = "on_write" if kind == "auto" else kind
        self.aggregation = _chosen("aggregation", aggregation, Aggregation)
        if self.aggregation == "mean" and value.dtype.kind in "biu":
            raise ValueError(
                f"variable: integers have no mean of their dtype, expected another aggregation or "
                f"a float dtype, got {value.dtype} (variable: {name})"
            )
        local = 1 if strategy is None else len(strategy.devices)
        count = local if self.synchronization == "on_read" else 1
        self._components: list[Array] = [value, *(value.copy() for _ in range(count - 1))]
        # Where replicas share an array, none of them may change it alone.
        self._read_only: Array | None = None
        if local > count:
            self._read_only = value.view()
            self._read_only.flags.writeable = False

    def __repr__(self) -> str:
        return f"Variable(name={self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.value, dtype=dtype, copy=copy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self._components[0].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value."""
        return self._components[0].dtype

    @property
    def components(self) -> tuple[Array, ...]:
        """The arrays of this process: one for each replica if "on_read", else one for all."""
        return tuple(self._components)

    @property
    def value(self) -> Array:
        """The array; a change in place outside of replicas changes the variable.

        Inside a replica: its own array. The one of an "on_write" variable is read-only where a
        process has several replicas.

        Of an "on_read" variable outside of replicas: a new array, combined over all replicas;
        *collective* over the ranks.

        Raises:
            ValueError: the variable is "on_read" with aggregation "none".
        """
        replica = self._replica()
        if self.synchronization == "on_read":
            return self._combined() if replica is None else self._components[replica.local_id]
        if replica is None or self._read_only is None:
            return self._components[0]
        return self._read_only

    def assign(self, value: npt.ArrayLike) -> None:
        """Copy `value` into the variable.

        Inside a replica, an "on_write" variable takes what the replicas' values combine to, and the
        call is *collective* over all replicas. Outside, the variable takes `value` on this rank,
        which is to be the same on all; an "on_read" one with "sum" shares it among the replicas.

        Raises:
            ValueError: it has another shape; or replicas write an "on_write" variable without an
                aggregation.
            TypeError: its dtype cannot be cast without changing its kind.
        """
        array = self._checked(value, "assign")

        def write(component: Array, new: Array) -> None:
            component[...] = new

        if self._summed_from_outside:
            self._assign_shares(array)
        else:
            self._write("assign", array, write)

    def assign_add(self, delta: npt.ArrayLike) -> None:
        """Add `delta`, of the variable's shape; otherwise as `assign`.

        Raises:
            ValueError: as `assign`; or an "on_read" variable with "sum" is added to outside of
                replicas, where it is not clear to which.
        """
        self._add("assign_add", self._checked(delta, "assign_add"))

    def assign_sub(self, delta: npt.ArrayLike) -> None:
        """Subtract `delta`; otherwise as `assign_add`."""
        self._add("assign_sub", -self._checked(delta, "assign_sub"))

    def _add(self, operation: str, delta: Array) -> None:
        def write(component: Array, new: Array) -> None:
            component[...] += new

        if self._summed_from_outside:
            raise ValueError(
                f"{operation}: an on_read variable with aggregation 'sum' is changed outside of "
                f"replicas, expected assign, or a call inside a replica (variable: {self.name})"
            )
        self._write(operation, delta, write)

    @property
    def _alone(self) -> bool:
        return self.strategy is None or self.strategy.num_replicas_in_sync == 1

    @property
    def _summed_from_outside(self) -> bool:
        """Whether this is a sum over several replicas, and no replica is running."""
        summed = (self.synchronization, self.aggregation) == ("on_read", "sum")
        return summed and not self._alone and self._replica() is None

    def _replica(self) -> context.ReplicaContext | None:
        """The replica that runs in this thread."""
        top = context.current()
        return top.replica if top is not None and top.strategy is self.strategy else None

    def _checked(self, value: npt.ArrayLike, operation: str) -> Array:
        array = np.asarray(value)
        check_shape(operation, array, self.shape, self.name)
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(
                f"{operation}: the value has the wrong dtype, expected {self.dtype}, got "
                f"{array.dtype} (variable: {self.name})"
            )
        return array.astype(self.dtype, copy=False)

    def _write(self, operation: str, new: Array, write: Callable[[Array, Array], None]) -> None:
        replica = None if self._alone else self._replica()
        if replica is None:
            for component in self._components:
                write(component, new)
        elif self.synchronization == "on_read":
            write(self._components[replica.local_id], new)
        elif self.aggregation == "none":
            raise ValueError(
                f"{operation}: replicas write a variable without an aggregation, so that their "
                f"copies would differ, expected aggregation 'sum', 'mean' or 'only_first_replica' "
                f"(variable: {self.name})"
            )
        else:

            def merge(values: list[Any]) -> list[Any]:
                assert self.strategy is not None
                combined = self._aggregated(values)
                self.strategy.update([self], lambda: write(self._components[0], combined))
                return [None] * len(values)

            replica.meet(Meeting(f"{operation} {self.name}", new, merge))

    def _combined(self) -> Array:
        """The value of an "on_read" variable outside of replicas."""
        if self._alone:
            return self._components[0]
        if self.aggregation == "none":
            raise ValueError(
                f"value: an on_read variable without an aggregation is read outside of replicas, "
                f"expected aggregation 'sum', 'mean' or 'only_first_replica' (variable: "
                f"{self.name})"
            )
        combined = self._aggregated(self._components)
        return combined.copy() if combined is self._components[0] else combined

    def _aggregated(self, values: list[Any]) -> Array:
        assert self.strategy is not None
        ranks = self.strategy.ranks
        if self.aggregation == "only_first_replica":
            result: Array = ranks.of_chief(values[0])
        else:
            op = reductions.parse_op(self.aggregation, "variable")
            result = reductions.reduce(ranks, op, values)
        return result

    def _assign_shares(self, total: Array) -> None:
        """Give every replica a share, so that the sum over all is `total`."""
        assert self.strategy is not None
        count = self.strategy.num_replicas_in_sync
        share = total // count if self.dtype.kind in "iu" else total / count
        for component in self._components:
            component[...] = share
        if self.strategy.first_replica_id == 0 and self.dtype.kind in "iu":
            self._components[0][...] += total - share * count  # what cannot be divided


def _chosen(what: str, word: str, words: Any) -> str:
    """Return a word in small letters."""
    return str(choice("variable", what, word.lower() if isinstance(word, str) else word, words))
