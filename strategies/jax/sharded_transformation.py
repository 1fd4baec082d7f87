"""Optax transformations whose state is divided among the ranks (ZeRO, stage 1).

An update is two calls on the host, in program order: a reduce-scatter of the gradients before the
wrapped transformation, which gets this rank's parts, and an all-gather of its updates after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import collectives as cc
from strategies.averaging.options import OPERATION, AveragingOptions
from strategies.averaging.sharded_buckets import box_of
from strategies.checkpoint.boxes import Slice
from strategies.jax.transformation import AveragingTransformation, MultiStepsState, averaged
from strategies.jax.tree_average import TreeAverage, name_of, part_of_rank

__all__ = ["ShardedState", "ShardedTransformation", "wrap"]

# The check for elementwise transformations: rows of its arrays, and steps. The steps see clipping
# of accumulated gradients up to this number of passes.
_EXTENT = 4
_STEPS = 24


class ShardedState(NamedTuple):
    """State of a transformation with `shard_state`; differs between ranks.

    Attributes:
        rank: the rank whose parts these are, int32.
        inner: state of the wrapped transformation for this rank's part of every parameter.
    """

    rank: Any
    inner: Any


class ShardedTransformation(AveragingTransformation):
    """An Optax transformation whose state is divided among the ranks.

    Its state is a `ShardedState`, and `update` needs the parameters.
    """

    _parts: _Parts

    def to_slices(self, state: Any, params: Any) -> Any:
        """Return the state for a sharded checkpoint: that of the wrapped transformation.

        This rank's part of each array is a `Slice`. `Saver` restores the result with another number
        of ranks. A transformation without `shard_state` restores it as its own state.

        Args:
            state: state of this rank.
            params: the parameters; only shapes and dtypes are used.

        Returns:
            State of the wrapped transformation, without copies.

        Example:
            >>> import jax.numpy as jnp, optax, strategies
            >>> tx = strategies.DistributedOptimizer(optax.adam(0.1), shard_state=True)
            >>> params = {"w": jnp.ones((4, 3))}
            >>> tx.to_slices(tx.init(params), params)[0].mu["w"].shape
            (4, 3)
        """
        if isinstance(state, MultiStepsState):
            return state._replace(inner=self._parts.to_slices(state.inner, params))
        return self._parts.to_slices(state, params)

    def from_slices(self, slices: Any) -> Any:
        """Return the state of this rank, given the restored result of `to_slices`."""
        if isinstance(slices, MultiStepsState):
            return slices._replace(inner=self._parts.from_slices(slices.inner))
        return self._parts.from_slices(slices)


def wrap(
    transformation: optax.GradientTransformation, comm: cc.Communicator, rule: AveragingOptions
) -> ShardedTransformation:
    """Return a transformation that averages over the ranks and holds a part of the state.

    *Collective*, as is every `update` of the result; see `strategies.DistributedOptimizer`. The
    first `init` raises a `ValueError` for a transformation that is not elementwise.
    """
    average = TreeAverage(comm, rule)
    parts = _Parts(transformation, average)
    made = averaged(parts, average)
    sharded = ShardedTransformation(made.init, made.update)
    sharded.comm, sharded._parts = made.comm, parts
    return sharded


class _Parts:
    """A transformation of averages in parts, which returns whole updates."""

    def __init__(self, transformation: Any, average: TreeAverage) -> None:
        self._given, self._average = transformation, average
        self._inner = optax.with_extra_args_support(transformation)
        self._checked = False
        # Whole shape of each array of the state; None if all ranks hold it.
        self._shapes: list[tuple[int, ...] | None] | None = None

    def init(self, params: Any) -> ShardedState:
        if not self._checked:
            # The check does not belong to a program that JAX traces.
            with jax.ensure_compile_time_eval():
                _check_elementwise(self._given, params)
            self._checked = True
        rank = jnp.int32(self._average.comm.rank)
        return ShardedState(rank, self._inner.init(jax.tree.map(self._average.part, params)))

    def update(
        self, means: Any, state: ShardedState, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        if params is None:
            raise ValueError(
                "DistributedOptimizer.update: with shard_state each rank updates a part of every "
                "parameter, expected update(gradients, state, params), got no params"
            )
        own = jax.tree.map(self._average.part, params)
        made, changed = self._inner.update(means, state.inner, own, **extra)
        return self._average.gather(made, params), ShardedState(state.rank, changed)

    def to_slices(self, state: ShardedState, params: Any) -> Any:
        if self._shapes is None:
            forms = zip(*map(jax.tree.leaves, _forms(self._inner, params)), strict=True)
            self._shapes = [None if w.shape == half.shape else w.shape for w, half in forms]
        leaves, tree = jax.tree_util.tree_flatten(state.inner)
        return jax.tree_util.tree_unflatten(
            tree, [self._sliced(*pair) for pair in zip(leaves, self._shapes, strict=True)]
        )

    def _sliced(self, value: Any, shape: tuple[int, ...] | None) -> Any:
        if shape is None:
            return value
        comm = self._average.comm
        return Slice(value, box_of(shape, comm.rank, comm.size).start, shape)

    def from_slices(self, slices: Any) -> ShardedState:
        inner = jax.tree.map(lambda x: x.array if isinstance(x, Slice) else x, slices)
        return ShardedState(jnp.int32(self._average.comm.rank), inner)


def _forms(transformation: Any, params: Any) -> tuple[Any, Any]:
    """Return shapes and dtypes of the state of whole parameters, and of the first halves.

    Arrays of the parameters' elements have other shapes in the two.
    """
    whole = jax.eval_shape(transformation.init, params)
    half = jax.eval_shape(lambda tree: transformation.init(jax.tree.map(_half, tree)), params)
    return whole, half


def _half(array: Any) -> Any:
    """Return the part of rank 0 of 2."""
    return part_of_rank(array, 0, 2)


def _check_elementwise(transformation: Any, params: Any) -> None:
    """Reject a transformation whose result for an element depends on other elements.

    The same on all ranks, and on any number of them.

    Raises:
        ValueError: the state or the updates of half of each parameter are not half of the whole.
    """
    inner = optax.with_extra_args_support(transformation)
    cause = None
    try:
        fact = _undivided_state(inner, params) or _changed_update(inner, params)
    except Exception as error:
        cause = error
        fact = f"raises {type(error).__name__} for a part of each parameter: {error}"
    if fact:
        update = getattr(transformation.update, "__qualname__", "update").partition(".")[0]
        raise ValueError(
            f"{OPERATION}: with shard_state each rank updates a part of every parameter, expected "
            f"an elementwise transformation, got {update}, which {fact}; clip_global_norm= clips "
            "by the norm of all parts"
        ) from cause


def _undivided_state(inner: Any, params: Any) -> str | None:
    """Describe an array of the state that depends on shapes of parameters, but is not cut so."""
    larger = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(tuple(2 * n for n in x.shape), x.dtype), params
    )
    states = [*_forms(inner, params), jax.eval_shape(inner.init, larger)]
    if len(set(map(jax.tree.structure, states))) > 1:
        return "has other states for other shapes"
    paths, _ = jax.tree_util.tree_flatten_with_path(states[0])
    for (path, whole), half, other in zip(paths, *map(jax.tree.leaves, states[1:]), strict=True):
        if whole.shape != other.shape and half.shape != box_of(whole.shape, 0, 2).shape:
            return f"has state for several elements, state{name_of(path)}"
    return None


def _changed_update(inner: Any, params: Any) -> str | None:
    """Describe an update that differs when the transformation sees a part of each parameter."""
    random = np.random.default_rng(3)

    def values(scale: float, last: float | None = None) -> Any:
        def of(like: Any) -> Any:
            # Not around 0: some transformations estimate the distance from the start.
            shape = [min(n, _EXTENT) for n in like.shape]
            x = np.asarray(scale * (1 + random.standard_normal(shape)), np.float32)
            if last is not None and x.size > 1:
                x.flat[-1] = last
            return x

        return jax.tree.map(of, params)

    start = values(1.0)
    # Gradients that exceed limits, and in the end some that are not finite, outside the corners.
    gradients = [values(1e4 if step % 2 else 1.0) for step in range(_STEPS)] + [values(1.0, np.inf)]

    def one_step(gradient: Any, state: Any, at: Any) -> tuple[Any, Any, Any]:
        # The loss, which Optax passes to schedules such as `reduce_on_plateau`.
        updates, state = inner.update(gradient, state, at, value=jnp.float32(1))
        return updates, state, optax.apply_updates(at, updates)

    step = jax.jit(one_step)

    def run(cut: Callable[[Any], Any]) -> list[Any]:
        at, *given = (jax.tree.map(lambda x: jnp.asarray(cut(x)), x) for x in (start, *gradients))
        state, found = inner.init(at), []
        for gradient in given:
            updates, state, at = step(gradient, state, at)
            found.append(jax.tree.map(np.asarray, updates))
        return found

    for whole, part in zip(run(np.asarray), run(_corner), strict=True):
        paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.map(_corner, whole))
        for (path, exact), update in zip(paths, jax.tree.leaves(part), strict=True):
            if not _near(update, exact):
                return f"updates elements by other elements, {name_of(path)}"
    return None


def _corner(array: Any) -> Any:
    """Return the first half along every axis."""
    return array[tuple(slice(max(n // 2, 1)) for n in array.shape)]


def _near(own: Any, other: Any) -> bool:
    """Return whether arrays are equal up to rounding in float32."""
    size = np.abs(other[np.isfinite(other)]).max(initial=0)
    return np.allclose(own, other, rtol=1e-3, atol=1e-3 * size, equal_nan=True)
