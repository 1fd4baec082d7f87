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
    """Means of all values that variables have had, of which older ones count less.

    After every step, for every variable, with n updates so far:

        decay = min(decay, (1 + n) / (10 + n))                   if ramped
        average = decay * average + (1 - decay) * value

    Nothing is exchanged: where replicas have the same values, as in steps that they make together,
    they have the same averages. With parameter servers or spare replicas, one task averages the
    values that it has; of the chief of spare replicas these are those of every step.

    Args:
        variables: with a `name` and a `value` of any library, such as those of any strategy. Their
            averages are in host memory, of the values that this process has.
        decay: a number in [0, 1).
        ramped: let the first values count more, while they change most.

    Attributes:
        updates: how many there have been.

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
        # 16-bit floats would not change by what is less than half of their last digit.
        self._averages = {
            name: np.array(_wide(variable)) for name, variable in self._variables.items()
        }

    def __getitem__(self, name: str) -> Array:
        """Return the average of a variable, float32 for one of 16 bits; it must not be changed."""
        return self._averages[name]

    def update(self) -> None:
        """Take the present values in; after every step."""
        decay = self._decay
        if self._ramped:
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, average in self._averages.items():
            average += (1 - decay) * (_wide(self._variables[name]) - average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the variables have their averages inside of a block, such as for an evaluation.

        Raises:
            ValueError: a variable's value must not be changed: it is a copy, as on the workers
                of a parameter server, or read-only; read the averages by name.
        """
        for name, variable in self._variables.items():
            if why := _why_constant(variable):
                raise ValueError(
                    f"in_place: {why}, expected averages[name] to be read (variable: {name})"
                )
        before = {name: np.array(_host(variable)) for name, variable in self._variables.items()}
        try:
            for name, variable in self._variables.items():
                _assign(variable, self._averages[name])
            yield
        finally:
            for name, variable in self._variables.items():
                _assign(variable, before[name])

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep, as copies."""
        copies = {f"average/{name}": value.copy() for name, value in self._averages.items()}
        return {"updates": self.updates, **copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: it is of other variables. Nothing has changed.
        """
        wanted = {f"average/{name}": average.shape for name, average in self._averages.items()}
        given = {name: np.shape(value) for name, value in state.items() if name != "updates"}
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
    """Say why a variable cannot take another value for a while, None if it can."""
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
    value = variable.value.detach() if hasattr(variable.value, "detach") else variable.value
    array_ops.overwrite(value, array_ops.on_same_device(value, array))
