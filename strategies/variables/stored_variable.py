"""Stored variable: value, version, and optimizer with slots.

A read returns a view whose contents never change. The next update writes to other memory if a view
still exists, else in place. Reads need no copy, an update copies only while a view exists, and no
reader sees half of an update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives import extend
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
from strategies.rpc.registry import describe_difference
from strategies.rpc.wire import Array

__all__ = ["WaitInitialized", "NamedArray", "StoredVariable", "make_optimizer", "optimizer_to_dict"]

# Optimizers that other tasks can create by name: only those of this package.
_KINDS: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(optimizers).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}


class _Rate:
    """Learning rate of a variable's optimizer, which a single update can override."""

    def __init__(self, given: LearningRate) -> None:
        self._given = given
        self.instead: float | None = None
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        """Return the rate for this step."""
        rate = self._given(step) if callable(self._given) else self._given
        return (rate if self.instead is None else self.instead) * self.factor


def optimizer_to_dict(optimizer: Optimizer | None, operation: str) -> dict[str, Any] | None:
    """Return class and arguments of an optimizer, as msgpack can encode them.

    Raises:
        TypeError: the optimizer is not from this package.
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
    """Reverse `optimizer_to_dict`."""
    arguments = dict(words)
    # By name from this package, so that a message cannot construct other classes.
    kind = _KINDS[arguments.pop("class")]
    given = arguments["learning_rate"]
    rate = function_named(given) if isinstance(given, str) else given
    return kind(**{**arguments, "learning_rate": rate})


def _plain(value: Any) -> Any:
    # NumPy's numbers become Python's, which msgpack can encode.
    return value if isinstance(value, (bool, int)) else float(value)


class NamedArray(NamedTuple):
    """A variable in the form that optimizers expect."""

    name: str
    value: Array


class StoredVariable:
    """A variable on this task. Hold `lock` to change it.

    Args:
        name: name in the container.

    Attributes:
        name: the name.
        lock: held while the value is read or changed.
        version: number of changes.
        value: the value; None until it is initialized.
        properties: properties that all tasks must agree on, by name; empty at first.
        optimizer: optimizer of `step`, or None.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.version = 0
        self.value: Array | None = None
        self.properties: dict[str, Any] = {}
        self.optimizer: Optimizer | None = None
        self._rate = _Rate(0.0)
        self._before: Array | None = None  # buffer of an earlier value, for reuse
        self._door = threading.Lock()  # protects `_waiting`; held briefly, unlike `lock`
        self._gone: OpError | None = None
        self._waiting: list[Callable[[OpError | None], None]] = []

    def initialize(
        self,
        value: Array | Callable[[], Array],
        optimizer: Optimizer | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> bool:
        """Set the initial value; return False if the variable has one. The lock is held.

        Args:
            value: shape (...), copied; or a function that returns an array without other
                references.
            optimizer: optimizer; the variable gets an equal one of its own.
            properties: see the attribute.
        """
        if self.value is not None:
            return False
        # First: a variable whose initializer fails stays as it was.
        initial = value() if callable(value) else np.array(value, order="C")
        if optimizer is not None:
            arguments = optimizer.settings
            # The optimizer reads its rate through this object, so that `step` can override it.
            self._rate = _Rate(arguments["learning_rate"])
            self.optimizer = type(optimizer)(**{**arguments, "learning_rate": self._rate})
        self.properties = dict(properties or {})
        # Last: threads that see a value rely on the other attributes.
        self.value = initial
        return True

    @property
    def initialized_value(self) -> Array:
        """The value, which must be initialized."""
        assert self.value is not None
        return self.value

    def view(self) -> Array:
        """Return a read-only view that later updates do not change; the lock is held."""
        # The view refers to the value, which raises its reference count; `is_read` depends on it.
        view: Array = self.initialized_value.view()
        view.flags.writeable = False
        return view

    @property
    def is_read(self) -> bool:
        """Whether a view exists, so that an update has to copy the value first."""
        # The references include views in messages that MPI has not sent yet.
        return extend.is_referenced_elsewhere(self.value)

    def writable(self, *, keep: bool = True) -> Array:
        """Return memory for the new value; the lock is held.

        Args:
            keep: whether the memory must contain the current value.
        """
        assert self.value is not None
        if self.is_read:
            # Two buffers alternate while readers hold views; memory is allocated only if both are
            # in use.
            if self._before is None or extend.is_referenced_elsewhere(self._before):
                self._before = np.empty_like(self.value)
            other = self._before
            if keep:
                other[...] = self.value
            # The readers keep the old buffer, and the variable the new one.
            self._before, self.value = self.value, other
        return self.value

    def step(self, gradient: Any, factor: float = 1.0, rate: float | None = None) -> None:
        """Update the value with the optimizer; the lock is held.

        Args:
            gradient: array or `Rows`.
            factor: factor of the learning rate.
            rate: learning rate for this step; None uses the optimizer's own.
        """
        assert self.optimizer is not None
        # Set before each step and never reset: every step sets both.
        self._rate.factor, self._rate.instead = factor, rate
        self.optimizer.apply_gradients([(gradient, self.named())])

    def named(self) -> NamedArray:
        """Return the variable in the form that optimizers expect, with writable memory."""
        return NamedArray(self.name, self.writable())

    def when_ready(self, call: Callable[[OpError | None], None]) -> None:
        """Call `call` once the variable has a value (or now), or with an error when discarded."""
        with self._door:
            waits = self.value is None and self._gone is None
            if waits:
                self._waiting.append(call)
        if not waits:
            # Without `_door`: the callback may run a whole operation.
            call(self._gone)

    def forget(self, call: Callable[[OpError | None], None]) -> None:
        """Remove a callback of `when_ready`."""
        with self._door:
            if call in self._waiting:
                self._waiting.remove(call)

    def tell(self) -> None:
        """Call the callbacks of `when_ready`; the lock is not held."""
        with self._door:
            # Taken under the lock, so that each callback is called once.
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call(self._gone)

    def discard(self) -> None:
        """Fail all waiting operations."""
        # Before `tell`: a request that arrives from now on fails at once.
        self._gone = CancelledError(f"{self.name}: the container was reset")
        self.tell()

    def check(self, wanted: Mapping[str, Any]) -> None:
        """Check the properties that another task expects.

        Raises:
            InvalidArgumentError: a property differs; None fits any value.
        """
        if difference := self.difference(wanted):
            raise InvalidArgumentError(f"open: {difference} (name: {self.name})")

    def difference(self, wanted: Mapping[str, Any]) -> str | None:
        """Describe the first property that differs; None if all match."""
        return describe_difference("variable", self.properties, wanted, optional=self.properties)


class WaitInitialized(PendingOperation, OperationOwner):
    """Wait until several variables have their initial values; it is its own owner.

    Args:
        things: the variables.
    """

    def __init__(self, things: Sequence[StoredVariable]) -> None:
        self._things = things
        self._lock = threading.Lock()
        # Protects `_missing` and the end, which initializing threads and a deadline may reach at
        # once.
        self._missing = 1 + len(things)

    def submit(self, attempt: PendingOperation) -> None:
        """Start to wait."""
        for thing in self._things:
            thing.when_ready(self._one)
        self._one(None)  # extra count: prevents completion before all callbacks are set

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End the wait with an error; a deadline error lists the missing variables."""
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
        # Otherwise the variable would keep this request, and its arrays, until it gets a value.
        for thing in self._things if error is not None else ():
            thing.forget(self._one)
        self.notify()
