"""Whether messages are made of device memory: asked once, with one answer on all ranks.

An MPI library that is not built for it reads a device address as one of the host, and crashes. Some
say no although the transport below them could (UCX with an Open MPI that was built without CUDA),
and old ones say yes for what only their headers know: `UNISONO_CUDA_AWARE` decides then.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging

import numpy as np

from collectives.algorithms import halving
from collectives.arrays import reduction
from collectives.settings import Settings
from collectives.transport.transport import Deadline, Transport

__all__ = ["agreed", "library_says"]

log = logging.getLogger(__name__)


def library_says() -> bool:
    """Tell whether the loaded MPI library says that it takes device memory; after MPI_Init."""
    query = getattr(ctypes.CDLL(None), "MPIX_Query_cuda_support", None)
    if query is None:  # the library was loaded privately, as mpi4py does where it can
        from mpi4py import MPI

        query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def agreed(configuration: Settings, transport: Transport) -> Settings:
    """Return the settings with "on" or "off": on if all ranks say so; *collective*."""
    wish = configuration.cuda_aware
    own = wish == "on" or (wish == "auto" and library_says())
    everyone = np.array([own], np.int64)
    deadline = Deadline("init", configuration.timeout, configuration.stall_warning)
    halving.allreduce(transport, everyone, reduction.MIN, deadline)
    if own and not everyone[0]:
        log.warning(
            "[%d/%d] MPI does not take device memory on all ranks, so all stage device arrays "
            "through the host",
            transport.rank, transport.size,
        )  # fmt: skip
    return dataclasses.replace(configuration, cuda_aware="on" if everyone[0] else "off")
