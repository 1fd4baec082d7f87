"""A named array that training changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Variable"]


class Variable:
    """An array with a name, a fixed shape and a fixed dtype; strategies make them.

    Args:
        initial_value: shape (...), copied.
        name: what checkpoints and errors call it.
        dtype: of the variable, that of `initial_value` if None.
    """

    __slots__ = ("name", "value")

    def __init__(self, initial_value: npt.ArrayLike, *, name: str, dtype: Any = None) -> None:
        self.name = name
        self.value: npt.NDArray[Any] = np.array(initial_value, dtype=dtype)

    def __repr__(self) -> str:
        return f"Variable(name={self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.value, dtype=dtype, copy=copy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value."""
        return self.value.dtype

    def assign(self, value: npt.ArrayLike) -> None:
        """Copy `value` into the variable.

        Raises:
            ValueError: it has another shape.
            TypeError: its dtype cannot be cast without changing its kind.
        """
        array = np.asarray(value)
        if array.shape != self.shape:
            raise ValueError(
                f"assign: the value has the wrong shape, expected {self.shape}, got {array.shape} "
                f"(variable: {self.name})"
            )
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(
                f"assign: the value has the wrong dtype, expected {self.dtype}, got {array.dtype} "
                f"(variable: {self.name})"
            )
        self.value[...] = array
