"""Arguments of a call, sharded over the devices of this process.

What is different for each replica is one array, of which every device has a part; what is the same
for all is an array that every device has a copy of. The rest is a constant of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from strategies.cluster import local_devices as devices
from strategies.core import array_ops
from strategies.core.pytree import leaves, map_leaves
from strategies.replicas.per_replica import PerReplica
from strategies.replicas.variable import Variable
from strategies.tpu.replica import AXIS, Untraceable

__all__ = ["Arguments", "ShardedPerReplica", "Mesh", "StackedPerReplica", "is_array"]


class Mesh:
    """The devices of this process as JAX sees them in a program."""

    def __init__(self, names: Sequence[str], found: Sequence[Any]) -> None:
        self.names = tuple(names)
        self.mesh = jax.sharding.Mesh(np.array(found), (AXIS,))
        self.same = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec(AXIS))
        # A host device has no queue: whatever is on its way takes threads from what it waits for.
        self.waits = found[0].platform == "cpu"

    def everywhere(self, array: Any) -> Any:
        """Copy an array to all devices."""
        if getattr(array, "sharding", None) == self.same:
            return array
        if isinstance(array, np.ndarray):  # JAX goes on reading the memory that it is given
            array = array.copy()
        return jax.device_put(array, self.same)

    def joined(self, values: Sequence[Any]) -> Any:
        """See arrays of the replicas, each on its device, as the parts of one."""
        parts = [
            devices.put_jax(np.asarray(x) if np.isscalar(x) else x, name)
            for x, name in zip(values, self.names, strict=True)
        ]
        if not parts[0].ndim:
            parts = [part.reshape(1) for part in parts]
        shape = (len(parts) * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split, parts)


class StackedPerReplica(PerReplica):
    """What a program has returned: one array, whose parts are those of the replicas.

    Attributes:
        array: shape (replicas of this process, ...).
    """

    array: Any

    def __init__(self, array: Any) -> None:
        object.__setattr__(self, "array", array)  # since the class is frozen

    @cached_property
    def values(self) -> tuple[Any, ...]:
        """The value of each replica, on its device."""
        return tuple(shard.data[0] for shard in array_ops.shards(self.array))


class ShardedPerReplica(PerReplica):
    """Arrays of the replicas, each on its device, that are also the parts of one.

    Attributes:
        array: shape (rows of all replicas of this process, ...).
    """

    array: Any

    def __init__(self, values: Sequence[Any], array: Any) -> None:
        object.__setattr__(self, "values", tuple(values))
        object.__setattr__(self, "array", array)

    @classmethod
    def of(cls, mesh: Mesh, batch: Any) -> Any:
        """Join what can be joined in a batch: to do so for each call takes 0.2 ms an array."""

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica) or not all(map(is_array, leaf.values)):
                return leaf
            alike = len({(x.shape, x.dtype) for x in leaf.values}) == 1 and leaf.values[0].ndim
            return cls(leaf.values, mesh.joined(leaf.values)) if alike else leaf

        return map_leaves(one, batch)


class _Kind(Enum):
    """How an argument comes to the replicas; whatever else stands for itself."""

    ROWS = "each replica has some rows of an array"
    ONE_ROW = "each replica has one row of an array, without its axis"
    SAME = "all replicas have the whole array"


class Arguments(NamedTuple):
    """The arguments of one call, taken apart.

    Attributes:
        key: what the program depends on: equal for calls that one program can serve.
        split: arrays whose parts along the first axis are the replicas'.
        same: arrays that all replicas get.
        fill: puts traced arrays in their place: (split, same) -> (args, kwargs).
    """

    key: tuple[Any, ...]
    split: list[Any]
    same: list[Any]
    fill: Callable[[Sequence[Any], Sequence[Any]], Any]

    @classmethod
    def of(cls, mesh: Mesh, given: Any) -> Arguments:
        """Take arguments apart.

        Raises:
            Untraceable: the replicas have arrays of different shapes.
        """
        split: list[Any] = []
        same: list[Any] = []

        def taken(leaf: Any) -> Any:
            """Take an array, and return of which kind it is; other leaves as they are."""
            if isinstance(leaf, (StackedPerReplica, ShardedPerReplica)):
                split.append(leaf.array)
                return _Kind.ONE_ROW if isinstance(leaf, StackedPerReplica) else _Kind.ROWS
            if isinstance(leaf, PerReplica):
                kind = _kind(leaf)
                split.append(mesh.joined(leaf.values))
                return kind
            number = isinstance(leaf, (bool, int, float, complex))
            if isinstance(leaf, Variable) or not (number or array_ops.is_array(leaf)):
                return leaf
            same.append(mesh.everywhere(np.asarray(leaf) if np.isscalar(leaf) else leaf))
            return _Kind.SAME

        kinds = map_leaves(taken, given)
        shapes = tuple((x.shape, x.dtype) for x in [*split, *same])
        form = str(map_leaves(lambda leaf: None, given))
        constants = tuple(k if isinstance(k, (str, _Kind)) else id(k) for k in leaves(kinds))

        def fill(split: Sequence[Any], same: Sequence[Any]) -> Any:
            rest, whole = iter(split), iter(same)

            def one(kind: Any) -> Any:
                if kind is _Kind.SAME:
                    return next(whole)
                if isinstance(kind, _Kind):
                    return next(rest)[0] if kind is _Kind.ONE_ROW else next(rest)
                return kind

            return map_leaves(one, kinds)

        return cls((form, constants, shapes), split, same, fill)


def _kind(leaf: PerReplica) -> _Kind:
    """Say how the replicas' values lie in one array."""
    facts = {(np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaf.values}
    if len(facts) > 1:
        raise Untraceable("the replicas have arrays of different shapes, as in a last batch")
    if not all(
        isinstance(x, (bool, int, float, complex)) or array_ops.is_array(x) for x in leaf.values
    ):
        raise Untraceable(f"the replicas have values of type {type(leaf.values[0]).__name__}")
    return _Kind.ROWS if np.ndim(leaf.values[0]) else _Kind.ONE_ROW


def is_array(x: Any) -> bool:
    """Whether this is an array, or a number, of NumPy or JAX."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))
