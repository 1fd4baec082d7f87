"""Settings that have to mean the same on all ranks, settled once, by one exchange.

| setting | settled as |
| --- | --- |
| `check` | the strictest of any rank: who compares would take the others' data for a comparison |
| `cuda_aware` | "on" if it is on all ranks |
| `links` | what rank 0 finds in settings and file: by them "auto" picks the algorithm |
| `timeline` | rank 0's: all begin one together |

Every rank fills a page, and the largest of all ranks' bytes is what they share:

    byte    0                    1                           2 ..
            level of checking    1: device memory staged     rank 0's links ... as JSON; 0 elsewhere

An MPI library that is not built for device memory reads its addresses as the host's, and crashes.
Some say no although the transport below them could (UCX with an Open MPI that was built without
CUDA), and old ones say yes for what only their headers know: `UNISONO_CUDA_AWARE` decides then.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import os
from typing import Literal, get_args

import numpy as np

from collectives import settings, tuned
from collectives.algorithms import doubling
from collectives.arrays import reduction
from collectives.links import Link, Links, Machine
from collectives.settings import Settings
from collectives.transport.transport import Deadline, Transport

__all__ = ["library_takes_device_memory", "settle"]

log = logging.getLogger(__name__)

# Links take some hundred bytes; a longer text is that of an error, and cut.
_PAGE_BYTES = 4096
_CHECK, _STAGED, _TEXT = 0, 1, 2


def library_takes_device_memory() -> bool:
    """Tell whether the loaded MPI library says that it takes device memory; after MPI_Init."""
    query = getattr(ctypes.CDLL(None), "MPIX_Query_cuda_support", None)
    if query is None:  # the library was loaded privately, as mpi4py does where it can
        from mpi4py import MPI

        query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def settle(own: Settings, transport: Transport) -> Settings:
    """Return this rank's settings with those that all ranks share; *collective*.

    Raises:
        ValueError: rank 0's file of links is damaged, or it cannot look for one; the same error on
            all ranks, which would wait for it.
    """
    levels = get_args(settings.Check)
    wish = own.cuda_aware
    aware = wish == "on" or (wish == "auto" and library_takes_device_memory())
    page = np.zeros(_PAGE_BYTES, np.uint8)
    page[_CHECK], page[_STAGED] = levels.index(own.check), not aware
    if transport.rank == 0:
        text = _links(own).encode()[: _PAGE_BYTES - _TEXT]
        page[_TEXT : _TEXT + len(text)] = np.frombuffer(text, np.uint8)
    deadline = Deadline("init", own.timeout, own.stall_warning)
    doubling.allreduce(transport, page, reduction.MAX, deadline)

    where = f"[{transport.rank}/{transport.size}]"
    check: settings.Check = levels[page[_CHECK]]
    if check != own.check:
        log.warning(
            "%s UNISONO_CHECK is %s on another rank, so this one, with %s, compares as much",
            where, check, own.check,
        )  # fmt: skip
    if aware and page[_STAGED]:
        log.warning(
            "%s MPI does not take device memory on all ranks, so all stage device arrays through "
            "the host", where,
        )  # fmt: skip
    text = page[_TEXT:].tobytes().rstrip(b"\0")
    if not text.startswith(b"["):
        raise ValueError(text.decode(errors="replace"))
    machine, sources, timeline = json.loads(text)
    known = Links(Machine(*(Link(*numbers) for numbers in machine)), tuple(sources))
    cuda_aware: Literal["on", "off"] = "off" if page[_STAGED] else "on"
    return dataclasses.replace(
        own, check=check, cuda_aware=cuda_aware, links=known, timeline=timeline
    )


def _links(own: Settings) -> str:
    """Return what rank 0 finds, as JSON, or else in words why it finds nothing."""
    try:
        return json.dumps([*tuned.found(own, os.environ), own.timeline])
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"tuned: {type(error).__name__}: {error}"
