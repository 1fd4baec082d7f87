"""Optax transformations that average gradients over ranks.

Inside `jax.jit` the step is one call of a Python function, in program order with the operations of
`strategies.jax`. It averages all gradients together, as for any other library: from XLA's buffers
into buckets, and from there into the buffers of the results. The calls use a communicator of their
own, because JAX runs them in its own thread while the program's thread continues.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import collectives as cc
from collectives.extend import known_as
from strategies.averaging.options import AveragingOptions
from strategies.core.array_ops import COMPUTE
from strategies.jax.tree_average import TreeAverage

__all__ = [
    "AveragingTransformation",
    "LocalStepsState",
    "MultiStepsState",
    "averaged",
    "wrap",
]

# The name in errors, even in compiled programs: the user calls the transformation's `update`.
_named = known_as("DistributedOptimizer.update")


class AveragingTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc,name-defined,unused-ignore]
    """An Optax transformation that averages over the ranks; `DistributedOptimizer` creates it.

    Attributes:
        comm: communicator of the averages, which are the only calls over it.
    """

    is_distributed = True
    comm: cc.Communicator


class MultiStepsState(NamedTuple):
    """State of a transformation with `backward_passes_per_step` above 1.

    Attributes:
        count: passes since the last update, int32.
        examples: number of rows of these passes, float32; -1 if unknown, -inf if known for some
            passes only.
        sums: sums of gradients, with the parameters' shapes; float32 for 16-bit parameters.
        inner: state of the wrapped transformation.
    """

    count: Any
    examples: Any
    sums: Any
    inner: Any


class LocalStepsState(NamedTuple):
    """State of a transformation with `sync_every`; differs between ranks.

    Attributes:
        step: number of steps so far, int32.
        since: number of steps since the last synchronization, int32.
        anchors: parameters of the last synchronization, equal on all ranks.
        outer: state of the outer transformation, equal on all ranks.
        inner: state of the wrapped transformation.
    """

    step: Any
    since: Any
    anchors: Any
    outer: Any
    inner: Any


def wrap(
    transformation: optax.GradientTransformation, comm: cc.Communicator, rule: AveragingOptions
) -> AveragingTransformation:
    """Return a transformation that averages over the ranks; see `strategies.DistributedOptimizer`.

    *Collective*, as is every `update` of the result. The state is that of the wrapped
    transformation, or a `MultiStepsState` or `LocalStepsState` around it. `update` takes
    `examples=`, the number of rows of which this rank's gradients are the mean, except with
    `sync_every`, and passes other keywords on.
    """
    return averaged(optax.with_extra_args_support(transformation), TreeAverage(comm, rule))


def averaged(inner: Any, average: TreeAverage) -> AveragingTransformation:
    """Return a transformation that passes averages to `inner`, whose `update` takes keywords."""
    rule = average.rule

    @_named
    def update(
        updates: Any, state: Any, params: Any = None, *, examples: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        means, due = average(updates, examples, 1, state)
        made, changed = inner.update(means, state, params, **extra)
        average.compare(due, params, state, made)
        return made, changed

    made = AveragingTransformation(inner.init, update)
    if rule.backward_passes_per_step > 1:
        made = _with_passes(inner, average, rule.backward_passes_per_step)
    if rule.sync_every is not None:
        made = _with_local_steps(inner, average, rule)
    made.comm = average.comm
    return made


def _with_passes(inner: Any, average: TreeAverage, wanted: int) -> AveragingTransformation:
    """Accumulate the gradients of `wanted` passes before each update."""

    def init(params: Any) -> MultiStepsState:
        # float32 for 16-bit parameters, so that the sums are rounded once.
        zeros = jax.tree.map(
            lambda p: jnp.zeros(p.shape, COMPUTE.get(str(p.dtype), p.dtype)), params
        )
        return MultiStepsState(jnp.int32(0), jnp.float32(0), zeros, inner.init(params))

    @_named
    def update(
        updates: Any,
        state: MultiStepsState,
        params: Any = None,
        *,
        examples: Any = None,
        **extra: Any,
    ) -> tuple[Any, MultiStepsState]:
        # Known while tracing: a traced number of examples is not None.
        told = examples is not None
        unknown = state.examples < 0
        if told:
            # NaN, because the sum may hide a negative number.
            checked = jnp.where(examples < 0, jnp.nan, examples)
            rows = jnp.where(unknown, -jnp.inf, state.examples + checked)
        else:
            rows = jnp.where(
                unknown | (state.count == 0), jnp.minimum(state.examples, -1), -jnp.inf
            )
        weight = examples if told else 1
        sums = jax.tree.map(lambda s, g: s + _weigh(g.astype(s.dtype), weight), state.sums, updates)
        count = state.count + 1
        # Sums over examples may overflow 16 bits.
        divisor = jnp.where(rows == 0, 1, rows) if told else 1
        # In Optax the parameters are optional; the gradients have the same shapes and dtypes.
        likes = updates if params is None else params

        def enough() -> tuple[Any, MultiStepsState]:
            whole = jax.tree.map(lambda s, p: (s / divisor).astype(p.dtype), sums, likes)
            # The ranks communicate only now, so that an earlier error would not reach all.
            mixed = jnp.isneginf(rows)
            gradients, due = average(whole, rows if told else None, wanted, state.inner, mixed)
            made, changed = inner.update(gradients, state.inner, params, **extra)
            average.compare(due, params, state.inner, made)
            zeros = jax.tree.map(jnp.zeros_like, sums)
            return made, MultiStepsState(jnp.int32(0), jnp.float32(0), zeros, changed)

        # Optax needs an update of the same structure, and zeros change nothing.
        def not_yet() -> tuple[Any, MultiStepsState]:
            nothing = jax.tree.map(jnp.zeros_like, likes)
            return nothing, MultiStepsState(count, rows, sums, state.inner)

        # Inside a program both branches are traced, and only one of them runs.
        if isinstance(count, jax.core.Tracer):
            made, changed = jax.lax.cond(count == wanted, enough, not_yet)
            return made, changed
        return enough() if int(count) == wanted else not_yet()

    return AveragingTransformation(init, update)


def _with_local_steps(
    inner: Any, average: TreeAverage, rule: AveragingOptions
) -> AveragingTransformation:
    """Step by this rank's gradients, and average the parameters at the end of each round.

    `strategies.averaging.local_steps` explains rounds.
    """
    # Subtracts the mean difference, which leaves the mean of the parameters.
    outer = optax.with_extra_args_support(rule.outer or optax.sgd(1.0))

    def init(params: Any) -> LocalStepsState:
        # Copies: the program may reuse the memory of its parameters.
        anchors = jax.tree.map(jnp.array, params)
        zero = jnp.int32(0)
        return LocalStepsState(zero, zero, anchors, outer.init(anchors), inner.init(params))

    @_named
    def update(
        updates: Any, state: LocalStepsState, params: Any = None, **extra: Any
    ) -> tuple[Any, LocalStepsState]:
        if params is None:
            raise ValueError(
                "DistributedOptimizer.update: with sync_every parameters are averaged, expected "
                "update(gradients, state, params), got no params"
            )
        made, changed = inner.update(updates, state.inner, params, **extra)
        every: Any = rule.sync_every
        every = every(state.step) if callable(every) else every
        step, since = state.step + 1, state.since + 1

        def synchronize() -> tuple[Any, LocalStepsState]:
            moved = optax.apply_updates(params, made)
            differences = jax.tree.map(lambda a, p: a - p, state.anchors, moved)
            # float32, because ranks compare the floating-point scalars of these.
            counts = {"sync_every": jnp.float32(every), "local steps": jnp.float32(step)}
            # The inner state is that of this rank alone.
            means, due = average(differences, None, 1, (state.outer, counts))
            change, outside = outer.update(means, state.outer, state.anchors)
            average.compare(due, state.anchors, state.outer, change)
            anchors = optax.apply_updates(state.anchors, change)
            # Optax adds updates to the parameters before this step.
            whole = jax.tree.map(lambda a, p, m: (a - p).astype(m.dtype), anchors, params, made)
            return whole, LocalStepsState(step, jnp.int32(0), anchors, outside, changed)

        def not_yet() -> tuple[Any, LocalStepsState]:
            return made, LocalStepsState(step, since, state.anchors, state.outer, changed)

        # Inside a program both branches are traced, and only one of them runs.
        if isinstance(since, jax.core.Tracer):
            made, changed = jax.lax.cond(since >= every, synchronize, not_yet)
            return made, changed
        return synchronize() if since >= every else not_yet()

    return AveragingTransformation(init, update)


def _weigh(gradient: Any, examples: Any) -> Any:
    """Multiply by the number of examples; a mean over no rows may be NaN."""
    return jnp.where(examples == 0, 0, gradient * examples).astype(gradient.dtype)
