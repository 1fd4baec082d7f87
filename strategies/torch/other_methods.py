"""Methods of a wrapped optimizer beside `step`, which must not use the gradients of one rank.

Sharpness-aware optimizers step by methods of their own (`first_step`, `second_step`), before which
gradients are not averaged. A method that changes parameters between a backward pass and the next
average lets the replicas diverge, so it is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from strategies.averaging.alike import checksum
from strategies.torch.parameters import parameters_of

__all__ = ["Wrapped", "watched"]


# Methods of optimizers without schedules, which exchange parameters for averages of earlier ones.
_WITHOUT_GRADIENTS = ("train", "eval")


class Wrapped(Protocol):
    """A wrapped optimizer, as far as this goes."""

    optimizer: torch.optim.Optimizer
    harmless: set[str]

    @property
    def has_own_gradients(self) -> bool:
        """Whether there was a backward pass whose gradients are not averaged."""


def watched(wrapped: Wrapped, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the held optimizer that checks, after a call, that it was not too early.

    Methods that every optimizer has, and those found `harmless`, are returned as they are.

    Raises:
        ValueError: by the returned method, where it has changed parameters while gradients of a
            backward pass were not averaged.
    """
    known = name in _WITHOUT_GRADIENTS or name in wrapped.harmless
    if known or name.startswith("_") or hasattr(torch.optim.Optimizer, name):
        return method

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        if not wrapped.has_own_gradients:
            return method(*arguments, **named)
        parameters = parameters_of(wrapped.optimizer)
        before = _checksums(parameters)
        result = method(*arguments, **named)
        if _checksums(parameters) != before:
            raise ValueError(
                f"{name}: the method has changed parameters by gradients of this rank alone, "
                "since gradients are averaged in step() and synchronize() only; call "
                "optimizer.synchronize() after each backward pass"
            )
        wrapped.harmless.add(name)  # checksums read all parameters: once for each method
        return result

    return call


def _checksums(parameters: Sequence[torch.Tensor]) -> list[str]:
    return [checksum(parameter) for parameter in parameters]
