"""`Variable`: a named array, mirrored or local per replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import array_api_compat
import numpy as np
import numpy.typing as npt

from strategies.core import array_ops
from strategies.core.validation import choice
from strategies.replicas import context, local_array, reductions
from strategies.replicas.context import ReplicaStrategy, SyncPoint
from strategies.variables.partition import check_shape

__all__ = ["Aggregation", "Synchronization", "Variable"]

Array = npt.NDArray[Any]
Synchronization = Literal["auto", "on_write", "on_read"]
Aggregation = Literal["none", "sum", "mean", "only_first_replica"]
Change = Callable[[Any, Any], Any]  # what becomes of an array, and how


class Variable:
    """An array with a name, a fixed shape and a fixed dtype; strategies make them.

    There are two kinds. What is written to an "on_write" variable inside a replica is combined over
    all replicas, in the way of its aggregation, so that it is the same on all of them; replicas of
    one process share one array where they are on one device. An "on_read" variable has an array for
    each replica, which writes to its own; they are combined when the variable is read outside of
    replicas.

    Args:
        initial_value: shape (...), copied. The variable is of the library of this array; of NumPy
            if it is none, or of the library of the device that the strategy has been given.
        name: what checkpoints and errors call it.
        dtype: of the variable, that of `initial_value` if None.
        synchronization: "on_write", which is also "auto", or "on_read".
        aggregation: how values of different replicas are combined: "sum", "mean",
            "only_first_replica", or "none" if there is no way.
        strategy: whose replicas have it; None for an array that knows nothing of replicas.

    Raises:
        ValueError: no such synchronization or aggregation, or the mean of integers; or the library
            of the initial value has no such device.
    """

    __slots__ = (
        "_components", "_place", "_shown", "aggregation", "name", "strategy", "synchronization",
    )  # fmt: skip

    def __init__(
        self,
        initial_value: Any,
        *,
        name: str,
        dtype: Any = None,
        synchronization: Synchronization = "auto",
        aggregation: Aggregation = "none",
        strategy: ReplicaStrategy | None = None,
    ) -> None:
        value = local_array.copied(initial_value, dtype)
        self.name = name
        self.strategy = strategy
        kind = _chosen("synchronization", synchronization, Synchronization)
        self.synchronization = "on_write" if kind == "auto" else kind
        self.aggregation = _chosen("aggregation", aggregation, Aggregation)
        if self.aggregation == "mean" and local_array.is_whole(value):
            raise ValueError(
                f"variable: integers have no mean of their dtype, expected another aggregation or "
                f"a float dtype, got {array_ops.dtype_name(value)} (variable: {name})"
            )
        self._components: list[Any] = []
        self._place: list[int] = []  # replica of this process -> its array
        shared = self.synchronization == "on_write"
        for array in [value] if strategy is None else strategy.placed(value, shared=shared):
            self._add_replica(array)
        shares = len(self._components) < len(self._place)
        self._components = [local_array.differentiated(c, initial_value) for c in self._components]
        # Where replicas share an array, none of them may change it alone.
        self._shown = (
            [local_array.view(self._components[i]) for i in self._place] if shares else None
        )

    def _add_replica(self, array: Any) -> None:
        """Find the array of the next replica: one of its own, or one that is on its device."""
        place = array_ops.device_key(array)
        found = [i for i, c in enumerate(self._components) if array_ops.device_key(c) == place]
        if self.synchronization == "on_read" or not found:
            self._place.append(len(self._components))
            self._components.append(array_ops.copy(array) if found else array)
        else:
            self._place.append(found[0])

    def __repr__(self) -> str:
        dtype = array_ops.dtype_name(self._components[0])
        return f"Variable(name={self.name!r}, shape={self.shape}, dtype={dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = array_ops.to_host(self.value)
        if copy is None:  # which NumPy 1 does not know
            return np.asarray(value, dtype=dtype)
        return np.array(value, dtype=dtype, copy=copy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(self._components[0].shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the value, as its library has it."""
        return self._components[0].dtype

    @property
    def components(self) -> tuple[Any, ...]:
        """The arrays of this process: for each replica if "on_read", else for each device."""
        return tuple(self._components)

    @property
    def value(self) -> Any:
        """The array; a change in place outside of replicas changes the variable.

        It does so where the replicas of this process share one array, on one device. Arrays of JAX
        never change; `assign` works in any case.

        Inside a replica: the array on its device. Where replicas share one, that of an "on_write"
        variable is read-only, if it is NumPy's, or, if it is PyTorch's, a tensor of the replica's
        own, with a gradient of its own, over the memory of all.

        Of an "on_read" variable outside of replicas: a new array, combined over all replicas;
        *collective* over the ranks.

        Raises:
            ValueError: the variable is "on_read" with aggregation "none".
        """
        replica = self._replica()
        if replica is None:
            return self._combine() if self.synchronization == "on_read" else self._components[0]
        shown = None if self._shown is None else self._shown[replica.local_id]
        own = self._components[self._place[replica.local_id]] if shown is None else shown
        return replica.read(self, own)

    def assign(self, value: Any) -> None:
        """Copy `value` into the variable.

        Inside a replica, an "on_write" variable takes what the replicas' values combine to, and the
        call is *collective* over all replicas. Outside, the variable takes `value` on this rank,
        which is to be the same on all; an "on_read" one with "sum" shares it among the replicas.

        Args:
            value: a number, or an array of NumPy or of the variable's library, on any device.

        Raises:
            ValueError: it has another shape; or replicas write an "on_write" variable without an
                aggregation.
            TypeError: its dtype cannot be cast without changing its kind.
        """
        array = self._check(value, "assign")
        if self._summed_from_outside:
            self._assign_shares(array)
        else:
            self._write("assign", array, array_ops.overwrite)

    def assign_add(self, delta: Any) -> None:
        """Add `delta`, of the variable's shape; otherwise as `assign`.

        Raises:
            ValueError: as `assign`; or an "on_read" variable with "sum" is added to outside of
                replicas, where it is not clear to which.
        """
        self._add("assign_add", self._check(delta, "assign_add"))

    def assign_sub(self, delta: Any) -> None:
        """Subtract `delta`; otherwise as `assign_add`."""
        array = self._check(delta, "assign_sub")
        with array_ops.device_context(array):
            self._add("assign_sub", -array)

    def settle(self, value: Any) -> None:
        """Take what an optimizer has made of the value outside of replicas, on all devices.

        Args:
            value: the array of the first device, changed in place, or an array of JAX in its place.

        Raises:
            RuntimeError: called inside one of several replicas of this process.
        """
        if self._replica() is not None and len(self._place) > 1:
            raise RuntimeError(
                f"apply_gradients: one of several replicas changes a variable alone, expected "
                f"strategy.apply_gradients (variable: {self.name})"
            )
        if array_api_compat.is_jax_array(value):
            self._components[0] = value
        for i in range(1, len(self._components)):
            self._change(i, array_ops.overwrite, self._components[0])

    def fill(self, value: Any) -> None:
        """Copy `value`, an array of this kind, into all arrays of this process."""
        for i in range(len(self._components)):
            self._change(i, array_ops.overwrite, value)

    def _change(self, i: int, change: Change, new: Any) -> None:
        """Change one of the arrays."""
        old = self._components[i]
        made = change(
            local_array.detached(old), local_array.detached(array_ops.to_device_of(old, new))
        )
        if array_api_compat.is_jax_array(old):
            self._components[i] = made

    def _add(self, operation: str, delta: Any) -> None:
        if self._summed_from_outside:
            raise ValueError(
                f"{operation}: an on_read variable with aggregation 'sum' is changed outside of "
                f"replicas, expected assign, or a call inside a replica (variable: {self.name})"
            )
        self._write(operation, delta, local_array.increased)

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

    def _check(self, value: Any, operation: str) -> Any:
        """Return a new value as an array of the variable's library and dtype."""
        replica = self._replica()
        mine = self._components[0 if replica is None else self._place[replica.local_id]]
        array = local_array.detached(value) if local_array.is_foreign(value) else np.asarray(value)
        if local_array.is_foreign(array) and not local_array.is_foreign(mine):
            array = array_ops.to_host(array)
        check_shape(operation, array, self.shape, self.name)
        wanted = array_ops.dtype_name(mine)
        if not np.can_cast(
            local_array.numpy_dtype(array), local_array.numpy_dtype(mine), "same_kind"
        ):
            raise TypeError(
                f"{operation}: the value has the wrong dtype, expected {wanted}, got "
                f"{array_ops.dtype_name(array)} (variable: {self.name})"
            )
        array = array_ops.astype(array, wanted)
        if replica is not None and replica.is_traced:  # which is on no device yet
            return array
        return array_ops.to_device_of(mine, array)

    def _write(self, operation: str, new: Any, change: Change) -> None:
        replica = self._replica()
        if replica is not None and replica.write(self, operation, change, new):
            return
        if replica is None or self._alone:
            for i in range(len(self._components)):
                self._change(i, change, new)
        elif self.synchronization == "on_read":
            self._change(replica.local_id, change, new)
        elif self.aggregation == "none":
            raise ValueError(
                f"{operation}: replicas write a variable without an aggregation, so that their "
                f"copies would differ, expected aggregation 'sum', 'mean' or 'only_first_replica' "
                f"(variable: {self.name})"
            )
        else:

            def merge(values: list[Any]) -> list[Any]:
                self.combine(change, values)
                return [None] * len(values)

            replica.synchronize(SyncPoint(f"{operation} {self.name}", new, merge))

    def combine(self, change: Change, values: list[Any]) -> None:
        """Change the variable by what the replicas' values combine to, between replicas.

        *Collective* over the ranks.

        Args:
            change: makes the new array of an old one and the combined values.
            values: of the replicas of this process, or one that these have combined to.
        """
        assert self.strategy is not None
        combined = values[0] if self._alone else self._aggregate(values)

        def apply() -> None:
            for i in range(len(self._components)):
                self._change(i, change, combined)

        self.strategy.update([self], apply)

    def replace(self, components: list[Any]) -> None:
        """Take other arrays of JAX for the replicas of this process."""
        self._components = list(components)

    def _combine(self) -> Any:
        """The value of an "on_read" variable outside of replicas."""
        if self._alone:
            return self._components[0]
        if self.aggregation == "none":
            raise ValueError(
                f"value: an on_read variable without an aggregation is read outside of replicas, "
                f"expected aggregation 'sum', 'mean' or 'only_first_replica' (variable: "
                f"{self.name})"
            )
        combined = self._aggregate([local_array.detached(c) for c in self._components])
        return array_ops.copy(combined) if combined is self._components[0] else combined

    def _aggregate(self, values: list[Any]) -> Any:
        assert self.strategy is not None
        ranks = self.strategy.ranks
        if self.aggregation == "only_first_replica":
            return ranks.broadcast_from_chief(values[0])
        op = reductions.parse_op(self.aggregation, "variable")
        return reductions.reduce(ranks, op, values)

    def _assign_shares(self, total: Any) -> None:
        """Give every replica a share, so that the sum over all is `total`."""
        assert self.strategy is not None
        count = self.strategy.num_replicas_in_sync
        with array_ops.device_context(total):
            share = total // count if local_array.is_whole(total) else total / count
            rest = total - share * count if local_array.is_whole(total) else None
        self.fill(share)
        if self.strategy.first_replica_id == 0 and rest is not None:
            self._change(0, local_array.increased, rest)  # what cannot be divided


def _chosen(what: str, word: str, words: Any) -> str:
    """Return a word in small letters."""
    return str(choice("variable", what, word.lower() if isinstance(word, str) else word, words))
