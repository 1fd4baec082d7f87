"""The variables on a ps, or parts of them, with the optimizers that update them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies.arrays import COMPUTE
from strategies.optimizers import Optimizer
from strategies.sparse import Gradient, Rows
from strategies.variables.store import Rate, Stored

__all__ = ["VALUE", "HeldPart", "HeldParts", "State"]

Array = npt.NDArray[Any]

# Bytes of gradients from which an update is worth several threads: handing out the work takes some
# 0.1 ms, in which one thread changes about this much.
_WORTH_THREADS = 1 << 20
# More threads than this do not make memory faster.
_MOST_THREADS = 4

VALUE = "value"
"""Stands where the name of a slot stands, for the variable itself."""


class State(NamedTuple):
    """What a checkpoint keeps of a part.

    Attributes:
        counts: "step", the updates so far, and what else the optimizer counts.
        arrays: `VALUE` and name of each slot -> array, of the part's shape.
    """

    counts: dict[str, int]
    arrays: dict[str, Array]


class HeldPart:
    """What a ps holds of a variable.

    Args:
        name: of the part.
        value: shape (...), copied.
        optimizer: of which it gets a copy.
        resident: whether every answer brings the value.

    Attributes:
        name: as given.
        resident: as given.
    """

    def __init__(self, name: str, value: Array, optimizer: Optimizer, resident: bool) -> None:
        arguments = optimizer.arguments
        self._rate = Rate(arguments.pop("learning_rate"))
        self._stored = Stored(name)
        self._stored.value = np.array(value, order="C")
        self._optimizer = type(optimizer)(self._rate, **arguments)
        if value.dtype.name in COMPUTE:  # others are never updated, only assigned
            self._optimizer.prepare([_Named(name, self._stored.value)])
        self.name = name
        self.resident = resident

    @property
    def value(self) -> Array:
        """What it is now; later updates do not change it."""
        return self._stored.view()

    def update(self, gradient: Gradient, factor: float) -> None:
        """Change the value by its gradient, with so many times the learning rate."""
        self._rate.factor = factor
        self._optimizer.apply_gradients([(gradient, _Named(self.name, self._stored.writable()))])

    def assign(self, value: Array) -> None:
        """Take another value."""
        self._stored.writable(keep=False)[...] = value

    def state(self) -> State:
        """Return all of it, as it is now."""
        found = State({}, {VALUE: self.value})
        for key, entry in self._optimizer.state_dict().items():
            kind = key.removesuffix(f"/{self.name}")
            (found.arrays if isinstance(entry, np.ndarray) else found.counts)[kind] = entry
        return found

    def load(self, state: State) -> None:
        """Go on from a state.

        Raises:
            ValueError: it belongs to another optimizer.
        """
        arrays = dict(state.arrays)
        value = arrays.pop(VALUE)
        entries = {**state.counts, **arrays}
        self._optimizer.load_state_dict(
            {kind if kind == "step" else f"{kind}/{self.name}": entries[kind] for kind in entries}
        )
        self.assign(value)


class HeldParts(list[HeldPart]):
    """What a ps holds, updated by several threads where that is worth it.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def update(self, given: Mapping[int, Gradient], factor: float) -> None:
        """Change parts by their gradients, at the same time; see `HeldPart.update`.

        Args:
            given: number of a part -> its gradient.
            factor: times the learning rate.
        """
        sizes = [g.values.nbytes if isinstance(g, Rows) else g.nbytes for g in given.values()]
        changes = [(self[number], gradient, factor) for number, gradient in given.items()]
        if len(changes) == 1 or sum(sizes) < _WORTH_THREADS:
            for change in changes:
                HeldPart.update(*change)
            return
        if self._pool is None:
            threads = min(_MOST_THREADS, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"{self._name}-update")
        list(self._pool.map(lambda change: HeldPart.update(*change), changes))

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


class _Named(NamedTuple):
    """A variable as optimizers want it."""

    name: str
    value: Array
