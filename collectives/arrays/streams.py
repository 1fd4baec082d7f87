"""Stream ordering: operations wait for the CUDA work that produces their arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

__all__ = ["capture_streams"]


def capture_streams(values: Iterable[object]) -> Callable[[], None]:
    """Remember what computes arrays on devices, for a thread that will use them.

    Streams are current for a thread: another one would wait for its own.

    Args:
        values: arrays, lists of arrays, and whatever else a call gets.

    Returns:
        What the other thread calls first: its current streams wait for what was put on those of
        this thread up to now.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is None and cupy is None:
        return _nothing
    waits: dict[object, Callable[[], None]] = {}
    for value in values:
        for x in value if isinstance(value, (list, tuple)) else (value,):
            kind = type(x)
            if kind is np.ndarray or not hasattr(kind, "__cuda_array_interface__"):
                continue
            if hasattr(kind, "__torch_function__"):
                if torch is not None and x.is_cuda and x.device not in waits:
                    waits[x.device] = _waiting(torch.cuda, x.device, "current_stream")
            elif cupy is not None and None not in waits and cupy.cuda.is_available():
                waits[None] = _waiting(cupy.cuda, None, "get_current_stream")

    def wait() -> None:
        for each in waits.values():
            each()

    return wait if waits else _nothing


def _waiting(library: Any, device: Any, current: str) -> Callable[[], None]:
    """Return a function that makes the calling thread's stream wait for this thread's."""
    get = getattr(library, current)
    arguments = () if device is None else (device,)
    stream = get(*arguments)
    event = library.Event()
    event.record(stream)
    return lambda: get(*arguments).wait_event(event)


def _nothing() -> None:
    pass
