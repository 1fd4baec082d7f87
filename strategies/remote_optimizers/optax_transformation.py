"""Optax transformations whose steps a strategy runs elsewhere.

Inside `jax.jit`, a call of a Python function pushes the gradients (`strategies.jax.host_calls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from strategies.core.pytree import WHOLE
from strategies.core.sparse import Gradient, Rows
from strategies.jax.host_calls import host_call
from strategies.optimizers.optax_equivalents import equivalent
from strategies.remote_optimizers.parameter_host import HostingStrategy, Parameter, ParameterHost

__all__ = ["StrategyTransformation", "wrap"]


class StrategyTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc,name-defined,unused-ignore]
    """An Optax transformation whose steps a strategy runs on other tasks.

    `DistributedOptimizer` creates it for a `strategy`. `init(params)` is *collective* over its
    tasks and must be called outside compiled programs; all tasks must have the chief's values.

    `update(gradients, state, params, examples=...)` pushes gradients and returns the difference
    between the newest values and `params`, up to rounding. A gradient may be `Rows`. Compiled
    programs require a fixed number of rows: pad with rows of zeros at an index of the step. The
    state is empty; the slots are on the tasks that run the steps (`strategy.state_dict()`).
    """

    is_distributed = True

    def pull(self, params: Any) -> Any:
        """Return the newest values, such as for an evaluation; not in a compiled program.

        Args:
            params: tree with the structure of the result.
        """
        # The class is a NamedTuple of two functions, so the state is found through the method.
        steps: _Steps = self.update.__self__
        return steps.pull(params)


def wrap(transformation: Any, strategy: HostingStrategy) -> StrategyTransformation:
    """Return a transformation whose steps a strategy runs."""
    steps = _Steps(transformation, strategy)
    return StrategyTransformation(steps.init, steps.update)


class _Steps:
    """Shared state of `init` and `update`: the parameters on their tasks."""

    def __init__(self, transformation: Any, strategy: HostingStrategy) -> None:
        self._optimizer = equivalent(transformation)
        self._strategy = strategy
        self._names: list[str] = []
        self._hosted: ParameterHost | None = None

    def init(self, params: Any) -> Any:
        """Create the parameters on their tasks; *collective* at the first call."""
        names, leaves, _ = _flat(params)
        optimizer = self._optimizer
        if any(map(_is_traced, leaves)):
            # Inside a compiled program the values do not exist yet.
            raise TypeError(
                "init: other tasks take the parameters over, expected a call outside of jax.jit"
            )
        if self._hosted is None:
            # Only the first call creates the parameters; later calls compare the names below.
            self._names = names
            self._hosted = self._strategy.host(
                lambda: [
                    Parameter(name, np.asarray(leaf), optimizer)
                    for name, leaf in zip(names, leaves, strict=True)
                ],
                # JAX arrays cannot be overwritten, so all processes must start from the chief's
                # values.
                alike=True,
            )
        self._check(names, "init")
        return optax.EmptyState()

    def update(
        self, updates: Any, state: Any, params: Any = None, *, examples: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        """Push gradients, and return the changes to the newest values."""
        if params is None:
            raise ValueError("update: new values come from elsewhere, expected params, got None")
        names, gradients, _ = _flat(updates)
        others, values, tree = _flat(params)
        self._check(names, "update")
        self._check(others, "update")
        # Outside of the function: a compiled program passes a placeholder instead of None.
        told = examples is not None
        structure: Any = None

        def on_the_host(own: _Steps, given: Sequence[Any], results: Sequence[Any]) -> None:
            assert own._hosted is not None
            rows, gradients, values = jax.tree_util.tree_unflatten(structure, given)
            pushed = [_gradient(gradient) for gradient in gradients]
            own._hosted.push(pushed, [None] * len(pushed), int(rows) if told else None)
            for result, new, old in zip(results, own._hosted.values, values, strict=True):
                # Optax adds updates to `params`, so the result is a difference.
                np.copyto(result, new - np.asarray(old))

        rows = np.int32(examples if told else 0) if not _is_traced(examples) else examples
        # JAX does not accept `Rows`, only their arrays.
        gradients = [(g.indices, g.values) if isinstance(g, Rows) else g for g in gradients]
        given, structure = jax.tree_util.tree_flatten((rows, gradients, values))
        likes = jax.eval_shape(lambda: values)
        if any(map(_is_traced, given)):
            # In order, because pushes of two steps must not overtake each other.
            changes = host_call(on_the_host, self, likes, [jnp.asarray(x) for x in given])
        else:
            results = [np.empty(like.shape, like.dtype) for like in likes]
            on_the_host(self, given, results)
            changes = [jnp.asarray(x) for x in results]
        return jax.tree_util.tree_unflatten(tree, changes), state

    def pull(self, params: Any) -> Any:
        """Return the newest values as a tree like `params`."""
        names, leaves, tree = _flat(params)
        self._check(names, "pull")
        assert self._hosted is not None
        self._hosted.pull()
        # Copies: JAX may alias NumPy memory, which the strategy overwrites.
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
    """Return names, leaves and structure of a tree; `Rows` are leaves."""
    paths, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, Rows)
    )
    names = [jax.tree_util.keystr(path) or WHOLE for path, _ in paths]
    return names, [leaf for _, leaf in paths], structure


def _gradient(given: Any) -> Gradient:
    """Return a gradient in host memory; a tuple of indices and values becomes `Rows`."""
    if isinstance(given, tuple):
        indices, values = given
        return Rows(indices, np.asarray(values))
    return np.asarray(given)


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)
