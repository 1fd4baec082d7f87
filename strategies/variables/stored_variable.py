"""Stored variable: value, version, and optimizer with slots.

A value that somebody reads never changes under them: whoever reads gets a view, and the next update
goes to other memory if a view is still held, else to the same. So a read costs no copy, an update
costs one only while somebody reads, and no reader sees half of an update.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from strategies import optimizers
from strategies.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    OpError,
)
from strategies.optimizers import LearningRate, Optimizer
from strategies.rpc.function_names import function_named, name_of
from strategies.rpc.operation import OperationOwner, PendingOperation
from strategies.rpc.wire import Array

__all__ = ["WaitInitialized", "NamedArray", "StoredVariable", "make_optimizer", "optimizer_to_dict"]

# What a task may be asked to make: the optimizers of this package, by name.
_KINDS: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(optimizers).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}


class _Rate:
    """The learning rate of a variable's optimizer, which a single update may have another of."""

    def __init__(self, given: LearningRate) -> None:
        self._given = given
        self.instead: float | None = None
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        """Return the rate for this step."""
        rate = self._given(step) if callable(self._given) else self._given
        return (rate if self.instead is None else self.instead) * self.factor


def optimizer_to_dict(optimizer: Optimizer | None, operation: str) -> dict[str, Any] | None:
    """Return the class and the arguments of an optimizer, as msgpack can carry them.

    Raises:
        TypeError: none of the optimizers of this package.
        ValueError: its learning rate is a function that cannot be imported.
    """
    if optimizer is None:
        return None
    kind = type(optimizer)
    if _KINDS.get(kind.__name__) is not kind:
        raise TypeError(
            f"{operation}: not an optimizer that can live on a task, expected one of "
            f"{' '.join(sorted(_KINDS))}, got {kind.__name__}"
        )
    words = {
        name: name_of(value, f"{operation}: learning rate") if callable(value) else _plain(value)
        for name, value in optimizer.settings.items()
    }
    return {"class": kind.__name__, **words}


def make_optimizer(words: Mapping[str, Any]) -> Optimizer:
    """Undo `optimizer_to_dict`."""
    arguments = dict(words)
    kind = _KINDS[arguments.pop("class")]
    given = arguments["learning_rate"]
    rate = function_named(given) if isinstance(given, str) else given
    return kind(**{**arguments, "learning_rate": rate})


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int)) else float(value)


class NamedArray(NamedTuple):
    """A variable as optimizers want it."""

    name: str
    value: Array


class StoredVariable:
    """One variable. What changes it holds `lock`.

    Args:
        name: in its container.

    Attributes:
        name: as given.
        lock: held while the value is read or changed.
        version: how often the value has been changed.
        value: None until it is set for the first time.
        properties: what all who ask for the variable must agree in, by name; empty at first.
        optimizer: for `step`, or None.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.version = 0
        self.value: Array | None = None
        self.properties: dict[str, Any] = {}
        self.optimizer: Optimizer | None = None
        self._rate = _Rate(0.0)
        self._before: Array | None = None  # memory of an earlier value, to be used again
        self._door = threading.Lock()  # of those that wait; never held for long, unlike `lock`
        self._gone: OpError | None = None
        self._waiting: list[Callable[[OpError | None], None]] = []

    def initialize(
        self,
        value: Array | Callable[[], Array],
        optimizer: Optimizer | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> bool:
        """Set the first value; False if there is one already. With the lock held.

        Args:
            value: shape (...), copied; or a function that makes it, and keeps nothing of it.
            optimizer: the variable gets one like it, for itself alone.
            properties: see the attribute.
        """
        if self.value is not None:
            return False
        if optimizer is not None:
            arguments = optimizer.settings
            self._rate = _Rate(arguments["learning_rate"])
            self.optimizer = type(optimizer)(**{**arguments, "learning_rate": self._rate})
        self.properties = dict(properties or {})
        # Last: who sees it may use everything.
        self.value = value() if callable(value) else np.array(value, order="C")
        return True

    @property
    def initialized_value(self) -> Array:
        """The value, where it is known that there is one."""
        assert self.value is not None
        return self.value

    def view(self) -> Array:
        """Return the value, which will not change; with the lock held."""
        view: Array = self.initialized_value.view()
        view.flags.writeable = False
        return view

    @property
    def is_read(self) -> bool:
        """Whether somebody holds a view, so that an update has to copy the value first."""
        return sys.getrefcount(self.value) > _ALONE

    def writable(self, *, keep: bool = True) -> Array:
        """Return memory to change the value in; with the lock held.

        Args:
            keep: the memory holds the value; else anything.
        """
        assert self.value is not None
        if self.is_read:
            free = self._before is not None and sys.getrefcount(self._before) <= _ALONE
            other = self._before if free else np.empty_like(self.value)
            assert other is not None
            if keep:
                other[...] = self.value
            self._before, self.value = self.value, other
        return self.value

    def step(self, gradient: Any, factor: float = 1.0, rate: float | None = None) -> None:
        """Let the optimizer change the value; with the lock held.

        Args:
            gradient: an array, or `Rows`.
            factor: by which the learning rate is multiplied.
            rate: instead of the optimizer's own; None for that.
        """
        assert self.optimizer is not None
        self._rate.factor, self._rate.instead = factor, rate
        self.optimizer.apply_gradients([(gradient, self.named())])

    def named(self) -> NamedArray:
        """Return the variable as optimizers want it, to be changed."""
        return NamedArray(self.name, self.writable())

    def when_ready(self, call: Callable[[OpError | None], None]) -> None:
        """Call when there is a value, which may be now, or with an error if there will be none."""
        with self._door:
            waits = self.value is None and self._gone is None
            if waits:
                self._waiting.append(call)
        if not waits:
            call(self._gone)

    def forget(self, call: Callable[[OpError | None], None]) -> None:
        """Do not call what was given to `when_ready`."""
        with self._door:
            if call in self._waiting:
                self._waiting.remove(call)

    def tell(self) -> None:
        """Call all that wait, after the value was set; without the lock."""
        with self._door:
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call(self._gone)

    def discard(self) -> None:
        """End all that waits."""
        self._gone = CancelledError(f"{self.name}: the container was reset")
        self.tell()

    def check(self, wanted: Mapping[str, Any]) -> None:
        """Refuse what somebody else takes this variable for.

        Raises:
            InvalidArgumentError: a property differs; None fits any.
        """
        if difference := self.difference(wanted):
            raise InvalidArgumentError(f"open: {difference} (name: {self.name})")

    def difference(self, wanted: Mapping[str, Any]) -> str | None:
        """Say which property differs, or None."""
        for what, has in self.properties.items():
            asked = wanted.get(what)
            if asked is not None and has != asked:
                return f"the variable has another {what}, expected {has}, got {asked}"
        return None


def _alone() -> int:
    """Return how many references Python counts to a value that nobody reads."""
    stored = StoredVariable("")
    stored.value = np.empty(1)
    return sys.getrefcount(stored.value)


_ALONE = _alone()


class WaitInitialized(PendingOperation, OperationOwner):
    """Waits until several variables have their first values; it is its own owner.

    Args:
        things: the variables.
    """

    def __init__(self, things: Sequence[StoredVariable]) -> None:
        self._things = things
        self._lock = threading.Lock()
        self._missing = 1 + len(things)

    def submit(self, attempt: PendingOperation) -> None:
        """Begin to wait."""
        for thing in self._things:
            thing.when_ready(self._one)
        self._one(None)  # so that it does not end before all were asked

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End the wait with an error; one of time says for which variables."""
        if isinstance(error, DeadlineExceededError):
            missing = " ".join(thing.name for thing in self._things if thing.value is None)
            error = DeadlineExceededError(f"{error.message}; no initial value yet of {missing}")
        self._end(error)

    def abandon(self, attempt: PendingOperation) -> None:
        """End the wait."""
        self.withdraw(attempt, CancelledError("the caller was interrupted"))

    def _one(self, error: OpError | None) -> None:
        with self._lock:
            self._missing -= 1
            waits = error is None and self._missing > 0
        if not waits:
            self._end(error)

    def _end(self, error: OpError | None) -> None:
        with self._lock:
            if self.done:
                return
            self.complete(error)
        for thing in self._things if error is not None else ():
            thing.forget(self._one)
        self.notify()
