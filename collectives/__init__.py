"""Collective operations on arrays among the processes of an MPI job.

Example:
    >>> import collectives as cc
    >>> comm = cc.init()
    >>> total = comm.allreduce(comm.rank, op=cc.SUM)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from collectives import suggestions, world
from collectives.arrays.reduction import (
    BITWISE_AND,
    BITWISE_OR,
    BITWISE_XOR,
    INTEGER_MEAN,
    LOGICAL_AND,
    LOGICAL_OR,
    LOGICAL_XOR,
    MAX,
    MAXLOC,
    MEAN,
    MIN,
    MINLOC,
    PRODUCT,
    SUM,
)
from collectives.buckets.buckets import Buckets
from collectives.communicator import Communicator, from_mpi
from collectives.compression import BF16, FP16, INT8, NONE, Compression
from collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    LaunchError,
    MismatchError,
    PeerFailure,
)
from collectives.launch.launcher import launched_processes
from collectives.launch.open_mpi import is_fault_tolerant
from collectives.launch.uncaught import leave
from collectives.operations.call_sites import calls_from_here
from collectives.operations.heads import Envelope
from collectives.operations.plan import Plan
from collectives.operations.requests import Request
from collectives.timeline import timeline_span
from collectives.uncompiled import leave_alone
from collectives.version import __version__ as __version__
from collectives.world import *  # noqa: F403  # the operations of the world, listed there

__all__ = [
    "BF16",
    "BITWISE_AND",
    "BITWISE_OR",
    "BITWISE_XOR",
    "FP16",
    "INT8",
    "INTEGER_MEAN",
    "LOGICAL_AND",
    "LOGICAL_OR",
    "LOGICAL_XOR",
    "MAX",
    "MAXLOC",
    "MEAN",
    "MIN",
    "MINLOC",
    "NONE",
    "PRODUCT",
    "SUM",
    "Buckets",
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "Compression",
    "Envelope",
    "LaunchError",
    "MismatchError",
    "PeerFailure",
    "Plan",
    "Request",
    "calls_from_here",
    "from_mpi",
    "is_fault_tolerant",
    "launched_processes",
    "leave",
    "timeline_span",
]
__all__ += world.__all__

leave_alone()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> None:
        """Name what an attribute that does not exist is called here: `cc.AVG` is `cc.MEAN`."""
        raise suggestions.unknown(f"module {__name__!r}", name, sys.modules[__name__])


def __dir__() -> list[str]:
    """Return what is public, without the modules that it comes from."""
    return __all__
