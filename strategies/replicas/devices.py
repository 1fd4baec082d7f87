"""The devices of one process, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["CPU", "parse_devices"]

CPU = ("/cpu:0",)

_CPU = re.compile(r"/?(?:device:)?cpu:(\d+)", re.IGNORECASE)


def parse_devices(devices: Sequence[str], operation: str) -> tuple[str, ...]:
    """Return the names of devices, checked, in one form.

    There are as many CPU devices as one asks for: a thread computes on each. A GPU is the business
    of a rank: start one for each GPU.

    Raises:
        ValueError: no device, none of this name, or one twice.
        TypeError: a text where there should be a list.

    Example:
        >>> parse_devices(["cpu:0", "/device:CPU:1"], "example")
        ('/cpu:0', '/cpu:1')
    """
    if isinstance(devices, str):
        raise TypeError(f"{operation}: devices is not a list of names, got {devices!r}")
    names = []
    for device in devices:
        match = _CPU.fullmatch(device) if isinstance(device, str) else None
        if match is None:
            raise ValueError(
                f"{operation}: no such device, expected /cpu:0, /cpu:1, ..., got {device!r}; for "
                f"GPUs start a rank for each"
            )
        names.append(f"/cpu:{int(match[1])}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{operation}: expected different devices, at least one, got {names}")
    return tuple(names)
