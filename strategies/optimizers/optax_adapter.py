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
    """Adapts an Optax transformation to variables of a strategy that hold JAX arrays.

    Pass it to `strategy.apply_gradients`, which first sums the gradients of all replicas. Any
    transformation works, including chains with clipping, masks and schedules. One compiled program
    updates all variables. They must be the same in every step. A gradient of None counts as zero.

    Args:
        transformation: an Optax transformation, such as `optax.adam(1e-3)`.

    Raises:
        TypeError: the argument is not a transformation.
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
        # By its methods, so that the check does not import Optax.
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
        self._state: Any = None  # created with the first gradients
        self._loaded: list[Any] | None = None  # set by load_state_dict until the next step
        self.step = 0

    def __repr__(self) -> str:
        return f"Optax({self._transformation!r})"

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Change every variable; change none if one of the pairs is invalid.

        Args:
            grads_and_vars: (gradient, variable) pairs. A variable has a name and a JAX array as
                value, like those of a strategy. A gradient has its shape and dtype.

        Raises:
            ValueError: a shape or dtype differs, the variables differ from the last step, or a
                loaded state does not fit.
            TypeError: a variable does not hold a JAX array, or a gradient is `Rows`.
        """
        import jax.numpy as jnp

        pairs = gradients.resolve(grads_and_vars, "Optax")
        # All pairs before the first change.
        for pair in pairs:
            _check(pair)
        values = {pair.key: pair.value for pair in pairs}
        given = {
            # The transformation needs all leaves; zero is the gradient of an unused variable.
            pair.key: jnp.zeros_like(pair.value) if pair.gradient is None else pair.gradient
            for pair in pairs
        }
        state = self._state_for(values)
        new, self._state = self._update(given, state, values)
        # After the update, so that an error in it keeps the loaded state.
        self._names, self._loaded = list(values), None
        for pair in pairs:
            assert pair.settle is not None
            pair.settle(new[pair.key])
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`.

        Returns:
            `step`, and `state/<n>`: the arrays of the transformation's state, in their order.
        """
        import jax

        # Loaded leaves are returned until the first step has given them a structure.
        leaves = jax.tree.leaves(self._state) if self._loaded is None else self._loaded
        return {"step": self.step, **{f"{_STATE}{n}": leaf for n, leaf in enumerate(leaves)}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the state by one from `state_dict`; the next `apply_gradients` checks it.

        Raises:
            ValueError: a key is missing or unknown.
        """
        count = len(state_dict) - 1
        expected = ["step", *(f"{_STATE}{n}" for n in range(count))]
        if set(expected) != set(state_dict):
            raise ValueError(f"Optax: bad state, expected {expected}, got {sorted(state_dict)}")
        self.step = integer("Optax", "'step' in state", state_dict["step"], least=0)
        # A state of step 0 has no leaves: the transformation makes its own.
        self._loaded = [state_dict[name] for name in expected[1:]] if self.step else None
        self._state, self._names = None, []

    def _state_for(self, values: dict[str, Any]) -> Any:
        """Return the state before this step: the last one, a loaded one, or a new one."""
        import jax
        import jax.numpy as jnp

        if self._state is not None:
            # Optax has no names for leaves, so the order of the variables must not change.
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
        # Compared by shape and dtype, because the saved state is a flat list.
        forms = [
            [(np.shape(x), str(jnp.result_type(x))) for x in of] for of in (leaves, self._loaded)
        ]
        if forms[0] != forms[1]:
            raise ValueError(
                f"Optax: the state is from other variables or another transformation, expected "
                f"arrays {forms[0]}, got {forms[1]}"
            )
        # Copies: the program may reuse the memory of its state.
        return jax.tree.unflatten(structure, [jnp.array(leaf) for leaf in self._loaded])

    @cached_property
    def _update(self) -> Any:
        import jax
        import optax

        # Values, gradients and state are arguments, so one program serves all steps.
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
