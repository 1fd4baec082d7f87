"""Registry of the named resources of one task, in containers.

A *container* is a set of names; "" is the default one. The first `open` of a name creates the
resource. Later calls return the same resource and must describe the same properties.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    "describe_difference",
    "register_handler",
    "register_type",
]


Handler = Callable[[Any, ServerRequest], object]
"""Operation on a resource: replies to the request, or keeps it waiting. Must not block."""

GroupHandler = Callable[[Sequence[Any], ServerRequest], object]
"""Operation on several resources of a type that are named in one message."""


@dataclass(frozen=True)
class ResourceType:
    """A type of named resources.

    Attributes:
        name: name of the type, in messages and errors.
        make: creates a resource from its description, which msgpack can encode, and its name.
        difference: describes how a resource differs from a description; None if it matches.
        operations: operations for other tasks, by name.
        discard: cancels all operations that wait on a resource.
        together: operations on one or several resources in one message, by name.
    """

    name: str
    make: Callable[[Mapping[str, Any], str], Any]
    difference: Callable[[Any, Mapping[str, Any]], str | None]
    operations: Mapping[str, Handler]
    discard: Callable[[Any], object]
    together: Mapping[str, GroupHandler] = field(default_factory=dict)


def describe_difference(
    noun: str, has: Mapping[str, Any], asked: Mapping[str, Any], optional: Collection[str] = ()
) -> str | None:
    """Describe the first property that differs from the one asked for; None if none does.

    Args:
        noun: what has the properties, for the text.
        has: name -> value of each property.
        asked: name -> value; properties that are not in `has` are ignored.
        optional: names of properties for which None, or no value, fits any value.
    """
    for name, value in has.items():
        got = asked.get(name)
        if got != value and not (got is None and name in optional):
            return f"the {noun} has another {name}, expected {value}, got {got}"
    return None


# Filled when the module of a type is imported. Requests of other tasks can open only these types.
_kinds: dict[str, ResourceType] = {}


def register_type(kind: ResourceType) -> ResourceType:
    """Register a type of resources that other tasks can open."""
    _kinds[kind.name] = kind
    return kind


_offers: dict[str, Callable[[ServerRequest], None]] = {}


def register_handler(operation: str, handler: Callable[[ServerRequest], None]) -> None:
    """Register an operation without a resource for other tasks; the handler must not block."""
    _offers[operation] = handler


@dataclass(frozen=True)
class Address:
    """Address of a named resource.

    Attributes:
        task: rank in the service's communicator.
        container: set of names.
        name: name in the container.
        serial: distinguishes the resource from an earlier one of the same name; 0 before `open`.
    """

    task: int
    container: str
    name: str
    serial: int = 0

    def __str__(self) -> str:
        inside = f" in container {self.container!r}" if self.container else ""
        return f"{self.name!r}{inside} on task {self.task}"


class ResourceRegistry:
    """The named resources of one task; thread-safe.

    Args:
        task: number of the task.
    """

    def __init__(self, task: int) -> None:
        self._task = task
        self._lock = threading.Lock()
        # From 1, because an address has serial 0 before `open`.
        self._serials = itertools.count(1)
        self._things: dict[tuple[str, str], tuple[int, ResourceType, Any]] = {}

    def open(
        self, kind: ResourceType, address: Address, description: Mapping[str, Any]
    ) -> tuple[int, Any]:
        """Find or create a resource; return its serial number and the resource.

        Raises:
            InvalidArgumentError: the name belongs to a resource of another type or with other
                properties; the message states the difference.
        """
        key = (address.container, address.name)
        with self._lock:
            if key not in self._things:
                # Under the lock, so that concurrent requests create one resource.
                made = kind.make(description, address.name)
                self._things[key] = (next(self._serials), kind, made)
            serial, other, thing = self._things[key]
        # Compared without the lock, which other threads need to find their resources.
        if other is not kind:
            raise InvalidArgumentError(
                f"open: this name belongs to another kind of object, expected {other.name}, "
                f"got {kind.name} (name: {address})"
            )
        if difference := kind.difference(thing, description):
            raise InvalidArgumentError(f"open: {difference} (name: {address})")
        return serial, thing

    def find(self, address: Address, kind: ResourceType | None = None) -> tuple[ResourceType, Any]:
        """Return an opened resource and its type.

        Raises:
            NotFoundError: the name does not exist.
            AbortedError: the container was reset after `open`, and the name was reused.
            InvalidArgumentError: the resource does not have the type `kind`.
        """
        with self._lock:
            found = self._things.get((address.container, address.name))
        if found is None:
            raise NotFoundError(
                f"no object of this name, its container was reset (name: {address})"
            )
        serial, own, thing = found
        # The same name, but created again after a reset.
        if serial != address.serial:
            raise AbortedError(
                "the container was reset, and another resource has this name: open it again (name: "
                f"{address})"
            )
        if kind is not None and own is not kind:
            raise InvalidArgumentError(
                f"this name belongs to another kind of object, expected {kind.name}, got "
                f"{own.name} (name: {address})"
            )
        return own, thing

    def reset(self, containers: Iterable[str] | None = None) -> None:
        """Remove the resources in some or all containers, and cancel their waiting operations."""
        with self._lock:
            chosen = None if containers is None else set(containers)
            keys = [key for key in self._things if chosen is None or key[0] in chosen]
            gone = [self._things.pop(key) for key in keys]
        # Without the lock, because cancelled operations run callbacks.
        for _, kind, thing in gone:
            kind.discard(thing)

    def perform(self, work: ServerRequest, target: Mapping[str, Any]) -> None:
        """Run a request of another task, or keep it waiting; reply with errors.

        Args:
            work: the request.
            target: container, name, serial number and operation, under `c`, `n`, `s` and `o`.
        """
        try:
            address = Address(self._task, target["c"], target["n"], target["s"])
            operation = target["o"]
            # Three operations need no resource, so they come before `find`, which raises without
            # one.
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
            # The error is the reply: the message loop must not fail for a bad request.
            work.fail(error)

    def _perform_on_thing(self, work: ServerRequest, address: Address, operation: str) -> None:
        kind, thing = self.find(address)
        if operation in kind.together:
            # The first resource is in the header of the request, the others in its arguments.
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
    """Open named resources in this container by default inside the block.

    Args:
        name: name of the container; "" for the default one.
    """
    before = _current.set(name)
    try:
        yield
    finally:
        _current.reset(before)


def current_container() -> str:
    """Return the default container of this thread."""
    return _current.get()
