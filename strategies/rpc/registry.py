"""Named resources of one task, in containers.

A *container* is a set of names; "" is the default one. Whoever asks for a name first makes the
thing, everyone else finds it, and must have meant the same.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from strategies.errors import (
    AbortedError,
    InvalidArgumentError,
    NotFoundError,
    UnimplementedError,
)
from strategies.rpc.server_requests import ServerRequest

__all__ = [
    "ResourceRegistry",
    "GroupHandler",
    "Handler",
    "Address",
    "ResourceType",
    "container",
    "current_container",
    "register_handler",
    "register_type",
]


Handler = Callable[[Any, ServerRequest], None]
"""An operation on a thing: answers the work, or lets it wait. Must not block."""

GroupHandler = Callable[[Sequence[Any], ServerRequest], None]
"""The same on several things of a kind, which one message names."""


@dataclass(frozen=True)
class ResourceType:
    """A kind of things that can have a name on a task.

    Attributes:
        name: of the kind, in messages and errors.
        make: makes a thing of a description, which msgpack can carry, and its name.
        difference: says what a description asks for that a thing is not, or None.
        operations: what can be done with a thing from other tasks.
        discard: ends all that waits on a thing that is not needed any more.
        together: what can be done with several things in one message, or with one.
    """

    name: str
    make: Callable[[Mapping[str, Any], str], Any]
    difference: Callable[[Any, Mapping[str, Any]], str | None]
    operations: Mapping[str, Handler]
    discard: Callable[[Any], object]
    together: Mapping[str, GroupHandler] = field(default_factory=dict)


_kinds: dict[str, ResourceType] = {}


def register_type(kind: ResourceType) -> ResourceType:
    """Let tasks make things of this kind when another task asks for one."""
    _kinds[kind.name] = kind
    return kind


_offers: dict[str, Callable[[ServerRequest], None]] = {}


def register_handler(operation: str, handler: Callable[[ServerRequest], None]) -> None:
    """Let other tasks ask for an operation that concerns no thing; it must not block."""
    _offers[operation] = handler


@dataclass(frozen=True)
class Address:
    """Where a named thing is.

    Attributes:
        task: rank of the task, in the service's communicator.
        container: the set of names.
        name: in the container.
        serial: tells the thing from an earlier one of the same name; 0 before it is known.
    """

    task: int
    container: str
    name: str
    serial: int = 0

    def __str__(self) -> str:
        inside = f" in container {self.container!r}" if self.container else ""
        return f"{self.name!r}{inside} on task {self.task}"


class ResourceRegistry:
    """The named things of one task; usable from any thread.

    Args:
        task: number of the task.
    """

    def __init__(self, task: int) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._things: dict[tuple[str, str], tuple[int, ResourceType, Any]] = {}

    def open(
        self, kind: ResourceType, address: Address, description: Mapping[str, Any]
    ) -> tuple[int, Any]:
        """Find a thing, or make it if the name is new; return its serial number and it.

        Raises:
            InvalidArgumentError: the name belongs to a thing of another kind, or with other
                properties; says which.
        """
        key = (address.container, address.name)
        with self._lock:
            if key not in self._things:
                made = kind.make(description, address.name)
                self._things[key] = (next(self._serials), kind, made)
            serial, other, thing = self._things[key]
        if other is not kind:
            raise InvalidArgumentError(
                f"open: this name belongs to another kind of object, expected {other.name}, "
                f"got {kind.name} (name: {address})"
            )
        if difference := kind.difference(thing, description):
            raise InvalidArgumentError(f"open: {difference} (name: {address})")
        return serial, thing

    def find(self, address: Address, kind: ResourceType | None = None) -> tuple[ResourceType, Any]:
        """Return a thing that has been opened before, and its kind.

        Raises:
            NotFoundError: there is no such name.
            AbortedError: the container was reset since then, and the name used anew.
            InvalidArgumentError: the thing is of another kind than one that is given.
        """
        with self._lock:
            found = self._things.get((address.container, address.name))
        if found is None:
            raise NotFoundError(
                f"no object of this name, its container was reset (name: {address})"
            )
        serial, own, thing = found
        if serial != address.serial:
            raise AbortedError(
                f"the container was reset and the name used anew, open it again (name: {address})"
            )
        if kind is not None and own is not kind:
            raise InvalidArgumentError(
                f"this name belongs to another kind of object, expected {kind.name}, got "
                f"{own.name} (name: {address})"
            )
        return own, thing

    def reset(self, containers: Iterable[str] | None = None) -> None:
        """Forget the things in some containers, or in all; what waits on them is cancelled."""
        with self._lock:
            chosen = None if containers is None else set(containers)
            keys = [key for key in self._things if chosen is None or key[0] in chosen]
            gone = [self._things.pop(key) for key in keys]
        for _, kind, thing in gone:
            kind.discard(thing)

    def perform(self, work: ServerRequest, target: Mapping[str, Any]) -> None:
        """Do what another task asks for, or let it wait; an error is its answer.

        Args:
            work: the request.
            target: container, name, serial number and operation, under `c`, `n`, `s` and `o`.
        """
        try:
            address = Address(self._task, target["c"], target["n"], target["s"])
            operation = target["o"]
            if operation == "open":
                name = work.arguments["kind"]
                if name not in _kinds:
                    raise NotFoundError(
                        f"open: no such kind of object, expected one of "
                        f"{' '.join(sorted(_kinds))}, got {name!r}"
                    )
                serial, _ = self.open(_kinds[name], address, work.arguments["is"])
                work.reply(serial=serial)
            elif operation == "reset":
                self.reset(work.arguments["containers"])
                work.reply()
            elif operation in _offers:
                _offers[operation](work)
            else:
                self._perform_on_thing(work, address, operation)
        except Exception as error:
            work.fail(error)

    def _perform_on_thing(self, work: ServerRequest, address: Address, operation: str) -> None:
        kind, thing = self.find(address)
        if operation in kind.together:
            others = (Address(self._task, *other) for other in work.arguments.get("others", ()))
            things = [thing, *(self.find(other, kind)[1] for other in others)]
            kind.together[operation](things, work)
        elif operation in kind.operations:
            kind.operations[operation](thing, work)
        else:
            known = sorted({*kind.operations, *kind.together})
            raise UnimplementedError(
                f"a {kind.name} has no such operation, expected one of {' '.join(known)}, "
                f"got {operation!r}"
            )


_current: ContextVar[str] = ContextVar("container", default="")


@contextmanager
def container(name: str) -> Iterator[None]:
    """Put the named things that are opened inside into this container, unless they say otherwise.

    Args:
        name: of the container; "" for the default one.
    """
    before = _current.set(name)
    try:
        yield
    finally:
        _current.reset(before)


def current_container() -> str:
    """Return the container for things that are opened now in this thread."""
    return _current.get()
