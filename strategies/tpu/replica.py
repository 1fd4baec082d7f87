"""Replica context during JAX tracing.

One trace serves all replicas: values that differ between replicas are traced arrays, including the
replica's number. Effects of a function on variables are recorded, and applied on the host after the
program: gradients leave it averaged over the process, in one reduction per dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core import array_ops
from strategies.core.communication_options import CommunicationOptions
from strategies.core.pytree import leaves, map_leaves
from strategies.core.sparse import Rows
from strategies.replicas import reductions
from strategies.replicas.context import ReplicaContext, ReplicaStrategy
from strategies.replicas.variable import Variable

__all__ = ["AXIS", "DeferredEffect", "SyncPointReached", "Trace", "TracedReplica", "Untraceable"]

AXIS = "replica"
"""Name of the axis along which programs are the same; for `jax.lax.psum` in users' functions."""

# Elements up to which packing arrays is faster than reducing each by itself.
_SHORT = 1 << 14


class Untraceable(Exception):
    """The function does something that cannot be compiled; the message names it."""


class SyncPointReached(Exception):
    """Ends a program at a synchronization point; its values are for the other processes."""

    def __init__(self, name: str, payload: list[Any], over_ranks: Callable[[Any, list[Any]], Any]):
        super().__init__(name)
        self.name = name
        self.payload = payload
        self.over_ranks = over_ranks


class DeferredEffect(NamedTuple):
    """An action after the program.

    Attributes:
        name: name of its synchronization point, for errors.
        values: traced arrays, equal on all devices, which the program returns.
        act: performs it, given the strategy and these values.
    """

    name: str
    values: list[Any]
    act: Callable[[Any, list[Any]], None]


@dataclass
class Trace:
    """Reads and effects of one trace.

    Attributes:
        known: traced values of variables; missing ones are recorded in `read`, and zero here.
        met: results of earlier synchronization points with other processes; None to pass all.
        read: variables in the order in which the function reads them.
        own: "on_read" variable -> value that this replica has written.
        changed: names of variables that change after the program.
        effects: effects in order.
        meetings: number of synchronization points so far.
    """

    known: dict[Variable, Any]
    met: list[list[Any]] | None
    read: dict[Variable, None] = field(default_factory=dict)
    own: dict[Variable, Any] = field(default_factory=dict)
    changed: set[Variable] = field(default_factory=set)
    effects: list[DeferredEffect] = field(default_factory=list)
    meetings: int = 0


class TracedReplica(ReplicaContext):
    """All replicas of this process at once."""

    is_traced = True

    def __init__(self, strategy: ReplicaStrategy, trace: Trace) -> None:
        super().__init__(strategy, 0, self._no_meeting)
        self.trace = trace

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Number of this replica among all of them, a traced int32."""
        # The axis index is the replica's number within the process.
        return self.strategy.first_replica_id + jax.lax.axis_index(AXIS)

    def all_reduce(self, op: Any, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce a value of every replica; see `ReplicaContext`. Integers have a float32 mean."""
        chosen = reductions.parse_op(op, "all_reduce")
        reduce = jax.lax.psum if chosen == "sum" else jax.lax.pmean
        found = [jnp.asarray(leaf) for leaf in leaves(value)]
        # 16-bit floats are summed in float32, as in the other strategies.
        wide = [array_ops.arithmetic_dtype(leaf) for leaf in found]
        partial = [reduce(leaf, AXIS) for leaf in wide]

        # Runs on the host between two programs; the payload is already reduced in the process.
        def over_ranks(strategy: Any, payload: list[Any]) -> list[Any]:
            op = reductions.op_over_ranks(chosen)
            ranks = strategy.ranks.with_options(options)
            return list(ranks.allreduce(payload, op, rounded=True))

        result = self._over_ranks(f"all_reduce {chosen}", partial, over_ranks)
        halves = [str(leaf.dtype) in ("float16", "bfloat16") for leaf in found]
        rounded = [
            r.astype(leaf.dtype) if half else r
            for r, leaf, half in zip(result, found, halves, strict=True)
        ]
        return _fill(value, rounded)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Join an array of every replica along an axis; see `ReplicaContext`."""
        found = [jnp.asarray(leaf) for leaf in leaves(value)]
        joined = [jax.lax.all_gather(leaf, AXIS, axis=axis, tiled=True) for leaf in found]

        # One payload per process, since the devices are joined already.
        def over_ranks(strategy: Any, payload: list[Any]) -> list[Any]:
            return list(reductions.gather(strategy.ranks, [payload], axis))

        return _fill(value, self._over_ranks(f"all_gather {axis}", joined, over_ranks))

    def read(self, variable: Any, array: Any) -> Any:
        """Return the traced value of a variable."""
        trace = self.trace
        # Its own write is visible to the replica at once.
        if variable in trace.own:
            return trace.own[variable]
        # The program has only the value from before; the new one exists after it.
        if variable in trace.changed:
            raise ValueError(
                f"value: the variable changes after the program, expected to be read before it is "
                f"written, or in the next run (variable: {variable.name})"
            )
        trace.read[variable] = None
        known = trace.known.get(variable)
        return jnp.zeros(variable.shape, variable.dtype) if known is None else known

    def write(self, variable: Any, operation: str, change: Any, new: Any) -> bool:
        """Record a write to a variable."""
        if variable.synchronization == "on_read":
            self.trace.own[variable] = change(self.read(variable, None), new)
            return True
        how = variable.aggregation
        if how == "none" and self.num_replicas_in_sync > 1:
            return False  # the caller rejects it
        # JAX's `where` and sums need an array, also for numbers.
        new = jnp.asarray(new)
        if how == "only_first_replica":
            # The sum over replicas is then the first one's value.
            new = jnp.where(jax.lax.axis_index(AXIS) == 0, new, jnp.zeros_like(new))
        # One number per process; `combine` continues over the ranks.
        combined = (jax.lax.pmean if how == "mean" else jax.lax.psum)(new, AXIS)

        def act(strategy: Any, values: list[Any]) -> None:
            # The sum may be wider than the variable.
            variable.combine(change, [values[0].astype(variable.dtype)])

        self.trace.changed.add(variable)
        self.trace.effects.append(DeferredEffect(f"{operation} {variable.name}", [combined], act))
        return True

    def apply(
        self, act: Callable[..., None], pairs: Sequence[tuple[Any, Any]], examples: Any
    ) -> None:
        """Average gradients over the replicas of this process.

        Args:
            act: called after the program with the strategy, the pairs, and the number of examples
                or None.
            pairs: (gradient or None, variable).
            examples: a number, possibly traced, or None.
        """
        if any(isinstance(g, Rows) for g, _ in pairs):
            # XLA programs need fixed shapes, and rows differ between steps.
            raise Untraceable("gradients are Rows")
        given = [(i, jnp.asarray(g)) for i, (g, _) in enumerate(pairs) if g is not None]
        count, averaged = _average([g for _, g in given], examples)
        variables = [variable for _, variable in pairs]
        # None gradients are not traced, so their places are remembered.
        places = [i for i, _ in given]

        def after(strategy: Any, values: list[Any]) -> None:
            gradients: list[Any] = [None] * len(variables)
            # Not strict: a traced count may follow the gradients.
            for i, value in zip(places, values, strict=False):
                gradients[i] = value
            told = values[-1] if isinstance(count, jax.Array) else count
            told = None if told is None else float(told)
            act(strategy, list(zip(gradients, variables, strict=True)), told)

        self.trace.changed |= {v for v in variables if isinstance(v, Variable)}
        traced = [count] if isinstance(count, jax.Array) else []
        self.trace.effects.append(DeferredEffect("apply_gradients", [*averaged, *traced], after))

    def _over_ranks(
        self, name: str, partial: list[Any], over_ranks: Callable[[Any, list[Any]], Any]
    ) -> list[Any]:
        """Return arrays of this process reduced over all processes; ends the program for that."""
        trace = self.trace
        # The first trace passes all points, in order to find all variables.
        if self.strategy.ranks.size == 1 or trace.met is None:
            return partial
        number = trace.meetings
        trace.meetings += 1
        if number < len(trace.met):
            return trace.met[number]
        raise SyncPointReached(name, partial, over_ranks)

    @staticmethod
    def _no_meeting(meeting: Any) -> Any:
        raise Untraceable(f"{meeting.name.split()[0]} needs the host")


def _average(gradients: Sequence[Any], examples: Any) -> tuple[Any, list[Any]]:
    """Return the number of examples of all replicas, and their mean gradients.

    A number that is constant on all replicas must not be a result of the program: XLA on CPUs takes
    half as long again for a program whose results begin with a constant.
    """
    weight: Any = 1 if examples is None else examples
    if isinstance(weight, (bool, int, float, np.generic)):
        # Constant weights: the count is known while tracing.
        sums = _packed_sums([_wide(g, weight) for g in gradients])
        # `psum` of a constant is the number of replicas, without a reduction.
        divisor = np.float32(jax.lax.psum(1, AXIS))
        count = None if examples is None else float(weight) * float(divisor)
    else:
        weight = jnp.float32(weight)
        count = jax.lax.psum(weight, AXIS)
        # 0 rows on all replicas: the sums are 0, and must not become NaN.
        divisor = jnp.where(count == 0, 1, count)
        sums = _packed_sums(
            [(wide := _wide(g, weight)) * weight.astype(wide.dtype) for g in gradients]
        )
    # Divided in the wide dtype, rounded once.
    each = zip(sums, gradients, strict=True)
    return count, [(total / divisor.astype(total.dtype)).astype(g.dtype) for total, g in each]


def _wide(gradient: Any, weight: Any) -> Any:
    """Return a gradient in the dtype of sums; zero for weight 0, because a mean may be NaN."""
    # `where` instead of a product, since 0 * NaN is NaN.
    return jnp.where(weight == 0, 0, array_ops.arithmetic_dtype(gradient))


def _packed_sums(parts: Sequence[Any]) -> list[Any]:
    """Sum arrays over the replicas; short ones of one dtype are packed.

    On 8 CPU devices each reduction takes 0.2 ms, however short.
    """
    sums = [None if part.size <= _SHORT else jax.lax.psum(part, AXIS) for part in parts]
    short = [part for part in parts if part.size <= _SHORT]
    # By dtype, because concatenation would widen mixed ones.
    for dtype in dict.fromkeys(str(part.dtype) for part in short):
        places = [i for i, part in enumerate(parts) if sums[i] is None and str(part.dtype) == dtype]
        flat = jnp.concatenate([parts[i].reshape(-1) for i in places])
        flat = jax.lax.psum(flat, AXIS)
        start = 0
        for i in places:
            sums[i] = flat[start : start + parts[i].size].reshape(parts[i].shape)
            start += parts[i].size
    return sums


def _fill(structure: Any, found: list[Any]) -> Any:
    rest = iter(found)
    return map_leaves(lambda _: next(rest), structure)
