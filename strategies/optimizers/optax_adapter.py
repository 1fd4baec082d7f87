"""Optax transformations as optimizers for JAX variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import array_api_compat
import numpy as np

from strategies.core.validation import integer
from strategies.optimizers import gradient_pairs as gradients
from strategies.optimizers.gradient_pairs import Pair

__all__ = ["Optax"]

_STATE = "state/"


class Optax:
    """Steps as a transformation of Optax does, for variables of a strategy that hold arrays of JAX.

    For `strategy.apply_gradients`, where gradients of all replicas have become one; there is no
    table of what it may be, chains with clipping, masks and schedules included. All variables are
    updated by one compiled program. They must be the same at every step; a gradient of None counts
    as zero.

    Args:
        transformation: such as `optax.adam(1e-3)`.

    Raises:
        TypeError: it is not a transformation.
        ValueError: `DistributedOptimizer` has wrapped it.

    Attributes:
        step: number of updates so far.

    Example:
        >>> import optax
        >>> import strategies
        >>> strategy = strategies.TPUStrategy()
        >>> w = strategy.variable(np.ones(2, "float32"), name="w")
        >>> optimizer = strategies.optimizers.Optax(optax.sgd(0.5))
        >>> strategy.run(lambda: strategy.apply_gradients(optimizer, [(w.value, w)]))
        >>> np.asarray(w.value).tolist()
        [0.5, 0.5]
    """

    def __init__(self, transformation: Any) -> None:
        if not all(callable(getattr(transformation, name, None)) for name in ("init", "update")):
            raise TypeError(
                "Optax: expected a transformation, such as optax.adam(1e-3), got "
                f"{type(transformation).__name__}"
            )
        if getattr(type(transformation), "is_distributed", False):
            raise ValueError(
                "Optax: the strategy averages gradients, expected a transformation that "
                "DistributedOptimizer has not wrapped, got a wrapped one"
            )
        self._transformation = transformation
        self._names: list[str] = []
        self._state: Any = None  # made with the first gradients
        self._loaded: list[Any] | None = None  # until then
        self.step = 0

    def __repr__(self) -> str:
        return f"Optax({self._transformation!r})"

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Change every variable; none when one of the pairs is wrong.

        Args:
            grads_and_vars: (gradient, variable) pairs. A variable has a name and a value that is an
                array of JAX, as those that a strategy makes; a gradient has its shape and dtype.

        Raises:
            ValueError: a shape or dtype differs, there are other variables than in the last step,
                or a loaded state does not fit.
            TypeError: a variable is not one of JAX, or a gradient is `Rows`.
        """
        import jax.numpy as jnp

        pairs = gradients.resolve(grads_and_vars, "Optax")
        for pair in pairs:
            _check(pair)
        values = {pair.key: pair.value for pair in pairs}
        given = {
            pair.key: jnp.zeros_like(pair.value) if pair.gradient is None else pair.gradient
            for pair in pairs
        }
        state = self._state_for(values)
        new, self._state = self._update(given, state, values)
        self._names, self._loaded = list(values), None
        for pair in pairs:
            assert pair.settle is not None
            pair.settle(new[pair.key])
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs to go on from here.

        Returns:
            `step`, and `state/<n>`: the arrays of the transformation's state, in their order.
        """
        import jax

        leaves = jax.tree.leaves(self._state) if self._loaded is None else self._loaded
        return {"step": self.step, **{f"{_STATE}{n}": leaf for n, leaf in enumerate(leaves)}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state, as given by `state_dict`; the next `apply_gradients` checks it.

        Raises:
            ValueError: a key is missing or unknown.
        """
        count = len(state_dict) - 1
        expected = ["step", *(f"{_STATE}{n}" for n in range(count))]
        if set(expected) != set(state_dict):
            raise ValueError(f"Optax: bad state, expected {expected}, got {sorted(state_dict)}")
        self.step = integer("Optax", "'step' in state", state_dict["step"], least=0)
        self._loaded = [state_dict[name] for name in expected[1:]] if self.step else None
        self._state, self._names = None, []

    def _state_for(self, values: dict[str, Any]) -> Any:
        """Return the state before this step: the last one, that of a checkpoint, or a new one."""
        import jax
        import jax.numpy as jnp

        if self._state is not None:
            if list(values) != self._names:
                raise ValueError(
                    f"Optax: other variables than in the last step, expected {self._names}, got "
                    f"{list(values)}"
                )
            return self._state
        made = self._transformation.init(values)
        if self._loaded is None:
            return made
        leaves, structure = jax.tree.flatten(made)
        forms = [
            [(np.shape(x), str(jnp.result_type(x))) for x in of] for of in (leaves, self._loaded)
        ]
        if forms[0] != forms[1]:
            raise ValueError(
                f"Optax: the state is of other variables or of another transformation, expected "
                f"arrays {forms[0]}, got {forms[1]}"
            )
        return jax.tree.unflatten(structure, [jnp.array(leaf) for leaf in self._loaded])

    @cached_property
    def _update(self) -> Any:
        import jax
        import optax

        def update(given: Any, state: Any, values: Any) -> Any:
            updates, state = self._transformation.update(given, state, values)
            return optax.apply_updates(values, updates), state

        return jax.jit(update)


def _check(pair: Pair) -> None:
    if pair.settle is None or not array_api_compat.is_jax_array(pair.value):
        raise TypeError(
            f"Optax: expected a variable of a strategy that holds an array of JAX, got "
            f"{type(pair.value).__name__} ({pair.where})"
        )
    if pair.rows is not None:
        raise TypeError(f"Optax: expected a dense gradient, got Rows ({pair.where})")
