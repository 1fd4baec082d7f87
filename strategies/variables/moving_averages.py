"""Exponential moving averages of variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from strategies.core import array_ops
from strategies.core.validation import number

__all__ = ["MovingAverages"]

Array = npt.NDArray[Any]


class MovingAverages:
    """Exponential moving averages of the values of variables.

    After every step, for every variable, with n updates so far:

        decay = min(decay, (1 + n) / (10 + n))                   if ramped
        average = decay * average + (1 - decay) * value

    No data is exchanged. Replicas with equal values, as after synchronous steps, have equal
    averages. With parameter servers or spare replicas, a task averages the values that it has; the
    chief of spare replicas has the values of every step.

    Args:
        variables: variables of any strategy, with a `name` and a `value` of any library. The
            averages of this process's values are in host memory.
        decay: number in [0, 1).
        ramped: start with a smaller decay, while values change most.

    Attributes:
        updates: number of updates.

    Example:
        >>> from typing import NamedTuple
        >>> class Weights(NamedTuple):
        ...     name: str
        ...     value: Array
        >>> w = Weights("w", np.array([1.0, 2.0]))
        >>> averages = MovingAverages([w], decay=0.5)
        >>> w.value[:] = [3, 4]
        >>> averages.update()
        >>> averages["w"].tolist()
        [2.0, 3.0]
        >>> with averages.in_place():
        ...     print(w.value)
        [2. 3.]
        >>> w.value.tolist()
        [3.0, 4.0]
    """

    def __init__(
        self, variables: Iterable[Any], *, decay: float = 0.999, ramped: bool = False
    ) -> None:
        self._variables = {variable.name: variable for variable in variables}
        self._decay = number("MovingAverages", "decay", decay, below=1)
        self._ramped = ramped
        self.updates = 0
        # In float32 at least: 16-bit floats would round small increments to zero.
        self._averages = {
            name: np.array(_wide(variable)) for name, variable in self._variables.items()
        }

    def __getitem__(self, name: str) -> Array:
        """Return the average of a variable, float32 for 16-bit variables; do not change it."""
        return self._averages[name]

    def update(self) -> None:
        """Add the current values; call it after every step."""
        decay = self._decay
        if self._ramped:
            # The ramp of TensorFlow's `ExponentialMovingAverage(num_updates=...)`.
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, average in self._averages.items():
            # In this form the average of a constant value stays exactly that value.
            average += (1 - decay) * (_wide(self._variables[name]) - average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the variables' values by their averages in a block, such as for an evaluation.

        Raises:
            ValueError: a value cannot be changed, because it is a copy, as on the workers of a
                parameter server, or read-only; read the averages by name instead.
        """
        for name, variable in self._variables.items():
            # All variables are checked before the first one changes.
            if why := _why_constant(variable):
                raise ValueError(
                    f"in_place: {why}, expected averages[name] to be read (variable: {name})"
                )
        # Copies, because `_assign` may write into the same memory.
        before = {name: np.array(_host(variable)) for name, variable in self._variables.items()}
        try:
            for name, variable in self._variables.items():
                _assign(variable, self._averages[name])
            yield
        finally:
            for name, variable in self._variables.items():
                _assign(variable, before[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as copies."""
        copies = {f"average/{name}": value.copy() for name, value in self._averages.items()}
        return {"updates": self.updates, **copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            ValueError: the state belongs to other variables. Nothing has changed.
        """
        wanted = {f"average/{name}": average.shape for name, average in self._averages.items()}
        given = {name: np.shape(value) for name, value in state.items() if name != "updates"}
        # Names and shapes are compared first, so that a wrong state changes nothing.
        if wanted != given or "updates" not in state:
            raise ValueError(
                f"load_state_dict: expected the averages of these variables, {wanted} and updates, "
                f"got {given}"
            )
        for name, average in self._averages.items():
            average[...] = state[f"average/{name}"]
        self.updates = int(state["updates"])


def _host(variable: Any) -> Array:
    value = variable.value
    return array_ops.to_host(value) if array_ops.is_array(value) else np.asarray(value)


def _wide(variable: Any) -> Array:
    found: Array = array_ops.arithmetic_dtype(_host(variable))
    return found


def _why_constant(variable: Any) -> str | None:
    """Return the reason why a variable's value cannot be replaced; None if it can."""
    if getattr(variable, "is_copy", False):
        return "the value is a copy of one elsewhere, which must not be changed"
    if hasattr(variable, "assign"):
        return None
    value = variable.value
    if array_api_compat.is_jax_array(value):
        return "the value is an array of JAX, which never changes"
    read_only = isinstance(value, np.ndarray) and not value.flags.writeable
    return "the value is read-only" if read_only else None


def _assign(variable: Any, array: Array) -> None:
    if hasattr(variable, "assign"):
        variable.assign(array)
        return
    # PyTorch rejects an in-place change of a parameter that requires gradients.
    value = variable.value.detach() if hasattr(variable.value, "detach") else variable.value
    array_ops.overwrite(value, array_ops.on_same_device(value, array))
