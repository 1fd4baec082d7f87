"""Optax transformations whose steps a strategy runs elsewhere.

Inside `jax.jit` the program calls back to the host, in its order, as `strategies.jax` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from strategies.core.pytree import WHOLE
from strategies.core.sparse import Gradient, Rows
from strategies.optimizers.optax_equivalents import equivalent
from strategies.remote_optimizers.parameter_host import HostingStrategy, Parameter, ParameterHost

__all__ = ["StrategyTransformation", "wrap"]


class StrategyTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc,name-defined,unused-ignore]
    """A transformation of Optax whose steps a strategy makes elsewhere.

    Made by `DistributedOptimizer` with a `strategy`. `init(params)` is *collective* over its tasks,
    and outside of compiled programs: all have the chief's numbers.

    `update(gradients, state, params, examples=...)` pushes gradients and returns what is added to
    `params` to become the newest values, up to the rounding of that sum. A gradient may be `Rows`;
    in a compiled program their number is fixed: rows of zeros, at an index of the step, fill up.
    There is no state: what has to be kept between steps is where they are made
    (`strategy.state_dict()`).
    """

    is_distributed = True

    def pull(self, params: Any) -> Any:
        """Return the newest values, such as for an evaluation; not in a compiled program.

        Args:
            params: whose tree it is to be.
        """
        steps: _Steps = self.update.__self__
        return steps.pull(params)


def wrap(transformation: Any, strategy: HostingStrategy) -> StrategyTransformation:
    """Return a transformation whose steps a strategy makes."""
    steps = _Steps(transformation, strategy)
    return StrategyTransformation(steps.init, steps.update)


class _Steps:
    """What `init` and `update` share: the parameters on their tasks."""

    def __init__(self, transformation: Any, strategy: HostingStrategy) -> None:
        self._optimizer = equivalent(transformation)
        self._strategy = strategy
        self._names: list[str] = []
        self._hosted: ParameterHost | None = None

    def init(self, params: Any) -> Any:
        """Put the parameters on their tasks; *collective*, when it is called for the first time."""
        names, leaves, _ = _flat(params)
        optimizer = self._optimizer
        if any(map(_is_traced, leaves)):
            raise TypeError(
                "init: other tasks take the parameters over, expected a call outside of jax.jit"
            )
        if self._hosted is None:
            self._names = names
            self._hosted = self._strategy.host(
                lambda: [
                    Parameter(name, np.asarray(leaf), optimizer)
                    for name, leaf in zip(names, leaves, strict=True)
                ],
                alike=True,
            )
        self._check(names, "init")
        return optax.EmptyState()

    def update(
        self, updates: Any, state: Any, params: Any = None, *, examples: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        """Push gradients, and return what changes the parameters to the newest values."""
        if params is None:
            raise ValueError("update: new values come from elsewhere, expected params, got None")
        names, gradients, _ = _flat(updates)
        others, values, tree = _flat(params)
        self._check(names, "update")
        self._check(others, "update")
        told = examples is not None

        def on_the_host(rows: Any, gradients: Sequence[Any], values: Sequence[Any]) -> list[Any]:
            assert self._hosted is not None
            given = [_gradient(gradient) for gradient in gradients]
            self._hosted.push(given, [None] * len(given), int(rows) if told else None)
            newest = zip(self._hosted.values, values, strict=True)
            return [new - np.asarray(old) for new, old in newest]

        rows = np.int32(examples if told else 0) if not _is_traced(examples) else examples
        # JAX knows nothing of `Rows`, only of what they consist of.
        gradients = [(g.indices, g.values) if isinstance(g, Rows) else g for g in gradients]
        if any(map(_is_traced, jax.tree_util.tree_leaves([gradients, values, rows]))):
            shapes = jax.eval_shape(lambda: values)
            changes = io_callback(on_the_host, shapes, rows, gradients, values, ordered=True)
        else:
            changes = [jnp.asarray(x) for x in on_the_host(rows, gradients, values)]
        return jax.tree_util.tree_unflatten(tree, changes), state

    def pull(self, params: Any) -> Any:
        """Return the newest values as a tree like that of the parameters."""
        names, leaves, tree = _flat(params)
        self._check(names, "pull")
        assert self._hosted is not None
        self._hosted.pull()
        # Copies: JAX keeps what it is given, and the strategy may write there.
        return jax.tree_util.tree_unflatten(
            tree, [jnp.asarray(np.array(value)) for value in self._hosted.values]
        )

    def _check(self, names: list[str], operation: str) -> None:
        if self._hosted is None or names != self._names:
            raise ValueError(
                f"{operation}: other parameters than init was given, expected "
                f"{self._names or 'init first'}, got {names}"
            )


def _flat(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return the names of a tree's leaves, these, and its structure; rows are a leaf."""
    paths, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, Rows)
    )
    names = [jax.tree_util.keystr(path) or WHOLE for path, _ in paths]
    return names, [leaf for _, leaf in paths], structure


def _gradient(given: Any) -> Gradient:
    """Return a gradient in host memory; given are rows as a tuple of indices and values."""
    if isinstance(given, tuple):
        indices, values = given
        return Rows(indices, np.asarray(values))
    return np.asarray(given)


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)
