"""Optax transformations that average gradients over ranks.

Inside `jax.jit` the step is one call of a Python function, in program order with the operations of
`strategies.jax`. It averages all gradients together, as for any other library: from XLA's buffers
into buckets, and from there into the buffers of the results. The calls use a communicator of their
own, because JAX runs them in its own thread while the program's thread continues.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import collectives as cc
from collectives.extend import known_as
from strategies.averaging import consistency
from strategies.averaging.accumulation import MIXED_EXAMPLES, GradientAccumulator
from strategies.averaging.averaging import Averaging
from strategies.averaging.consistency import Kind, fingerprint_of
from strategies.averaging.options import OPERATION, AveragingOptions
from strategies.averaging.parameter_spec import ParameterSpec
from strategies.core.array_ops import COMPUTE
from strategies.core.pytree import WHOLE
from strategies.core.sparse import Rows
from strategies.jax.host_calls import host_call
from strategies.replicas.context import require_one_replica

__all__ = ["AveragingTransformation", "LocalStepsState", "MultiStepsState", "wrap"]

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
    inner = optax.with_extra_args_support(transformation)
    # A private communicator, because JAX's thread may send while the program's thread does.
    own = comm.split(0, comm.rank)
    assert own is not None
    average = _Average(own, rule)

    @_named
    def update(
        updates: Any, state: Any, params: Any = None, *, examples: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        averaged, due = average(updates, examples, 1, state)
        made, changed = inner.update(averaged, state, params, **extra)
        average.compare(due, params, state, made)
        return made, changed

    made = AveragingTransformation(inner.init, update)
    if rule.backward_passes_per_step > 1:
        made = _with_passes(inner, average, rule.backward_passes_per_step)
    if rule.sync_every is not None:
        made = _with_local_steps(inner, average, rule)
    made.comm = own
    return made


def _with_passes(inner: Any, average: _Average, wanted: int) -> AveragingTransformation:
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
    inner: Any, average: _Average, rule: AveragingOptions
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


def _name(path: Sequence[Any]) -> str:
    """Return the name of a leaf of a tree."""
    return jax.tree_util.keystr(path) or WHOLE


def _float_scalars(state: Any) -> dict[str, Any]:
    """Return the floating-point scalars of a state by name.

    Learning rates (`optax.inject_hyperparams`, line searches), the scale of `reduce_on_plateau` and
    its losses are such scalars. A state does not mark the scalars that updates depend on, so all
    are compared; a rank's own loss in one of them is an error.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        _name(path): leaf
        for path, leaf in leaves
        if isinstance(leaf, float)
        or (getattr(leaf, "shape", None) == () and jnp.issubdtype(leaf.dtype, jnp.floating))
    }


def _plain(leaf: Any) -> Any:
    """Return the data of a random key; other leaves unchanged."""
    # A typed key has no elements that the host could read.
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _like(array: Any) -> Any:
    """Return an array of zeros with the shape and dtype of an array, in the memory of one zero."""
    host = array if isinstance(array, jax.core.Tracer) else np.asarray(array)
    return np.broadcast_to(np.zeros((), host.dtype), host.shape)


class _Average:
    """Averages trees of arrays, inside and outside compiled programs."""

    def __init__(self, comm: cc.Communicator, rule: AveragingOptions) -> None:
        self._settings: dict[str, Any] = {}
        self._averaging = Averaging(comm, rule, lambda: self._settings)

    def compare(self, due: Any, params: Any, state: Any, updates: Any) -> None:
        """Compare the ranks' results of an average, if a comparison is due; *collective* then."""
        rule = self._averaging.rule
        if rule.compare == "nothing":
            return
        # Parameters may be None: an empty tree has no leaves.
        trees: dict[Kind, Any] = {"parameter": params}
        if rule.compare == "all":
            trees |= {"state": state, "update": updates}
        paths, _ = jax.tree_util.tree_flatten_with_path(trees)
        names = [(path[0].key, _name(path[1:])) for path, _ in paths]
        values = [_plain(value) for _, value in paths]

        def on_the_host(own: _Average, hosts: Sequence[Any], results: Sequence[Any]) -> None:
            named = zip(names, hosts, strict=True)
            consistency.compare(
                own._averaging.comm,
                OPERATION,
                lambda: [fingerprint_of(kind, name, value) for (kind, name), value in named],
            )

        # A value from a trace is enough: the whole comparison then belongs to the program.
        if not any(isinstance(x, jax.core.Tracer) for x in [*values, due]):
            if due:
                on_the_host(self, values, [])
        else:

            def in_a_program(values: list[Any]) -> None:
                host_call(on_the_host, self, [], values)

            # The same on all ranks, so that all of them compare or none does.
            jax.lax.cond(due, in_a_program, lambda values: None, values)

    def __call__(
        self, updates: Any, examples: Any, passes: int, state: Any, mixed: Any = False
    ) -> tuple[Any, Any]:
        """Return the same tree with the averages over all ranks, and whether a comparison is due.

        Args:
            updates: sums over `passes` passes; means over `examples` unless that is None.
            examples: number of examples, or None.
            passes: number of passes.
            state: state of the wrapped transformation, whose `_float_scalars` are compared.
            mixed: whether only some of the passes had examples; an error on all ranks.
        """
        require_one_replica("update")
        paths, tree = jax.tree_util.tree_flatten_with_path(updates)
        arrays = [array for _, array in paths]
        names = [_name(path) for path, _ in paths]
        told = examples is not None
        scalars = _float_scalars(state)
        settings = list(scalars)
        for name, array in zip(names, arrays, strict=True):
            if isinstance(array, Rows):
                raise TypeError(
                    f"DistributedOptimizer.update: expected a dense gradient, got Rows, which are "
                    f"for strategies.optimizers, or with strategy= a parameter server (variable: "
                    f"{name})"
                )

        def on_the_host(own: _Average, given: Sequence[Any], results: Sequence[Any]) -> None:
            rows, mixed, *others = given
            # For the checksum, which keeps them: XLA reuses the memory of the operands.
            own._settings = dict(zip(settings, map(copy.copy, others), strict=False))
            hosts = [np.asarray(value) for value in others[len(settings) :]]
            error = ValueError(MIXED_EXAMPLES) if mixed else None
            averages = own._average(leaves, hosts, float(rows) if told else None, passes, error)
            for result, average in zip(results, [own._averaging.due, *averages], strict=True):
                np.copyto(result, average)

        leaves = [ParameterSpec.of(*pair) for pair in zip(names, map(_like, arrays), strict=True)]
        # An array replaces a missing number.
        rows = np.float32(0) if examples is None else examples
        given = [rows, mixed, *scalars.values(), *arrays]
        # The program must know shapes and dtypes of the results before it runs.
        likes = [jax.ShapeDtypeStruct((), bool), *jax.eval_shape(lambda: arrays)]
        if any(isinstance(x, jax.core.Tracer) for x in given):
            due, *averages = host_call(on_the_host, self, likes, [jnp.asarray(x) for x in given])
        else:
            # New memory, because JAX keeps the arrays while the next step overwrites the buckets.
            due, *hosts = results = [np.empty(like.shape, like.dtype) for like in likes]
            on_the_host(self, given, results)
            averages = [jnp.asarray(x) for x in hosts]
        return jax.tree_util.tree_unflatten(tree, averages), due

    def _average(
        self,
        leaves: Sequence[ParameterSpec],
        hosts: Sequence[Any],
        examples: float | None,
        passes: int,
        error: Exception | None,
    ) -> list[Any]:
        # The program has accumulated the passes, so one accumulation is enough.
        whole = GradientAccumulator(1).add(hosts, examples=examples, error=error, count=passes)
        assert whole is not None
        averaged = self._averaging.average(leaves, whole)
        # Clipped on the host, where all ranks hold the same averages.
        self._averaging.clip(averaged)
        # A gradient that no rank has means ranks without examples, which the average has rejected.
        return averaged
