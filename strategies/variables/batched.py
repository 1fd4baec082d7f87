"""Batched reads and updates: one message per task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

import collectives as cc
from strategies.core.sparse import Rows
from strategies.errors import InvalidArgumentError
from strategies.variables import requests
from strategies.variables.requests import (
    ReadResult,
    UpdateResult,
    VariableRequest,
    packing,
    stepping,
)
from strategies.variables.server_ops import Result
from strategies.variables.variable import AnyVariable

__all__ = ["apply_all", "assign_all", "read_all"]


def read_all(
    variables: Sequence[AnyVariable],
    *,
    compression: cc.Compression | None = cc.NONE,
    timeout: float | None = None,
) -> list[ReadResult]:
    """Read several variables by one message to each task.

    Args:
        variables: of one service, whole ones and ones in parts.
        compression: the values travel as 16 bits.
        timeout: in seconds, for all of them; None waits for initial values without a limit.

    Returns:
        Value and version of each, in their order. Each variable is of one version; of several, one
        may be later than the other.

    Raises:
        OpError: of the first variable that has one.

    Cost: one round trip per task, however many variables; the tasks work at the same time.
    """
    options = packing(compression, "read_all")
    asked = [VariableRequest(address, (), options) for v in variables for address in v.addresses]
    outcomes = iter(_perform("read", variables, asked, timeout))
    return [v.joined([next(outcomes) for _ in v.addresses], options) for v in variables]


def apply_all(
    grads_and_vars: Iterable[tuple[npt.ArrayLike | Rows | None, AnyVariable]],
    *,
    seen: Sequence[Any] | None = None,
    most_stale: int | None = None,
    scale_stale: bool = False,
    learning_rate: float | None = None,
    compression: cc.Compression | None = cc.NONE,
    timeout: float | None = None,
) -> list[UpdateResult | None]:
    """Let the optimizers of several variables make a step, by one message to each task.

    Args:
        grads_and_vars: (gradient, variable) pairs; a gradient that is None leaves its variable as
            it is.
        seen: version of each variable that its gradient was computed from, as read.
        most_stale: a gradient that is staler is dropped.
        scale_stale: the learning rate is divided by 1 + staleness.
        learning_rate: instead of the optimizers' own, in this step.
        compression: the gradients travel as 16 bits.
        timeout: in seconds, for all of them.

    Returns:
        What became of each gradient; None where it was None.

    Raises:
        OpError: of the first variable that has one. The others have been changed nevertheless.

    Cost: one round trip per task; a task changes its long variables at the same time.
    """
    pairs = list(grads_and_vars)
    versions: Sequence[Any] = [None] * len(pairs) if seen is None else seen
    if len(versions) != len(pairs):
        raise ValueError(f"apply_all: expected {len(pairs)} versions, got {len(versions)}")
    options = stepping(most_stale, scale_stale, learning_rate, compression)
    steps: list[list[VariableRequest | None]] = [
        [] if gradient is None else variable.steps(gradient, version, options, compression)
        for (gradient, variable), version in zip(pairs, versions, strict=True)
    ]
    asked = [item for own in steps for item in own if item is not None]
    outcomes = iter(_perform("apply_gradients", [v for _, v in pairs], asked, timeout))
    done = [[None if item is None else next(outcomes) for item in own] for own in steps]
    return [
        variable.updated(own) if own else None
        for (_, variable), own in zip(pairs, done, strict=True)
    ]


def assign_all(
    values_and_vars: Iterable[tuple[npt.ArrayLike, AnyVariable]], *, timeout: float | None = None
) -> None:
    """Set several variables, by one message to each task.

    Args:
        values_and_vars: (value, variable) pairs.
        timeout: in seconds, for all of them.

    Raises:
        OpError: of the first variable that has one. The others have been changed nevertheless.
    """
    pairs = list(values_and_vars)
    asked = [
        VariableRequest(address, arrays or ())
        for value, variable in pairs
        for address, arrays in zip(
            variable.addresses, variable.pieces("assign_all", value), strict=True
        )
    ]
    _perform("assign", [variable for _, variable in pairs], asked, timeout)


def _perform(
    operation: str,
    variables: Sequence[AnyVariable],
    asked: Sequence[VariableRequest],
    timeout: float | None,
) -> list[Result]:
    services = {variable.service for variable in variables}
    if len(services) > 1:
        raise InvalidArgumentError(f"{operation}: the variables are of different services")
    return requests.perform(services.pop(), operation, asked, timeout) if asked else []
