"""Several variables read or updated together: one message to each task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

import collectives as cc
from strategies.errors import InvalidArgumentError
from strategies.remote.service import Service
from strategies.sparse import Rows
from strategies.variables import actions, many
from strategies.variables.items import (
    Reading,
    Update,
    gradient_item,
    host_array,
    packing,
    reading_of,
    stepping,
)
from strategies.variables.kind import KIND
from strategies.variables.many import Item
from strategies.variables.partitioned import PartitionedVariable
from strategies.variables.variable import SharedVariable

__all__ = ["apply_all", "assign_all", "read_all"]

AnyVariable = SharedVariable | PartitionedVariable


def read_all(
    variables: Sequence[AnyVariable],
    *,
    compression: cc.Compression | None = cc.NONE,
    timeout: float | None = None,
) -> list[Reading]:
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
    items = [Item(part.place, (), options) for v in variables for part in v.parts]
    outcomes = iter(_perform("read", variables, items, timeout))
    readings = []
    for variable in variables:
        parts = [reading_of(next(outcomes), options) for _ in variable.parts]
        if isinstance(variable, SharedVariable):
            readings.append(parts[0])
        else:
            readings.append(variable.joined(parts))
    return readings


def apply_all(
    grads_and_vars: Iterable[tuple[npt.ArrayLike | Rows | None, AnyVariable]],
    *,
    seen: Sequence[Any] | None = None,
    most_stale: int | None = None,
    scale_stale: bool = False,
    learning_rate: float | None = None,
    compression: cc.Compression | None = cc.NONE,
    timeout: float | None = None,
) -> list[Update | None]:
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
    plans: list[list[Item | None]] = []
    for (gradient, variable), version in zip(pairs, versions, strict=True):
        if gradient is None:
            plans.append([])
        elif isinstance(variable, SharedVariable):
            plans.append([gradient_item(variable.place, gradient, version, options, compression)])
        else:
            plans.append(variable.items(gradient, version, options, compression))
    items = [item for plan in plans for item in plan if item is not None]
    outcomes = iter(_perform("apply_gradients", [v for _, v in pairs], items, timeout))
    updates: list[Update | None] = []
    for (_, variable), plan in zip(pairs, plans, strict=True):
        own = [next(outcomes) for item in plan if item is not None]
        if not plan:
            updates.append(None)
        elif isinstance(variable, SharedVariable):
            updates.append(Update(*own[0].facts))
        else:
            updates.append(variable.updated(plan, own))
    return updates


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
    items = []
    for value, variable in pairs:
        if isinstance(variable, SharedVariable):
            items.append(Item(variable.place, [host_array(value, "assign_all", variable.name)]))
        else:
            pieces = variable.pieces("assign_all", value)
            items += [Item(p.place, [v]) for p, v in zip(variable.parts, pieces, strict=True)]
    _perform("assign", [variable for _, variable in pairs], items, timeout)


def _perform(
    operation: str,
    variables: Sequence[AnyVariable],
    items: Sequence[Item],
    timeout: float | None,
) -> list[actions.Outcome]:
    if not items:
        return []
    services: set[Service] = {variable.service for variable in variables}
    if len(services) > 1:
        raise InvalidArgumentError(f"{operation}: the variables are of different services")
    return many.perform(services.pop(), KIND, operation, items, timeout=timeout)
