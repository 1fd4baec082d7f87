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
Change = Callable[[Any, Any], Any]  # (old array, new value) -> changed array


class Variable:
    """An array with a name, a fixed shape and a fixed dtype; made by strategies.

    There are two kinds. Writes of replicas to an "on_write" variable are combined over all replicas
    by its aggregation, so that it is the same on all of them. Replicas of a process share one array
    if they are on one device. An "on_read" variable has an array for each replica, which writes to
    its own. The arrays are combined when the variable is read outside of replicas.

    Args:
        initial_value: shape (...), copied. It defines the library of the variable. Other values
            than arrays use NumPy, or the library of the strategy's device.
        name: name in checkpoints and errors.
        dtype: dtype of the variable; None uses that of `initial_value`.
        synchronization: "on_write", which is also "auto", or "on_read".
        aggregation: how values of different replicas are combined: "sum", "mean",
            "only_first_replica", or "none" if they cannot be combined.
        strategy: strategy of the replicas; None for a variable without replicas.

    Raises:
        ValueError: unknown synchronization or aggregation, or the mean of integers; or the library
            of the initial value does not support the device.
    """

    # Slots, as models may have thousands of variables, and a mistyped attribute raises.
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
        # A copy: the variable must not change with the caller's array.
        value = local_array.copied(initial_value, dtype)
        self.name = name
        self.strategy = strategy
        kind = _chosen("synchronization", synchronization, Synchronization)
        self.synchronization = "on_write" if kind == "auto" else kind
        self.aggregation = _chosen("aggregation", aggregation, Aggregation)
        if self.aggregation == "mean" and local_array.is_whole(value):
            # A mean of integers would be rounded, differently after each write.
            raise ValueError(
                f"variable: integers have no mean of their dtype, expected another aggregation or "
                f"a float dtype, got {array_ops.dtype_name(value)} (variable: {name})"
            )
        self._components: list[Any] = []
        self._place: list[int] = []  # replica of this process -> its array
        shared = self.synchronization == "on_write"
        # Without a strategy one array serves all.
        for array in [value] if strategy is None else strategy.placed(value, shared=shared):
            self._add_replica(array)
        shares = len(self._components) < len(self._place)
        # After all copies, since a copy is never a leaf that requires gradients.
        self._components = [local_array.differentiated(c, initial_value) for c in self._components]
        # Views, because no replica may change a shared array alone.
        self._shown = (
            [local_array.view(self._components[i]) for i in self._place] if shares else None
        )

    def _add_replica(self, array: Any) -> None:
        """Assign an array to the next replica: a new one, or the one that is on its device."""
        place = array_ops.device_key(array)
        # By library and device: arrays on one device can be shared.
        found = [i for i, c in enumerate(self._components) if array_ops.device_key(c) == place]
        if self.synchronization == "on_read" or not found:
            self._place.append(len(self._components))
            # A second replica of the same device needs memory of its own if it writes alone.
            self._components.append(array_ops.copy(array) if found else array)
        else:
            self._place.append(found[0])

    def __repr__(self) -> str:
        dtype = array_ops.dtype_name(self._components[0])
        return f"Variable(name={self.name!r}, shape={self.shape}, dtype={dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = array_ops.to_host(self.value)
        if copy is None:  # NumPy 1 does not have this argument
            return np.asarray(value, dtype=dtype)
        return np.array(value, dtype=dtype, copy=copy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(self._components[0].shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the value, as its library represents it."""
        return self._components[0].dtype

    @property
    def components(self) -> tuple[Any, ...]:
        """The arrays of this process: one per replica if "on_read", otherwise one per device."""
        return tuple(self._components)

    @property
    def value(self) -> Any:
        """The array. Outside of replicas, changing it in place changes the variable.

        This holds if the replicas of this process share one array, on one device. JAX arrays never
        change; `assign` works in any case.

        Inside a replica: the array on its device. If replicas share the array of an "on_write"
        variable, a NumPy array is read-only. A PyTorch tensor is then the replica's own, with its
        own gradient, over the shared memory.

        For an "on_read" variable outside of replicas: a new array, combined over all replicas;
        *collective* over the ranks.

        Raises:
            ValueError: the variable is "on_read" with aggregation "none".
        """
        replica = self._replica()
        if replica is None:
            return self._combine() if self.synchronization == "on_read" else self._components[0]
        shown = None if self._shown is None else self._shown[replica.local_id]
        own = self._components[self._place[replica.local_id]] if shown is None else shown
        # A mirrored JAX array holds all devices; `read` takes the replica's part.
        return replica.read(self, own)

    def assign(self, value: Any) -> None:
        """Copy `value` into the variable.

        Inside a replica, an "on_write" variable gets the combined values of all replicas, and the
        call is *collective* over them. Outside, the variable gets `value` on this rank, which must
        be the same on all ranks; an "on_read" one with "sum" divides it among the replicas.

        Args:
            value: a number, or an array of NumPy or of the variable's library, on any device.

        Raises:
            ValueError: its shape differs; or replicas write an "on_write" variable without an
                aggregation.
            TypeError: its dtype cannot be cast without changing its kind.
        """
        # Checked before the exchange: an error on one replica must not leave others in it.
        array = self._check(value, "assign")
        if self._summed_from_outside:
            self._assign_shares(array)
        else:
            self._write("assign", array, array_ops.overwrite)

    def assign_add(self, delta: Any) -> None:
        """Add `delta`, of the variable's shape; otherwise as `assign`.

        Raises:
            ValueError: as `assign`; or the variable is "on_read" with "sum" and the call is outside
                of replicas, where the receiving replica is undefined.
        """
        self._add("assign_add", self._check(delta, "assign_add"))

    def assign_sub(self, delta: Any) -> None:
        """Subtract `delta`; otherwise as `assign_add`."""
        array = self._check(delta, "assign_sub")
        # CuPy negates on the device of the thread.
        with array_ops.device_context(array):
            self._add("assign_sub", -array)

    def settle(self, value: Any) -> None:
        """Copy the result of an optimizer outside of replicas to all devices.

        Args:
            value: the array of the first device, changed in place, or a JAX array that replaces it.

        Raises:
            RuntimeError: called inside one of several replicas of this process.
        """
        if self._replica() is not None and len(self._place) > 1:
            # One device has one component, and the strategy would change nothing there.
            raise RuntimeError(
                f"apply_gradients: one of several replicas changes a variable alone, expected "
                f"strategy.apply_gradients (variable: {self.name})"
            )
        if array_api_compat.is_jax_array(value):
            self._components[0] = value
        for i in range(1, len(self._components)):
            # Component 0 is already new; others get a copy on their devices.
            self._change(i, array_ops.overwrite, self._components[0])

    def fill(self, value: Any) -> None:
        """Copy `value`, an array of this kind, into all arrays of this process."""
        for i in range(len(self._components)):
            self._change(i, array_ops.overwrite, value)

    def _change(self, i: int, change: Change, new: Any) -> None:
        """Change one of the arrays, in place if possible."""
        # Detached below: a write to a leaf of autograd raises, and must not become part of a graph.
        old = self._components[i]
        made = change(
            local_array.detached(old), local_array.detached(array_ops.to_device_of(old, new))
        )
        # Other libraries were changed in place.
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
        """Whether this is a sum over several replicas, and this thread runs none of them."""
        summed = (self.synchronization, self.aggregation) == ("on_read", "sum")
        # With one replica the sum is its value, so a write outside is well defined.
        return summed and not self._alone and self._replica() is None

    def _replica(self) -> context.ReplicaContext | None:
        """Return the replica that runs in this thread."""
        top = context.current()
        return top.replica if top is not None and top.strategy is self.strategy else None

    def _check(self, value: Any, operation: str) -> Any:
        """Return a new value as an array of the variable's library and dtype."""
        replica = self._replica()
        mine = self._components[0 if replica is None else self._place[replica.local_id]]
        array = local_array.detached(value) if local_array.is_foreign(value) else np.asarray(value)
        # A NumPy variable stays in host memory, whatever is assigned.
        if local_array.is_foreign(array) and not local_array.is_foreign(mine):
            array = array_ops.to_host(array)
        check_shape(operation, array, self.shape, self.name)
        wanted = array_ops.dtype_name(mine)
        # "same_kind" allows float64 to float32, but not float to integer.
        if not np.can_cast(
            local_array.numpy_dtype(array), local_array.numpy_dtype(mine), "same_kind"
        ):
            raise TypeError(
                f"{operation}: the value has the wrong dtype, expected {wanted}, got "
                f"{array_ops.dtype_name(array)} (variable: {self.name})"
            )
        array = array_ops.astype(array, wanted)
        if replica is not None and replica.is_traced:  # a traced value has no device
            return array
        return array_ops.to_device_of(mine, array)

    def _write(self, operation: str, new: Any, change: Change) -> None:
        replica = self._replica()
        # A traced replica records the write; it happens after the program.
        if replica is not None and replica.write(self, operation, change, new):
            return
        if replica is None or self._alone:
            # Outside of replicas all ranks assign the same value, so nothing is sent.
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
                # The replicas get nothing back: they read the variable afterwards.
                return [None] * len(values)

            replica.synchronize(SyncPoint(f"{operation} {self.name}", new, merge))

    def combine(self, change: Change, values: list[Any]) -> None:
        """Change the variable by the combined values of the replicas, between replicas.

        *Collective* over the ranks.

        Args:
            change: function of the old array and the combined values.
            values: values of the replicas of this process, or one that they were combined to.
        """
        assert self.strategy is not None
        # One replica: its value is the combined one.
        combined = values[0] if self._alone else self._aggregate(values)

        def apply() -> None:
            for i in range(len(self._components)):
                self._change(i, change, combined)

        # Through the strategy, as some store variables on one rank only.
        self.strategy.update([self], apply)

    def replace(self, components: list[Any]) -> None:
        """Replace the JAX arrays of this process's replicas."""
        self._components = list(components)

    def _combine(self) -> Any:
        """Return the value of an "on_read" variable outside of replicas."""
        if self.aggregation == "none" and not self._alone:
            raise ValueError(
                f"value: an on_read variable without an aggregation is read outside of replicas, "
                f"expected aggregation 'sum', 'mean' or 'only_first_replica' (variable: "
                f"{self.name})"
            )
        # Detached, because a combined value does not belong to any replica's graph.
        parts = [local_array.detached(c) for c in self._components]
        combined = parts[0] if self._alone else self._aggregate(parts)
        # The caller may change the result, but not the replica's own array.
        return array_ops.copy(combined) if combined is parts[0] else combined

    def _aggregate(self, values: list[Any]) -> Any:
        assert self.strategy is not None
        ranks = self.strategy.ranks
        if self.aggregation == "only_first_replica":
            return ranks.broadcast_from_chief(values[0])
        op = reductions.parse_op(self.aggregation, "variable")
        return reductions.reduce(ranks, op, values)

    def _assign_shares(self, total: Any) -> None:
        """Divide `total` among the replicas, so that their sum is `total`."""
        assert self.strategy is not None
        count = self.strategy.num_replicas_in_sync
        with array_ops.device_context(total):
            share = total // count if local_array.is_whole(total) else total / count
            # Rounded down for integers, so the rest is never negative.
            rest = total - share * count if local_array.is_whole(total) else None
        self.fill(share)
        # One replica of all ranks gets the rest; elsewhere it would be counted twice.
        if self.strategy.first_replica_id == 0 and rest is not None:
            self._change(0, local_array.increased, rest)  # remainder of the integer division


def _chosen(what: str, word: str, words: Any) -> str:
    """Return a word in lower case."""
    return str(choice("variable", what, word.lower() if isinstance(word, str) else word, words))
