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
    """Something that is about to be placed.

    Attributes:
        name: of the thing.
        type: what it is: "Variable", "FIFOQueue", "Function", ...
        device: what is known so far of where it belongs.
        shape: of its value, if it has one.
        dtype: of its value, if it has one.
        device_types: where it can be, best first; on any device if there are none.
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
            ValueError: the shape is not known.
        """
        if self.shape is None or self.dtype is None or None in self.shape:
            raise ValueError(
                f"nbytes: expected a known shape and dtype, got {self.shape} and {self.dtype} "
                f"({self.type} {self.name})"
            )
        return math.prod(int(n or 0) for n in self.shape) * int(np.dtype(self.dtype).itemsize)


DeviceFunction = Callable[[PlacementRequest], str]
"""Says where a thing belongs; what it returns stands instead of what blocks inside it say."""

_scopes: ContextVar[tuple[DeviceSpec | DeviceFunction | None, ...]] = ContextVar(
    "device", default=()
)


@contextmanager
def device(name: str | DeviceSpec | DeviceFunction | None) -> Iterator[None]:
    """Place what this thread makes inside of the block.

    Blocks inside of one another add to each other; what the inner one says counts.

    Args:
        name: of a device, or part of it, such as "/job:ps" or "/cpu:1"; a function that is asked
            for each thing; or None, to begin anew: what outer blocks say does not count.

    Raises:
        ValueError: it is not such a name.
        TypeError: it is nothing of this kind.

    Example:
        >>> with device("/job:ps/task:1"), device("cpu:0"):
        ...     current_device()
        '/job:ps/task:1/device:CPU:0'
    """
    scope = DeviceSpec.from_string(name) if isinstance(name, str) else name
    if scope is not None and not isinstance(scope, DeviceSpec) and not callable(scope):
        raise TypeError(f"device: expected a name, a function or None, got {name!r}")
    before = _scopes.set((*_scopes.get(), scope))
    try:
        yield
    finally:
        _scopes.reset(before)


def current_device() -> str:
    """Return what the blocks around say; functions, which need to know a thing, are left out."""
    spec = DeviceSpec()
    for scope in reversed(_scopes.get()):
        if scope is None:
            break
        if isinstance(scope, DeviceSpec):
            spec = scope.make_merged_spec(spec)
    return spec.to_string()


def requested_device(thing: PlacementRequest) -> DeviceSpec:
    """Return where a thing is to be, by its own device and then the blocks around.

    Raises:
        TypeError: a device function does not return text.
        ValueError: a name cannot be read.
    """
    spec = DeviceSpec.from_string(thing.device)
    for scope in reversed(_scopes.get()):
        if scope is None:
            break
        if isinstance(scope, DeviceSpec):
            spec = scope.make_merged_spec(spec)
            continue
        answer = scope(thing._replace(device=spec.to_string()))
        if not isinstance(answer, str):
            raise TypeError(
                f"device: a device function returns text, '' for any device, got {answer!r} "
                f"({thing.type} {thing.name})"
            )
        spec = DeviceSpec.from_string(answer)
    return spec
