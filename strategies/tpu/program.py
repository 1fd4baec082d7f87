"""A function compiled for all devices of this process, and run with its meetings.

Where there are several processes, a program ends where its replicas meet those of the others, and
the next one begins anew with what came of it; XLA leaves out what is not needed any more.

    program 0  |-- up to all_reduce --|
    host                              | over the ranks |
    program 1                                          |-- anew, with the result --|
    host                                                                           | effects
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from strategies import arrays
from strategies.cluster import local_devices as devices
from strategies.replicas import context, per_replica
from strategies.replicas.per_replica import PerReplica
from strategies.replicas.variable import Variable
from strategies.structures import leaves, map_leaves
from strategies.tpu.replica import AXIS, Meet, Trace, TracedReplica, Untraceable

__all__ = ["Arguments", "Mesh", "Program", "Stacked"]

# Programs of one process that reduce among the same devices must not run at the same time: each
# may wait for threads that the others hold.
_one_at_a_time = threading.Lock()


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


class Stacked(PerReplica):
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
        return tuple(shard.data[0] for shard in self.array.addressable_shards)


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
        kinds: list[Any] = []
        for leaf in leaves(given):
            if isinstance(leaf, Stacked):
                split.append(leaf.array)
                kinds.append("one row")
            elif isinstance(leaf, PerReplica):
                kinds.append(_kind(leaf))
                split.append(mesh.joined(leaf.values))
            elif isinstance(leaf, (bool, int, float, complex)) or arrays.is_array(leaf):
                whole = not isinstance(leaf, Variable)
                kinds.append("same" if whole else leaf)
                if whole:
                    same.append(mesh.everywhere(np.asarray(leaf) if np.isscalar(leaf) else leaf))
            else:
                kinds.append(leaf)
        shapes = tuple((x.shape, x.dtype) for x in [*split, *same])
        form = str(map_leaves(lambda leaf: None, given))
        key = form, tuple(k if isinstance(k, str) else id(k) for k in kinds), shapes

        def fill(split: Sequence[Any], same: Sequence[Any]) -> Any:
            rest, whole, order = iter(split), iter(same), iter(kinds)

            def one(leaf: Any) -> Any:
                kind = next(order)
                if isinstance(leaf, PerReplica):
                    return next(rest)[0] if kind == "one row" else next(rest)
                return next(whole) if isinstance(kind, str) and kind == "same" else leaf

            return map_leaves(one, given)

        return cls(key, split, same, fill)


def _kind(leaf: PerReplica) -> str:
    """Say how the replicas' values lie in one array."""
    facts = {(np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaf.values}
    if len(facts) > 1:
        raise Untraceable("the replicas have arrays of different shapes, as in a last batch")
    if not all(
        isinstance(x, (bool, int, float, complex)) or arrays.is_array(x) for x in leaf.values
    ):
        raise Untraceable(f"the replicas have values of type {type(leaf.values[0]).__name__}")
    return "rows" if np.ndim(leaf.values[0]) else "one row"


class _Part(NamedTuple):
    """A program from the start to a meeting, or to the end.

    Attributes:
        run: compiled.
        told: what its trace has found: the meeting or None, the effects, the form of the result.
    """

    run: Any
    told: dict[str, Any]


class Program:
    """A function of replicas, compiled for the arguments that it was first called with."""

    def __init__(self, strategy: Any, mesh: Mesh, fn: Callable[..., Any], given: Arguments) -> None:
        self._strategy = strategy
        self._mesh = mesh
        self._fn = fn
        self._fill = given.fill  # keeps what is not an array alive, whose id is in the key
        self._parts: list[_Part] = []
        self._variables: list[Variable] = []
        self._find_variables(given)

    def __call__(self, given: Arguments) -> Any:
        """Run; *collective*."""
        strategy = self._strategy
        met: list[list[Any]] = []
        while True:
            if len(self._parts) == len(met):
                self._parts.append(self._part())
            part = self._parts[len(met)]
            values = [self._value(variable) for variable in self._variables]
            with _one_at_a_time:
                out = part.run(given.split, given.same, values, met)
                if self._mesh.waits:
                    jax.block_until_ready(out)
            for variable, new in zip(part.told["own"], out["own"], strict=True):
                variable.replace([shard.data[0] for shard in new.addressable_shards])
            meeting: Meet | None = part.told["meeting"]
            if meeting is None:
                break
            strategy.ranks.agree(f"run: {meeting.name}")
            with context.entered(strategy, None):
                found = meeting.over_ranks(strategy, out["payload"])
            met.append([self._mesh.everywhere(x) for x in found])
        for effect, own in zip(part.told["effects"], out["effects"], strict=True):
            strategy.ranks.agree(f"run: {effect.name}")
            with context.entered(strategy, None):
                effect.act(strategy, own)
        return self._result(part.told["result"], out["result"])

    def _find_variables(self, given: Arguments) -> None:
        """Trace the whole function once, to learn which variables it reads."""
        trace = Trace({}, None)

        def body(split: Any, same: Any) -> list[Any]:
            with context.entered(self._strategy, TracedReplica(self._strategy, trace)):
                args, kwargs = self._fill(split, same)
                self._fn(*args, **kwargs)
            return []

        specs = (PartitionSpec(AXIS), PartitionSpec())
        jax.eval_shape(_shard_map(body, self._mesh.mesh, specs, []), given.split, given.same)
        self._variables = list(trace.read)

    def _value(self, variable: Variable) -> Any:
        if variable.synchronization == "on_read":
            return self._mesh.joined([c[None] for c in variable.components])
        return variable.components[0]

    def _part(self) -> _Part:
        """Compile the program up to the next meeting."""
        told: dict[str, Any] = {}

        def body(split: Any, same: Any, values: Any, met: Any) -> dict[str, Any]:
            known = {
                v: value[0] if v.synchronization == "on_read" else value
                for v, value in zip(self._variables, values, strict=True)
            }
            trace = Trace(known, met)
            meeting, result = None, None
            with context.entered(self._strategy, TracedReplica(self._strategy, trace)):
                args, kwargs = self._fill(split, same)
                try:
                    result = self._fn(*args, **kwargs)
                except Meet as stop:
                    meeting = stop
            done = meeting is None
            own = trace.own if done else {}
            effects = trace.effects if done else []
            traced = [x for x in leaves(result) if _is_array(x)]
            told.update(
                meeting=meeting, own=list(own), effects=effects,
                result=map_leaves(lambda x: _ARRAY if _is_array(x) else x, result),
            )  # fmt: skip
            return {
                "payload": meeting.payload if meeting else [],
                "own": [value[None] for value in own.values()],
                "effects": [effect.values for effect in effects],
                "result": [jax.numpy.asarray(x)[None] for x in traced],
            }

        split, same = PartitionSpec(AXIS), PartitionSpec()
        reads = [split if v.synchronization == "on_read" else same for v in self._variables]
        outs = {"payload": same, "own": split, "effects": same, "result": split}
        run = jax.jit(_shard_map(body, self._mesh.mesh, (split, same, reads, same), outs))
        return _Part(run, told)

    def _result(self, form: Any, found: Sequence[Any]) -> Any:
        """Return the structure that the function has returned."""
        rest = iter(found)
        count = len(self._mesh.names)

        def one(leaf: Any) -> Any:
            if leaf is not _ARRAY:
                return per_replica.regroup([leaf] * count, "run")
            stacked = Stacked(next(rest))
            return stacked if count > 1 else stacked.values[0]

        return map_leaves(one, form)


_ARRAY = object()
"""Stands where a result has an array."""


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _shard_map(body: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """Let a function run on each device of a mesh, with reductions as it says them.

    JAX would otherwise add up some gradients by itself.
    """
    if hasattr(jax, "shard_map"):
        return jax.shard_map(
            body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    from jax.experimental.shard_map import shard_map

    return shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=False)
