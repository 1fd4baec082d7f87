"""Device scopes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from strategies.cluster.device_spec import DeviceSpec

__all__ = ["DeviceFunction", "PlacementRequest", "current_device", "device", "requested_device"]


class PlacementRequest(NamedTuple):
    """A thing to be placed.

    Attributes:
        name: its name.
        type: its type: "Variable", "FIFOQueue", "Function", ...
        device: its device, as far as known.
        shape: shape of its value; None without one.
        dtype: dtype of its value; None without one.
        device_types: types of devices that support it, best first; empty for all.
    """

    name: str
    type: str
    device: str = ""
    shape: tuple[int | None, ...] | None = None
    dtype: Any = None
    device_types: tuple[str, ...] = ("CPU",)

    @property
    def nbytes(self) -> int:
        """Size of its value in bytes.

        Raises:
            ValueError: the shape is unknown.
        """
        if self.shape is None or self.dtype is None or None in self.shape:
            raise ValueError(
                f"nbytes: expected a known shape and dtype, got {self.shape} and {self.dtype} "
                f"({self.type} {self.name})"
            )
        return math.prod(int(n or 0) for n in self.shape) * int(np.dtype(self.dtype).itemsize)


DeviceFunction = Callable[[PlacementRequest], str]
"""Returns the device of an object; its result overrides the enclosed blocks."""

# Per thread and per asyncio task, innermost last.
_scopes: ContextVar[tuple[DeviceSpec | DeviceFunction | None, ...]] = ContextVar(
    "device", default=()
)


@contextmanager
def device(name: str | DeviceSpec | DeviceFunction | None) -> Iterator[None]:
    """Place the things that this thread creates in the block.

    Nested blocks are merged; the inner block takes precedence.

    Args:
        name: full or partial device name, such as "/job:ps" or "/cpu:1"; a function that returns a
            name for each thing; or None to ignore outer blocks.

    Raises:
        ValueError: the name is invalid.
        TypeError: `name` is of another type.

    Example:
        >>> with device("/job:ps/task:1"), device("cpu:0"):
        ...     current_device()
        '/job:ps/task:1/device:CPU:0'
    """
    # Parsed when the block begins, so that a wrong name raises there.
    scope = DeviceSpec.from_string(name) if isinstance(name, str) else name
    if scope is not None and not isinstance(scope, DeviceSpec) and not callable(scope):
        raise TypeError(f"device: expected a name, a function or None, got {name!r}")
    # A new tuple, so that contexts that were copied before keep theirs.
    before = _scopes.set((*_scopes.get(), scope))
    try:
        yield
    finally:
        _scopes.reset(before)


def current_device() -> str:
    """Return the device of the enclosing blocks, without device functions, which need a thing."""
    spec = DeviceSpec()
    for scope in reversed(_scopes.get()):
        if scope is None:
            # `device(None)` hides all outer blocks.
            break
        if isinstance(scope, DeviceSpec):
            spec = scope.make_merged_spec(spec)
    return spec.to_string()


def requested_device(thing: PlacementRequest) -> DeviceSpec:
    """Return the device of a thing, from its own device and the enclosing blocks.

    Raises:
        TypeError: a device function does not return a string.
        ValueError: a name is invalid.
    """
    spec = DeviceSpec.from_string(thing.device)
    for scope in reversed(_scopes.get()):
        if scope is None:
            break
        if isinstance(scope, DeviceSpec):
            spec = scope.make_merged_spec(spec)  # the fields of inner blocks stay
            continue
        answer = scope(thing._replace(device=spec.to_string()))
        if not isinstance(answer, str):
            raise TypeError(
                f"device: a device function returns text, '' for any device, got {answer!r} "
                f"({thing.type} {thing.name})"
            )
        # Replaced rather than merged, as in TensorFlow: the function has seen the inner blocks.
        spec = DeviceSpec.from_string(answer)
    return spec
