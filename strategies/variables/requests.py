"""Requests and results of variable operations.

A `VariableRequest` describes an operation on one variable; `perform` runs it on its task.
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
    """An operation on one variable.

    Attributes:
        address: address of the variable.
        arrays: array arguments.
        options: other arguments, as msgpack can encode them.
    """

    address: Address
    arrays: Sequence[Array] = ()
    options: Mapping[str, Any] = {}


class ReadResult(NamedTuple):
    """Value of a variable at one moment.

    Attributes:
        value: read-only array that later updates do not change.
        version: number of changes before the read.
    """

    value: Array
    version: Any


class UpdateResult(NamedTuple):
    """Outcome of a gradient.

    Attributes:
        version: version of the variable afterwards.
        staleness: number of changes since the version of the gradient; None if `seen` was not
            passed.
        applied: False if the gradient was too stale and nothing changed.
    """

    version: Any
    staleness: int | None
    applied: bool


def wanted_rows(operation: str, indices: npt.ArrayLike, name: str) -> npt.NDArray[np.int64]:
    """Return row indices as int64.

    Raises:
        InvalidArgumentError: the indices are not integers.
    """
    wanted = np.asarray(indices)
    if wanted.size and wanted.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{operation}: indices are not integers, got {wanted.dtype} (variable: {name})"
        )
    return wanted.astype(np.int64)


def spread(rows: Array, positions: npt.NDArray[Any], shape: tuple[int, ...]) -> Array:
    """Return the rows at `positions` in an array with leading shape `shape`."""
    if positions.size == len(rows) and np.array_equal(positions.reshape(-1), np.arange(len(rows))):
        found = rows.reshape(*shape, *rows.shape[1:])  # already in order: no copy
    else:
        found = rows.take(positions.reshape(shape), axis=0)
    found.flags.writeable = False
    return found


def packing(compression: cc.Compression | None, operation: str) -> dict[str, Any]:
    """Return the options of an operation whose arrays are sent as 16-bit floats.

    Raises:
        ValueError: the compression uses 8 bits, or applies only between nodes: the service does not
            know the nodes.
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
    """Return the options that all gradients of a step share."""
    rate = None if learning_rate is None else number("apply_gradients", "rate", learning_rate)
    options = {"most": most_stale, "rate": rate, "scaled": scale_stale or None}
    # Defaults are left out, to keep the metadata of each step short.
    given = {name: value for name, value in options.items() if value is not None}
    return given | packing(compression, "apply_gradients")


def reading_of(outcome: Result, options: Mapping[str, Any]) -> ReadResult:
    """Decode the result of a read."""
    version, dtype = outcome.facts
    value = server_ops.widened(outcome.arrays[0], options, dtype_named(dtype))
    # Read-only on all tasks, as on the variable's own task, where it is a view.
    value.flags.writeable = False
    return ReadResult(value, version)


def perform(
    service: Service, operation: str, items: Sequence[VariableRequest], timeout: float | None = None
) -> list[Result]:
    """Run an operation on every variable and wait for all results.

    Raises:
        OpError: first error in the order of the items, after all have finished.
    """
    if not items:
        return []
    timeout = wait_limit(timeout)
    began = time.monotonic()
    # One message per task, however many variables it has.
    by_task: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        by_task.setdefault(item.address.task, []).append(index)
    own = by_task.pop(service.task, [])
    questions = [_question(operation, [items[n] for n in group]) for group in by_task.values()]
    # Remote requests first: other tasks work while this task handles its own variables.
    asked = service.ask(questions)
    outcomes: dict[int, Result | OpError] = {}
    try:
        outcomes |= _here(service, operation, items, own, timeout)
    except BaseException:
        asked.abandon()
        raise
    # The timeout includes the local operations.
    answers = asked.answers(timeout, began=began)
    for group, answer in zip(by_task.values(), answers, strict=True):
        outcomes |= zip(group, _outcomes(answer, len(group)), strict=True)
    results = [outcomes[index] for index in range(len(items))]
    # Raised only now, when no request is under way any more.
    done = [result for result in results if not isinstance(result, OpError)]
    for result in results:
        if isinstance(result, OpError):
            raise result
    return done


def _question(operation: str, items: Sequence[VariableRequest]) -> RequestTo:
    # The header of a request names one object; the arguments name the rest.
    first, *others = items
    options = [dict(item.options) for item in items]
    arguments = {
        "others": [[o.address.container, o.address.name, o.address.serial] for o in others],
        "counts": [len(item.arrays) for item in items],
        # Variables usually share one set of options, which is then sent once.
        "options": options[:1] if all(each == options[0] for each in options) else options,
    }
    arrays = [array for item in items for array in item.arrays]
    return RequestTo(first.address, operation, arguments, arrays)


def _outcomes(answer: Reply, count: int) -> list[Result | OpError]:
    if answer.error is not None:
        # One message failed, and with it every operation that it carried.
        return [answer.error] * count
    for array in answer.values:
        # `Result` promises that its arrays do not change.
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
    """Run an operation on the variables of this task, in this thread."""
    if not chosen:
        return {}
    try:
        things = [service.here(KIND, items[n].address) for n in chosen]
        # Waits without the locks, which the initialization needs.
        ready = WaitInitialized(things)
        attempt.perform(ready, ready, operation, timeout)
    except OpError as error:
        return dict.fromkeys(chosen, error)
    return {
        # In this thread, which waits for the result anyway; the arguments need no copy.
        n: request_handler.attempt(operation, thing, items[n].arrays, items[n].options)
        for n, thing in zip(chosen, things, strict=True)
    }
