"""The copies of variables on ps tasks that workers compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from strategies.parameter_server.layout import Part, offsets
from strategies.variables import partition

__all__ = ["Owner", "ServedVariable"]

Array = npt.NDArray[Any]


class Owner(Protocol):
    """What a variable asks of the strategy that made it."""

    def assign(self, variable: ServedVariable, value: npt.ArrayLike) -> None:
        """Let a variable take another value on its ps tasks, and in the copy here."""


class ServedVariable:
    """A variable of a `ParameterServerStrategy`: parts of it on ps tasks, and here a copy.

    Args:
        name: of the variable.
        value: what it starts from.
        parts: where it is.
        strategy: that made it.
        resident: whether there is a copy here.

    Attributes:
        name: as in checkpoints and errors.
        parts: where it is.
        offsets: the first row of each part, and the row after the last one.
        shape: of the value.
        dtype: of the value.
        strategy: that made it.
        resident: whether there is a copy here.
    """

    def __init__(
        self,
        name: str,
        value: Array,
        parts: Sequence[Part],
        strategy: Owner,
        resident: bool,
    ) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.shape = value.shape
        self.dtype = value.dtype
        self.offsets = offsets(value.shape, len(parts))
        self.strategy = strategy
        self.resident = resident
        self._value: Array | None = None
        if resident:
            self.take(value)

    def __repr__(self) -> str:
        return f"ServedVariable(name={self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.value, dtype=dtype, copy=copy)

    @property
    def value(self) -> Array:
        """The copy of this task, read-only: as of the last `pull` or `apply_gradients`.

        Raises:
            ValueError: the variable is not resident.
        """
        if self._value is None:
            raise ValueError(
                f"value: the variable has no copy on this task, expected strategy.look_up, or a "
                f"resident variable (variable: {self.name})"
            )
        return self._value

    @property
    def components(self) -> tuple[Array, ...]:
        """The array, as for variables of other strategies."""
        return (self.value,)

    def pieces(self, array: Array) -> list[Array]:
        """Return what of an array of its shape lies in each part, as views."""
        return partition.pieces(array, self.offsets)

    def take(self, value: Array) -> None:
        """Let the copy be this array, which does not change any more."""
        self._value = value.view()
        self._value.flags.writeable = False

    def assign(self, value: npt.ArrayLike) -> None:
        """Let the variable take another value on its ps tasks, and in the copy here.

        Raises:
            ValueError: it has another shape.
            UnavailableError: a ps task cannot be reached.
        """
        self.strategy.assign(self, value)
