"""One action on each of several variables, wherever they live: one message to each task."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from strategies.errors import CancelledError, DeadlineExceededError, OpError
from strategies.remote.asking import Question, begin
from strategies.remote.containers import Place, ResourceKind
from strategies.remote.outgoing import Answer
from strategies.remote.wire import Array
from strategies.variables import serving
from strategies.variables.actions import Outcome
from strategies.variables.store import AllReady, Stored

if TYPE_CHECKING:
    from strategies.remote.service import Service

__all__ = ["Item", "perform"]


class Item(NamedTuple):
    """What is to be done with one variable.

    Attributes:
        place: of the variable.
        arrays: what the action takes.
        options: what the action takes, as msgpack can carry it.
    """

    place: Place
    arrays: Sequence[Array] = ()
    options: Mapping[str, Any] = {}


def perform(
    service: Service,
    kind: ResourceKind,
    operation: str,
    items: Sequence[Item],
    *,
    timeout: float | None = None,
) -> list[Outcome]:
    """Perform an action on every variable, and wait for all.

    Raises:
        OpError: the first one, in the order of the items, when all are done.
    """
    began = time.monotonic()
    by_task: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        by_task.setdefault(item.place.task, []).append(index)
    own = by_task.pop(service.task, [])
    questions = [_question(operation, [items[n] for n in group]) for group in by_task.values()]
    asked = begin(service, questions)
    outcomes: dict[int, Outcome | OpError] = {}
    try:
        outcomes |= _here(service, kind, operation, items, own, timeout)
    except BaseException:
        asked.disown()
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


def _question(operation: str, items: Sequence[Item]) -> Question:
    first, *others = items
    options = [dict(item.options) for item in items]
    arguments = {
        "others": [[o.place.container, o.place.name, o.place.serial] for o in others],
        "counts": [len(item.arrays) for item in items],
        "options": options[:1] if all(each == options[0] for each in options) else options,
    }
    arrays = [array for item in items for array in item.arrays]
    return Question(first.place, operation, arguments, arrays)


def _outcomes(answer: Answer, count: int) -> list[Outcome | OpError]:
    if answer.error is not None:
        return [answer.error] * count
    for array in answer.values:
        array.flags.writeable = False
    rest = iter(answer.values)
    return [
        serving.outcome_of(facts, [next(rest) for _ in range(number)])
        for facts, number in zip(answer.metadata["facts"], answer.metadata["counts"], strict=True)
    ]


def _here(
    service: Service,
    kind: ResourceKind,
    operation: str,
    items: Sequence[Item],
    chosen: Sequence[int],
    timeout: float | None,
) -> dict[int, Outcome | OpError]:
    """Perform an action on the variables of this task, in this thread."""
    if not chosen:
        return {}
    try:
        things = [service.here(kind, items[n].place) for n in chosen]
        _wait(things, operation, timeout)
    except OpError as error:
        return dict.fromkeys(chosen, error)
    return {
        n: serving.attempt(operation, thing, items[n].arrays, items[n].options)
        for n, thing in zip(chosen, things, strict=True)
    }


def _wait(things: Sequence[Stored], operation: str, timeout: float | None) -> None:
    """Wait for first values.

    Raises:
        DeadlineExceededError: there is none in time.
        CancelledError: the container was reset.
    """
    asleep = threading.Lock()
    asleep.acquire()
    errors: list[OpError | None] = []

    def wake(error: OpError | None) -> None:
        errors.append(error)
        asleep.release()

    wait = AllReady(things, wake)
    wait.start()
    names = things[0].name if len(things) == 1 else f"{len(things)} variables"
    try:
        if not asleep.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            late = f"{operation}: no initial value within {timeout} s (object: {names})"
            wait.end(DeadlineExceededError(late))
    except BaseException:
        wait.end(CancelledError(f"{operation}: the caller was interrupted"))
        raise
    while not errors:  # it ends at this moment
        asleep.acquire(timeout=0.1)
    if errors[0] is not None:
        raise errors[0]
