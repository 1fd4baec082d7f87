"""Collective operations on arrays among the processes of an MPI job.

Example:
    >>> import collectives as cc
    >>> comm = cc.init()
    >>> total = comm.allreduce(comm.rank, op=cc.SUM)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from collectives import world
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
from collectives.calls.requests import Request
from collectives.communicator import Communicator, from_mpi
from collectives.core import suggestions
from collectives.core.errors import (
    CollectiveError,
    CollectiveTimeout,
    LaunchError,
    MismatchError,
    PeerFailure,
)
from collectives.core.torch_compile import exclude_packages
from collectives.core.version import __version__ as __version__
from collectives.fusion.buckets import Buckets
from collectives.kernels.compression import BF16, FP16, INT8, NONE, TOPK, Compression
from collectives.launch.abort_hook import exit_all
from collectives.launch.open_mpi import is_fault_tolerant
from collectives.operations.neighbours import Neighbours
from collectives.operations.own_operations import operation
from collectives.plans.planner import Plan
from collectives.tracing.timeline import timeline_span
from collectives.transport.header import Envelope
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
    "TOPK",
    "Buckets",
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "Compression",
    "Envelope",
    "LaunchError",
    "MismatchError",
    "Neighbours",
    "PeerFailure",
    "Plan",
    "Request",
    "exit_all",
    "from_mpi",
    "is_fault_tolerant",
    "operation",
    "timeline_span",
]
# `world.__all__` is maintained there, beside the functions.
__all__ += world.__all__

# At the import, because a program may compile before it calls `init`.
exclude_packages()


# Type checkers would otherwise accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> None:
        """Raise an error that suggests the name in this package: `cc.AVG` is `cc.MEAN`."""
        raise suggestions.unknown(f"module {__name__!r}", name, sys.modules[__name__])


def __dir__() -> list[str]:
    """Return the public names, without the modules that define them."""
    # `dir` and completion show public names only.
    return __all__
