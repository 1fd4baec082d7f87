"""Wrap an optimizer so that every rank applies the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies.agreement import raise_everywhere
from strategies.resources.variables import Variable

__all__ = ["ArrayOptimizer", "DistributedOptimizer"]

Array = npt.NDArray[Any]
Pair = tuple[Array | None, Variable | Array]

# Behind the gradients, the buffer carries what the average needs to know, summed like them: the
# number of examples, the number of ranks that refused the call, and for each variable the number
# of ranks with a gradient for it.
_EXAMPLES, _REFUSED, _TAIL = 0, 1, 2


class ArrayOptimizer(Protocol):
    """An optimizer that changes arrays in place, such as those of `strategies.optimizers`."""

    step: int

    def apply_gradients(self, grads_and_vars: Iterable[Pair]) -> None:
        """Update every variable by its gradient."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""


class DistributedOptimizer:
    """Average the gradients over all ranks, then let the wrapped optimizer apply them.

    *Collective*: all ranks call `apply_gradients` with the same variables in the same order. All
    ranks compute the same bits, so their variables stay equal.

    The gradients of one step are one buffer, laid out once, in memory that the ranks of a node
    share: there it is averaged without a copy. It is float32, or float64 where any variable is.

    Args:
        optimizer: what updates the variables, for example `strategies.Momentum(0.05)`.
        comm: the ranks that average; the whole job if None.

    Raises:
        TypeError: the optimizer does not update arrays.
    """

    def __init__(self, optimizer: ArrayOptimizer, *, comm: cc.Communicator | None = None) -> None:
        if not callable(getattr(optimizer, "apply_gradients", None)):
            raise TypeError(
                "DistributedOptimizer: the optimizer has no apply_gradients, expected one of "
                f"strategies.optimizers, got {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.comm = cc.init() if comm is None else comm
        self._buffer = np.empty(0, np.float32)

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return self.optimizer.step

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], *, examples: int | None = None
    ) -> None:
        """Average the gradients and update the variables.

        Args:
            grads_and_vars: pairs of a gradient and its variable, of one shape. A gradient may be
                None on some ranks, where it counts as zero; a variable without a gradient on any
                rank is left alone.
            examples: how many rows this rank's gradients are the mean of. The average is then over
                all rows, also where ranks hold different numbers of them; 0 is allowed. None: all
                ranks count alike.

        Raises:
            ValueError: a shape does not fit, or no rank has an example; on all ranks.
            MismatchError: ranks differ in the variables' sizes; on all ranks.
        """
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
        buffer = self._layout([variable for _, variable in pairs])
        parts = _parts(buffer, pairs)
        tail = buffer[-_TAIL - len(pairs) :]
        error = None
        try:
            _fill(parts, tail, pairs, 1 if examples is None else examples)
        except (TypeError, ValueError) as caught:
            buffer[...] = 0
            tail[_REFUSED] = 1
            error = caught
        self.comm.allreduce(buffer, op=cc.SUM, out=buffer)
        if tail[_REFUSED]:
            raise_everywhere(error, self.comm, "apply_gradients")
        if tail[_EXAMPLES] <= 0:
            raise ValueError("apply_gradients: no rank has an example, expected at least one")
        buffer[: -tail.size] /= tail[_EXAMPLES]
        self.optimizer.apply_gradients(
            (part.astype(_value(variable).dtype, copy=False) if present else None, variable)
            for part, present, (_, variable) in zip(parts, tail[_TAIL:], pairs, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; equal on all ranks."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the wrapped optimizer its state back, the same on all ranks."""
        self.optimizer.load_state_dict(state)

    def _layout(self, variables: list[Variable | Array]) -> Array:
        """Return a buffer for all gradients with the tail behind them."""
        values = [_value(variable) for variable in variables]
        wide = any(value.dtype == np.float64 for value in values)
        dtype = np.dtype(np.float64 if wide else np.float32)
        size = sum(value.size for value in values) + len(values) + _TAIL
        if self._buffer.size != size or self._buffer.dtype != dtype:
            self._buffer = self.comm.shared_empty(size, dtype)
        return self._buffer


def _value(variable: Variable | Array) -> Array:
    return variable.value if isinstance(variable, Variable) else variable


def _parts(buffer: Array, pairs: list[Pair]) -> list[Array]:
    """Return the part of the buffer that belongs to each gradient, in the variable's shape."""
    parts = []
    start = 0
    for _, variable in pairs:
        value = _value(variable)
        parts.append(buffer[start : start + value.size].reshape(value.shape))
        start += value.size
    return parts


def _fill(parts: list[Array], tail: Array, pairs: list[Pair], examples: int) -> None:
    """Write this rank's gradients, weighted by its examples, and the tail."""
    if examples < 0:
        raise ValueError(f"apply_gradients: examples is no count, expected >= 0, got {examples}")
    tail[_EXAMPLES] = examples
    tail[_REFUSED] = 0
    tail[_TAIL:] = [gradient is not None for gradient, _ in pairs]
    for part, (gradient, variable) in zip(parts, pairs, strict=True):
        if gradient is None or examples == 0:  # a mean over no rows may be NaN
            part[...] = 0
            continue
        if np.shape(gradient) != part.shape:
            name = variable.name if isinstance(variable, Variable) else "unnamed"
            raise ValueError(
                f"apply_gradients: the gradient has the wrong shape, expected {part.shape}, got "
                f"{np.shape(gradient)} (variable: {name})"
            )
        np.multiply(gradient, examples, out=part, casting="same_kind")
