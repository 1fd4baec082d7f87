"""Stream ordering: operations wait for the CUDA work that produces their arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

__all__ = ["capture_streams"]


def capture_streams(values: Iterable[object]) -> Callable[[], None]:
    """Record the device work that produces arrays, for a thread that will use them.

    Current streams belong to a thread, so another thread would wait for its own streams.

    Args:
        values: arrays, lists of arrays, and any other arguments of a call.

    Returns:
        A function that the other thread calls first. It lets that thread's current streams wait for
        the work enqueued on this thread's streams so far.
    """
    # Without either library no argument can have work on a stream.
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is None and cupy is None:
        return _nothing
    waits: dict[object, Callable[[], None]] = {}
    for value in values:
        for x in value if isinstance(value, (list, tuple)) else (value,):
            # By the type, as in `adapters.device_array`.
            kind = type(x)
            if kind is np.ndarray or not hasattr(kind, "__cuda_array_interface__"):
                continue
            if hasattr(kind, "__torch_function__"):
                # One event per device orders all its arrays.
                if torch is not None and x.is_cuda and x.device not in waits:
                    waits[x.device] = _waiting(torch.cuda, x.device, "current_stream")
            elif cupy is not None and None not in waits and cupy.cuda.is_available():
                # One entry for all other libraries: the current stream of CuPy on the current
                # device.
                waits[None] = _waiting(cupy.cuda, None, "get_current_stream")

    def wait() -> None:
        for each in waits.values():
            each()

    return wait if waits else _nothing


def _waiting(library: Any, device: Any, current: str) -> Callable[[], None]:
    """Return a function that makes the calling thread's stream wait for this thread's."""
    # Looked up again in the other thread, which has streams of its own.
    get = getattr(library, current)
    arguments = () if device is None else (device,)
    stream = get(*arguments)
    # An event, because the other thread must not wait for work that is enqueued later.
    event = library.Event()
    event.record(stream)
    return lambda: get(*arguments).wait_event(event)


def _nothing() -> None:
    pass
