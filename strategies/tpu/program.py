"""Compiled program for all devices of this process.

With several processes, a program ends where its replicas synchronize with those of other processes.
The next program starts from the beginning with the result; XLA removes code that is no longer
needed.

    program 0  |-- up to all_reduce --|
    host                              | over the ranks |
    program 1                                          |-- again, with the result --|
    host                                                                            | effects
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from strategies.core.array_ops import shards
from strategies.core.pytree import leaves, map_leaves
from strategies.replicas import context, per_replica
from strategies.replicas.variable import Variable
from strategies.tpu.arguments import Arguments, Mesh, StackedPerReplica, is_array
from strategies.tpu.replica import AXIS, SyncPointReached, Trace, TracedReplica

__all__ = ["Program"]

# Programs of one process that reduce over the same devices must not run concurrently: each may wait
# for threads that the others hold.
_one_at_a_time = threading.Lock()


class _Part(NamedTuple):
    """A program from the start to a synchronization point, or to the end.

    Attributes:
        run: the compiled function.
        told: results of its trace: the meeting or None, the effects, the form of the result.
    """

    run: Any
    told: dict[str, Any]


class Program:
    """A function of replicas, compiled for the arguments of its first call."""

    def __init__(self, strategy: Any, mesh: Mesh, fn: Callable[..., Any], given: Arguments) -> None:
        self._strategy = strategy
        self._mesh = mesh
        self._fn = fn
        self._fill = given.fill  # keeps constants alive, because the key contains their ids
        self._parts: list[_Part] = []
        self._variables: list[Variable] = []
        # The variables are parameters of the program: their values change between calls.
        self._find_variables(given)

    def __call__(self, given: Arguments) -> Any:
        """Run; *collective*."""
        strategy = self._strategy
        # Results of the other processes so far, one list per synchronization point.
        met: list[list[Any]] = []
        while True:
            # Compiled when it is first reached, because its inputs depend on the results before it.
            if len(self._parts) == len(met):
                self._parts.append(self._part())
            part = self._parts[len(met)]
            values = [self._value(variable) for variable in self._variables]
            with _one_at_a_time:
                out = part.run(given.split, given.same, values, met)
                meeting: SyncPointReached | None = part.told["meeting"]
                # With a single process the update is prepared while the program runs. It reduces
                # nothing, so it occupies no thread for long.
                early = meeting is None and strategy.ranks.size == 1
                try:
                    if early:
                        self._act(part, out)
                finally:
                    # Also after an error: the lock must not be released while the program runs.
                    if self._mesh.waits:
                        new = [v.components for v in part.told["changed"]] if early else []
                        # Donated buffers are deleted; waiting for one would raise.
                        left = [x for x in jax.tree.leaves([out, new]) if not x.is_deleted()]
                        jax.block_until_ready(left)
            if meeting is None:
                if not early:
                    self._act(part, out)
                break
            strategy.ranks.agree(f"run: {meeting.name}")
            # Between replicas: `over_ranks` is collective and needs the host's values.
            with context.entered(strategy, None):
                found = meeting.over_ranks(strategy, out["payload"])
            met.append([self._mesh.everywhere(x) for x in found])
        return self._result(part.told["result"], out["result"])

    def _act(self, part: _Part, out: dict[str, Any]) -> None:
        """Apply the function's effects on variables."""
        for variable, new in zip(part.told["own"], out["own"], strict=True):
            variable.replace([shard.data[0] for shard in shards(new)])
        for effect, values in zip(part.told["effects"], out["effects"], strict=True):
            # Effects may be collective, so ranks agree before each of them.
            self._strategy.ranks.agree(f"run: {effect.name}")
            with context.entered(self._strategy, None):
                effect.act(self._strategy, values)

    def _find_variables(self, given: Arguments) -> None:
        """Trace the whole function once to find the variables that it reads."""
        # Variables read as zeros here, and no synchronization point ends the trace.
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
        """Compile the program up to the next synchronization point."""
        told: dict[str, Any] = {}

        def body(split: Any, same: Any, values: Any, met: Any) -> dict[str, Any]:
            known = {
                # "on_read" values are sharded with a leading axis, one row per replica.
                v: value[0] if v.synchronization == "on_read" else value
                for v, value in zip(self._variables, values, strict=True)
            }
            trace = Trace(known, met)
            meeting, result = None, None
            with context.entered(self._strategy, TracedReplica(self._strategy, trace)):
                args, kwargs = self._fill(split, same)
                try:
                    result = self._fn(*args, **kwargs)
                except SyncPointReached as stop:
                    # Other processes have to take part: the next part traces the rest.
                    meeting = stop
            done = meeting is None
            # Effects of an unfinished trace would be applied again by the next part.
            own = trace.own if done else {}
            effects = trace.effects if done else []
            traced = [x for x in leaves(result) if is_array(x)]
            # The trace returns arrays only, so other results leave it by this dict.
            told.update(
                meeting=meeting, own=list(own), effects=effects, changed=list(trace.changed),
                result=map_leaves(lambda x: _ARRAY if is_array(x) else x, result),
            )  # fmt: skip
            return {
                "payload": meeting.payload if meeting else [],
                "own": [value[None] for value in own.values()],
                "effects": [effect.values for effect in effects],
                "result": [jax.numpy.asarray(x)[None] for x in traced],
            }

        split, same = PartitionSpec(AXIS), PartitionSpec()
        reads = [split if v.synchronization == "on_read" else same for v in self._variables]
        # The keys must be those of `body`'s result, also for empty lists.
        outs = {"payload": same, "own": split, "effects": same, "result": split}
        run = jax.jit(_shard_map(body, self._mesh.mesh, (split, same, reads, same), outs))
        return _Part(run, told)

    def _result(self, form: Any, found: Sequence[Any]) -> Any:
        """Return the function's result in its original structure."""
        rest = iter(found)
        count = len(self._mesh.names)

        def one(leaf: Any) -> Any:
            if leaf is not _ARRAY:
                return per_replica.regroup([leaf] * count, "run")
            stacked = StackedPerReplica(next(rest))
            return stacked if count > 1 else stacked.values[0]

        return map_leaves(one, form)


_ARRAY = object()
"""Placeholder for an array of a result."""


def _shard_map(body: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """Run a function on each device of a mesh, without implicit reductions.

    JAX would otherwise sum some gradients by itself.
    """
    if hasattr(jax, "shard_map"):
        return jax.shard_map(
            body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    from jax.experimental.shard_map import shard_map

    return shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=False)
