"""How a variable on ps tasks is made: what its maker says, and what each ps gets of it.

::

    initial value   the chief's, sent to all tasks; each ps takes its rows
    initializer     each ps makes its rows, and nobody else any
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies.parameter_server.served_variable import ServedVariable, number_of_parts
from strategies.replicas.copies import Seen, fetched
from strategies.variables import partition
from strategies.variables.partition import Partitioner

__all__ = ["Wanted", "pieces", "wanted"]

Array = npt.NDArray[Any]
Initializer = Callable[..., npt.ArrayLike]


class Wanted(NamedTuple):
    """A variable as its maker describes it.

    Attributes:
        name: of it.
        shape: of the whole.
        dtype: of the whole.
        number: of the parts into which it is cut.
        value: what this task would have it start from; None if there is an initializer.
        initializer: (first row, last row, shape, dtype) -> rows.
        seen: makes of it what replicas compute with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    number: int
    value: Array | None
    initializer: Initializer
    seen: Seen

    def whole(self) -> Array:
        """Return all rows, as the initializer makes them."""
        return np.array(self.initializer(0, self.shape[0], self.shape, self.dtype))


def wanted(
    name: str,
    initial_value: Any,
    dtype: Any,
    shape: Sequence[int] | None,
    partitioner: Partitioner | None,
) -> Wanted:
    """Take in what `ParameterServerStrategy.variable` is given.

    Raises:
        ValueError: the partitioner's answer, or the shape of an initializer, is of no use.
    """
    given: Any = initial_value
    value = None
    if shape is None:
        given = given() if callable(given) else given
        of_torch = str(dtype).startswith("torch.")
        kind = str(dtype).removeprefix("torch.") if of_torch else dtype
        value = np.array(fetched(given), dtype=kind)
        sizes, found = value.shape, value.dtype
    else:
        sizes, found = _checked_shape(given, shape, name), np.dtype(dtype or np.float32)
    number = number_of_parts(name, sizes, found, partitioner)
    return Wanted(name, sizes, found, number, value, initial_value, Seen(given))


def pieces(
    variable: ServedVariable, value: Array | None, initializer: Initializer
) -> Sequence[Array | Callable[[], Array]]:
    """Return what each part starts from: an array, or a function that makes it."""
    if value is not None:
        return variable.pieces(value)
    ends = itertools.pairwise(variable.offsets)
    return [partial(_made, initializer, low, high, variable) for low, high in ends]


def _checked_shape(initializer: Any, shape: Sequence[int], name: str) -> tuple[int, ...]:
    """Return the shape that an initializer is to fill."""
    sizes = tuple(map(operator.index, shape))
    if not callable(initializer) or not sizes or min(sizes) < 0:
        raise ValueError(
            f"variable: expected an initializer, and a shape of at least one axis, got "
            f"{type(initializer).__name__} and {sizes} (variable: {name})"
        )
    return sizes


def _made(initializer: Initializer, first: int, last: int, variable: ServedVariable) -> Array:
    """Return some rows of a variable, as its initializer makes them."""
    rows = np.require(
        initializer(first, last, variable.shape, variable.dtype), variable.dtype, ["C", "W"]
    )
    partition.check_shape("variable", rows, (last - first, *variable.shape[1:]), variable.name)
    return rows
