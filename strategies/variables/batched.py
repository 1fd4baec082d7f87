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
    """Read several variables with one message per task.

    Args:
        variables: whole or partitioned variables of one service.
        compression: send the values as 16-bit floats.
        timeout: seconds for all variables; None waits for initial values without a limit.

    Returns:
        Value and version of each variable, in order. Each value is of one version; versions of
        different variables may be from different moments.

    Raises:
        OpError: error of the first variable that failed.

    Cost: one round trip per task for any number of variables; the tasks work in parallel.
    """
    options = packing(compression, "read_all")
    asked = [VariableRequest(address, (), options) for v in variables for address in v.addresses]
    # One list for all tasks; each variable takes one result per part.
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
    """Apply gradients to several variables with one message per task.

    Args:
        grads_and_vars: (gradient, variable) pairs; a gradient of None leaves its variable
            unchanged.
        seen: version of each variable from which its gradient was computed.
        most_stale: largest staleness; a staler gradient is dropped.
        scale_stale: divide the learning rate by 1 + staleness.
        learning_rate: learning rate for this step; None uses the optimizers' own.
        compression: send the gradients as 16-bit floats.
        timeout: seconds for all variables.

    Returns:
        Outcome of each gradient; None where the gradient is None.

    Raises:
        OpError: error of the first variable that failed; the remaining variables were still
            updated.

    Cost: one round trip per task; a task updates its large variables in parallel.
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
    """Set several variables with one message per task.

    Args:
        values_and_vars: (value, variable) pairs.
        timeout: seconds for all variables.

    Raises:
        OpError: error of the first variable that failed; the remaining variables were still set.
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
    # Tasks are numbers of one service, so requests to two services cannot share a message.
    services = {variable.service for variable in variables}
    if len(services) > 1:
        raise InvalidArgumentError(f"{operation}: the variables are of different services")
    return requests.perform(services.pop(), operation, asked, timeout) if asked else []
