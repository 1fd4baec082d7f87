"""Variables as a kind of named things: how they are made, found and given their first value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from strategies.remote import pool
from strategies.remote.asking import Question, ask
from strategies.remote.containers import Place, ResourceKind, Work, register
from strategies.remote.service import Service
from strategies.remote.wire import Array
from strategies.variables.descriptions import make_optimizer
from strategies.variables.serving import HANDLERS
from strategies.variables.store import Rate, Stored

__all__ = ["KIND", "initialize", "is_missing", "properties_of"]

# A longer first value is copied by another thread than the one that takes messages.
_SHORT = 1 << 16  # bytes


def properties_of(
    value: Array | None, optimizer: Mapping[str, Any] | None, whole: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what all who ask for a variable must agree in; None fits any.

    Args:
        value: the first one, or None.
        optimizer: see `descriptions.optimizer_as_words`.
        whole: what the variable is a part of, or None.
    """
    return {
        "shape": None if value is None else list(value.shape),
        "dtype": None if value is None else value.dtype.name,
        "optimizer": None if optimizer is None else dict(optimizer),
        "whole": None if whole is None else dict(whole),
    }


def is_missing(service: Service, place: Place) -> bool:
    """Return whether a variable has no value yet."""
    if place.task == service.task:
        return service.here(KIND, place).value is None
    (answer,) = ask(service, [Question(place, "missing", {})])
    if answer.error is not None:
        raise answer.error
    return bool(answer.metadata["missing"])


def initialize(service: Service, place: Place, value: Array, wanted: Mapping[str, Any]) -> None:
    """Set the first value, unless somebody else was faster.

    Raises:
        InvalidArgumentError: somebody was, and has meant something else.
    """
    if place.task == service.task:
        _set(service.here(KIND, place), value, wanted)
        return
    (answer,) = ask(service, [Question(place, "initialize", {"is": wanted}, [value])])
    if answer.error is not None:
        raise answer.error


def _set(thing: Stored, value: Array, wanted: Mapping[str, Any]) -> None:
    if thing.value is not None:  # without the lock, which an update may hold for long
        thing.check(wanted)
        return
    words = wanted["optimizer"]
    optimizer, rate = (None, Rate(0.0)) if words is None else make_optimizer(words)
    with thing.lock:
        first = thing.initialize(value, optimizer, rate, wanted)
    if first:
        thing.tell()
    else:
        thing.check(wanted)


def _initialize(thing: Stored, work: Work) -> None:
    (value,) = work.values
    value = np.asarray(value)

    def job() -> None:
        try:
            _set(thing, value, work.arguments["is"])
        except Exception as error:
            work.fail(error)
        else:
            work.reply()

    if value.nbytes > _SHORT:
        pool.UPDATES.submit(job)
    else:
        job()


def _missing(thing: Stored, work: Work) -> None:
    work.reply(missing=thing.value is None)


KIND = register(
    ResourceKind(
        "Variable",
        lambda description, name: Stored(name),
        Stored.difference,
        {"initialize": _initialize, "missing": _missing},
        Stored.discard,
        HANDLERS,
    )
)
