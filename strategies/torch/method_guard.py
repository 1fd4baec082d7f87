"""Guard for optimizer methods that must not bypass the wrapped `step`.

Sharpness-aware optimizers step in methods of their own (`first_step`, `second_step`), which do not
average gradients. A method that changes parameters between a backward pass and the next average
lets the replicas diverge, so it is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from strategies.averaging.consistency import checksum
from strategies.torch.backward_hooks import GradientHooks
from strategies.torch.parameters import parameters_of

__all__ = ["MethodGuard"]

# Schedule-free optimizers exchange parameters for averages of earlier ones, without gradients.
_WITHOUT_GRADIENTS = ("train", "eval")


class MethodGuard:
    """Checks that methods do not change parameters while gradients are not averaged.

    Args:
        optimizer: the wrapped optimizer.
        backward: counter of backward passes since the last average.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backward: GradientHooks) -> None:
        self._optimizer = optimizer
        self._backward = backward
        self._harmless: set[str] = set()  # methods that did not change the parameters

    def guard(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that compares the parameters before and after each call.

        Methods that every optimizer has, and harmless ones, are returned unchanged.

        Raises:
            ValueError: raised by the returned method if it has changed parameters between a
                backward pass and the next average.
        """
        known = name in _WITHOUT_GRADIENTS or name in self._harmless
        if known or name.startswith("_") or hasattr(torch.optim.Optimizer, name):
            return method

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # Without a backward pass no gradient belongs to this rank alone.
            if not self._backward.passes:
                return method(*args, **kwargs)
            before = self._checksums()
            result = method(*args, **kwargs)
            # Bits instead of version counters: a method may write through `.data`.
            if self._checksums() != before:
                raise ValueError(
                    f"{name}: the method has changed parameters with gradients of this rank alone, "
                    "since gradients are averaged in step() and synchronize() only; call "
                    "optimizer.synchronize() after each backward pass"
                )
            self._harmless.add(name)  # once per method, because checksums read all parameters
            return result

        return guarded

    def _checksums(self) -> list[str]:
        return [checksum(parameter) for parameter in parameters_of(self._optimizer)]
