"""Requests and results of variable operations.

An `VariableRequest` says what is to be done with one variable; `perform` does it, here and
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies.core.validation import number
from strategies.errors import InvalidArgumentError, OpError
from strategies.rpc import operation as attempt
from strategies.rpc.client import Reply
from strategies.rpc.multi_request import RequestTo
from strategies.rpc.registry import Address
from strategies.rpc.service import Service
from strategies.rpc.wait_limits import wait_limit
from strategies.rpc.wire import Array, dtype_named
from strategies.variables import request_handler, server_ops
from strategies.variables.request_handler import KIND
from strategies.variables.server_ops import Result
from strategies.variables.stored_variable import WaitInitialized

__all__ = [
    "VariableRequest",
    "ReadResult",
    "UpdateResult",
    "packing",
    "perform",
    "reading_of",
    "spread",
    "stepping",
    "wanted_rows",
]


class VariableRequest(NamedTuple):
    """What is to be done with one variable.

    Attributes:
        address: of the variable.
        arrays: what the action takes.
        options: what the action takes, as msgpack can carry it.
    """

    address: Address
    arrays: Sequence[Array] = ()
    options: Mapping[str, Any] = {}


class ReadResult(NamedTuple):
    """What a variable held at one moment.

    Attributes:
        value: an array that nobody changes any more, nor may the reader.
        version: how often the variable had been changed.
    """

    value: Array
    version: Any


class UpdateResult(NamedTuple):
    """What became of a gradient.

    Attributes:
        version: of the variable afterwards.
        staleness: how many changes the gradient had not seen; None if that was not asked.
        applied: False if it was too stale, and nothing has changed.
    """

    version: Any
    staleness: int | None
    applied: bool


def wanted_rows(operation: str, indices: npt.ArrayLike, name: str) -> npt.NDArray[np.int64]:
    """Return indices of rows.

    Raises:
        InvalidArgumentError: they are not integers.
    """
    wanted = np.asarray(indices)
    if wanted.size and wanted.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{operation}: indices are not integers, got {wanted.dtype} (variable: {name})"
        )
    return wanted.astype(np.int64)


def spread(rows: Array, positions: npt.NDArray[Any], shape: tuple[int, ...]) -> Array:
    """Return the rows at these positions, of which there are as many as the shape says."""
    if positions.size == len(rows) and np.array_equal(positions.reshape(-1), np.arange(len(rows))):
        found = rows.reshape(*shape, *rows.shape[1:])  # they were asked for in their order
    else:
        found = rows.take(positions.reshape(shape), axis=0)
    found.flags.writeable = False
    return found


def packing(compression: cc.Compression | None, operation: str) -> dict[str, Any]:
    """Return the options of an action whose arrays are rounded on their way.

    Raises:
        ValueError: to 8 bits, or only between nodes, which is not known here.
    """
    if compression is None or compression.dtype is None:
        return {}
    if compression.dtype.name not in server_ops.COMPRESSIONS:
        words = " ".join(["none", *server_ops.COMPRESSIONS])
        raise ValueError(
            f"{operation}: how variables on tasks travel, expected one of {words}, "
            f"got {compression}"
        )
    if compression.where != "everywhere":
        raise ValueError(
            f"{operation}: variables on tasks are rounded everywhere or not at all, got "
            f"{compression}"
        )
    return {"as": compression.dtype.name}


def stepping(
    most_stale: int | None,
    scale_stale: bool,
    learning_rate: float | None,
    compression: cc.Compression | None,
) -> dict[str, Any]:
    """Return the options that all gradients of a step have."""
    rate = None if learning_rate is None else number("apply_gradients", "rate", learning_rate)
    options = {"most": most_stale, "rate": rate, "scaled": scale_stale or None}
    given = {name: value for name, value in options.items() if value is not None}
    return given | packing(compression, "apply_gradients")


def reading_of(outcome: Result, options: Mapping[str, Any]) -> ReadResult:
    """Return what a read has brought."""
    version, dtype = outcome.facts
    value = server_ops.widened(outcome.arrays[0], options, dtype_named(dtype))
    value.flags.writeable = False
    return ReadResult(value, version)


def perform(
    service: Service, operation: str, items: Sequence[VariableRequest], timeout: float | None = None
) -> list[Result]:
    """Perform an action on every variable, and wait for all.

    Raises:
        OpError: the first one, in the order of the items, when all are done.
    """
    if not items:
        return []
    timeout = wait_limit(timeout)
    began = time.monotonic()
    by_task: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        by_task.setdefault(item.address.task, []).append(index)
    own = by_task.pop(service.task, [])
    questions = [_question(operation, [items[n] for n in group]) for group in by_task.values()]
    asked = service.ask(questions)
    outcomes: dict[int, Result | OpError] = {}
    try:
        outcomes |= _here(service, operation, items, own, timeout)
    except BaseException:
        asked.abandon()
        raise
    answers = asked.answers(timeout, began=began)
    for group, answer in zip(by_task.values(), answers, strict=True):
        outcomes |= zip(group, _outcomes(answer, len(group)), strict=True)
    results = [outcomes[index] for index in range(len(items))]
    done = [result for result in results if not isinstance(result, OpError)]
    for result in results:
        if isinstance(result, OpError):
            raise result
    return done


def _question(operation: str, items: Sequence[VariableRequest]) -> RequestTo:
    first, *others = items
    options = [dict(item.options) for item in items]
    arguments = {
        "others": [[o.address.container, o.address.name, o.address.serial] for o in others],
        "counts": [len(item.arrays) for item in items],
        "options": options[:1] if all(each == options[0] for each in options) else options,
    }
    arrays = [array for item in items for array in item.arrays]
    return RequestTo(first.address, operation, arguments, arrays)


def _outcomes(answer: Reply, count: int) -> list[Result | OpError]:
    if answer.error is not None:
        return [answer.error] * count
    for array in answer.values:
        array.flags.writeable = False
    rest = iter(answer.values)
    return [
        request_handler.outcome_of(facts, [next(rest) for _ in range(number)])
        for facts, number in zip(answer.metadata["facts"], answer.metadata["counts"], strict=True)
    ]


def _here(
    service: Service,
    operation: str,
    items: Sequence[VariableRequest],
    chosen: Sequence[int],
    timeout: float | None,
) -> dict[int, Result | OpError]:
    """Perform an action on the variables of this task, in this thread."""
    if not chosen:
        return {}
    try:
        things = [service.here(KIND, items[n].address) for n in chosen]
        ready = WaitInitialized(things)
        attempt.perform(ready, ready, operation, timeout)
    except OpError as error:
        return dict.fromkeys(chosen, error)
    return {
        n: request_handler.attempt(operation, thing, items[n].arrays, items[n].options)
        for n, thing in zip(chosen, things, strict=True)
    }
