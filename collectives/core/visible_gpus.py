"""GPUs that a process sees, without starting CUDA."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["visible_gpus"]

_DEVICES = Path("/dev")


def visible_gpus(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the visible GPUs of this process, as CUDA_VISIBLE_DEVICES names them.

    Does not start CUDA. Without the variable the GPUs are those of /dev/nvidia0, 1, ...

    Args:
        environ: the environment; None for `os.environ`.
    """
    listed = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        # The device files of the driver, so that CUDA need not be started to count them.
        return [str(i) for i in range(len(list(_DEVICES.glob("nvidia[0-9]*"))))]
    found: list[str] = []
    for name in map(str.strip, listed.split(",")):
        if name in ("", "-1") or name in found:
            break  # as CUDA, which stops at the first invalid one
        found.append(name)
    return found
