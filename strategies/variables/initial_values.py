"""Initial values of partitioned variables, computed on their tasks.

An initializer that other tasks can import, such as those of `initializers`, is sent by name and
runs on the task of each part. Any other initializer runs on the creating task, part by part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from strategies.rpc.function_names import function_named, name_of
from strategies.rpc.wire import Array, dtype_named
from strategies.variables import partition
from strategies.variables.array_input import take_ownership, to_host
from strategies.variables.initializers import Initializer

__all__ = ["PartInitializer", "part_from_dict"]

# Block size for parts along another axis than the first, which need whole rows.
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class PartInitializer:
    """Initial value of the slice `low` .. `high` along an axis.

    Attributes:
        initializer: (first row, last row, shape, dtype) -> rows of the whole.
        shape: shape of the whole, at least one axis.
        dtype: dtype of the whole.
        axis: partitioned axis.
        low: start of the part.
        high: end of the part.
        name: name of the whole.
    """

    initializer: Initializer
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: int
    low: int
    high: int
    name: str

    def __call__(self) -> Array:
        """Return the part, in memory without other references.

        Raises:
            InvalidArgumentError: the initializer returns rows of the wrong shape.
            TypeError: the initializer returns no numeric array, or one on a device.
        """
        if self.axis == 0:
            # Parts of rows ask the initializer for their rows alone, and copy nothing.
            return take_ownership(lambda: self._rows(self.low, self.high), self.dtype)
        sizes = [n for axis, n in enumerate(self.shape) if axis != self.axis]
        sizes.insert(self.axis, self.high - self.low)
        found = np.empty(sizes, self.dtype)
        of_part = (slice(None),) * self.axis + (slice(self.low, self.high),)
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        block = max(1, _BLOCK_BYTES // max(1, row_bytes))
        # In blocks, so that the task never holds the whole.
        for first in range(0, self.shape[0], block):
            last = min(first + block, self.shape[0])
            found[first:last] = self._rows(first, last)[of_part]
        return found

    def _rows(self, first: int, last: int) -> Array:
        operation = "shared_partitioned_variable"
        made = self.initializer(first, last, self.shape, self.dtype)
        rows = to_host(made, operation, self.name)
        partition.check_shape(operation, rows, (last - first, *self.shape[1:]), self.name)
        return rows

    def to_dict(self) -> dict[str, Any] | None:
        """Return a description for another task; None if it cannot import the initializer."""
        function: Any = self.initializer
        given: tuple[Any, ...] = ()
        # One level only: the initializers of this package are partials of top-level functions.
        if isinstance(function, partial) and not function.keywords:
            function, given = function.func, function.args
        # Other arguments may not survive msgpack unchanged.
        if not all(isinstance(value, (bool, int, float, str)) for value in given):
            return None
        try:
            name = name_of(function, "shared_partitioned_variable")
        except ValueError:
            return None
        facts = {**vars(self), "shape": list(self.shape), "dtype": self.dtype.name}
        return {**facts, "initializer": name, "given": list(given)}


def part_from_dict(words: Mapping[str, Any]) -> PartInitializer:
    """Reverse `PartInitializer.to_dict`.

    Raises:
        NotFoundError: this task cannot import the initializer.
    """
    facts = dict(words)
    initializer = partial(function_named(facts["initializer"]), *facts.pop("given"))
    shape, dtype = tuple(facts["shape"]), dtype_named(facts["dtype"])
    return PartInitializer(**{**facts, "initializer": initializer, "shape": shape, "dtype": dtype})
