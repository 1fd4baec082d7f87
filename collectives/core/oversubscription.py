"""Warning for nodes whose ranks run more threads than there are cores.

NumPy's and PyTorch's libraries start as many threads as they see cores, in every rank. On a node of
C cores, R ranks that are not bound to cores of their own have R C threads, which wait for each
other: `examples/pipelined_rnn.py` took over 100 s so, and 13 s with one thread for each rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["warning_for", "thread_count"]

# What OpenBLAS (NumPy from pip), MKL (NumPy from conda, PyTorch) and OpenMP (PyTorch, both of the
# others where theirs is not set) go by.
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Linux numbers no more cores than this.
_MOST_CORES = 8192


def warning_for(world: MPI.Comm, environ: Mapping[str, str]) -> str | None:
    """Return a warning for this node, on one of its ranks; None elsewhere and where all is well.

    *Collective* over `world`.

    Cost: two reductions of 1 KiB at most inside each node.
    """
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())
    try:
        own = os.sched_getaffinity(0)
        started = np.array([thread_count(environ, len(own))])
        cores = np.zeros(_MOST_CORES, np.bool_)
        cores[list(own)] = True
        packed = np.packbits(cores)
        first = node.Get_rank() == 0
        node.Reduce(MPI.IN_PLACE if first else started, started if first else None, MPI.SUM)
        node.Reduce(MPI.IN_PLACE if first else packed, packed if first else None, MPI.BOR)
        ranks = node.Get_size()
    finally:
        node.Free()
    return _warning(ranks, int(started[0]), int(np.unpackbits(packed).sum())) if first else None


def thread_count(environ: Mapping[str, str], cores: int) -> int:
    """Return how many threads the numerical libraries of a process start.

    Args:
        environ: its environment; the variables that are set decide, the greatest of them.
        cores: that it may run on, as many as there are threads if no variable is set.
    """
    # OpenMP takes a list, for regions inside regions.
    told = [environ.get(name, "").partition(",")[0].strip() for name in _VARIABLES]
    numbers = [int(text) for text in told if re.fullmatch("[0-9]{1,9}", text)]
    return max((number for number in numbers if number > 0), default=cores)


def _warning(ranks: int, started: int, cores: int) -> str | None:
    # One rank is no crowd. One thread for each: nothing but fewer ranks would help, and they were
    # asked for.
    if ranks == 1 or started <= max(cores, ranks):
        return None
    each = max(1, cores // ranks)
    return (
        f"init: the numerical libraries of {ranks} ranks on this node start {started} threads for "
        f"{cores} cores, expected at most one for each core, since they slow each other down. "
        f"Set OMP_NUM_THREADS={each} before the start, or bind ranks to cores of their own"
    )
