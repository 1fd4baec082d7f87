"""Optax transformations that average gradients over ranks.

Inside `jax.jit` a program has no arrays to send: it calls back to the host, which averages the
gradients as for any other library, and continues with the result. The callbacks are ordered, so all
ranks make them in program order. They use a communicator of their own, because JAX runs them in its
own thread while the program's thread continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

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
from strategies.replicas.context import require_one_replica

__all__ = ["AveragingTransformation", "MultiStepsState", "wrap"]

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


def wrap(
    transformation: optax.GradientTransformation, comm: cc.Communicator, rule: AveragingOptions
) -> AveragingTransformation:
    """Return a transformation that averages over the ranks; see `strategies.DistributedOptimizer`.

    *Collective*, as is every `update` of the result. The state is that of the wrapped
    transformation, or a `MultiStepsState` around it. `update` takes `examples=`, the number of rows
    of which this rank's gradients are the mean, and passes other keywords on.
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

        @_named
        def on_the_host(*hosts: Any) -> None:
            named = zip(names, hosts, strict=True)
            consistency.compare(
                self._averaging.comm,
                OPERATION,
                lambda: [fingerprint_of(kind, name, value) for (kind, name), value in named],
            )

        def in_a_program(values: list[Any]) -> None:
            # Ordered: ranks must make the callbacks in one order, and XLA may otherwise move them.
            io_callback(on_the_host, None, *values, ordered=True)

        # A value from a trace is enough: the whole comparison then belongs to the program.
        if not any(isinstance(x, jax.core.Tracer) for x in [*values, due]):
            if due:
                on_the_host(*values)
        else:
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
        settings = _float_scalars(state)
        for name, array in zip(names, arrays, strict=True):
            if isinstance(array, Rows):
                raise TypeError(
                    f"DistributedOptimizer.update: expected a dense gradient, got Rows, which are "
                    f"for strategies.optimizers, or with strategy= a parameter server (variable: "
                    f"{name})"
                )

        @_named
        def on_the_host(
            rows: Any, mixed: Any, own: Sequence[Any], *values: Any
        ) -> tuple[Any, list[Any]]:
            # Kept for the checksum, which the averaging reads in this call.
            self._settings = dict(zip(settings, own, strict=True))
            hosts = [np.asarray(value) for value in values]
            error = ValueError(MIXED_EXAMPLES) if mixed else None
            averages = self._average(names, hosts, float(rows) if told else None, passes, error)
            return np.bool_(self._averaging.due), averages

        # A callback takes arrays only, so 0 replaces a missing number.
        rows = np.float32(0) if examples is None else examples
        own = list(settings.values())
        if not any(isinstance(x, jax.core.Tracer) for x in [*arrays, *own, rows]):
            due, averages = on_the_host(rows, mixed, own, *arrays)
            results = [jnp.asarray(x) for x in averages]
        else:
            # The program must know shapes and dtypes of the results before it runs.
            shapes = jax.eval_shape(lambda: (jnp.bool_(False), arrays))
            due, results = io_callback(on_the_host, shapes, rows, mixed, own, *arrays, ordered=True)
        return jax.tree_util.tree_unflatten(tree, results), due

    def _average(
        self,
        names: Sequence[str],
        hosts: Sequence[Any],
        examples: float | None,
        passes: int,
        error: Exception | None,
    ) -> list[Any]:
        leaves = [ParameterSpec.of(name, host) for name, host in zip(names, hosts, strict=True)]
        # The program has accumulated the passes, so one accumulation is enough.
        whole = GradientAccumulator(1).add(hosts, examples=examples, error=error, count=passes)
        assert whole is not None
        averaged = self._averaging.average(leaves, whole)
        # Clipped on the host, where all ranks hold the same averages.
        self._averaging.clip(averaged)
        # Copies, because JAX keeps the arrays while the next step overwrites the buckets. A
        # gradient that no rank has means ranks without examples, which the average has rejected.
        return [np.array(g) for g in averaged]
