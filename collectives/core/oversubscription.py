"""Warning for nodes whose ranks run more threads than there are cores.

The libraries of NumPy and PyTorch start a thread for each core that they see, in every rank. On a
node of C cores, R ranks without core binding have R C threads, which wait for each other.
`examples/pipelined_rnn.py` then took over 100 s, and 13 s with one thread per rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

__all__ = ["warning_for", "thread_count"]

# Read by OpenBLAS (NumPy from pip), MKL (NumPy from conda, PyTorch) and OpenMP (PyTorch). OpenBLAS
# and MKL also read OpenMP's variable if their own is not set.
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Most cores that Linux supports.
_MOST_CORES = 8192


def warning_for(world: MPI.Comm, environ: Mapping[str, str]) -> str | None:
    """Return a warning for this node on one of its ranks; None on other ranks, or without a
    problem.

    *Collective* over `world`.

    Cost: two reductions of at most 1 KiB inside each node.
    """
    # The ranks of one node, which share its cores.
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())
    try:
        # Of this rank: a launcher may bind each rank to some of the cores.
        own = os.sched_getaffinity(0)
        started = np.array([thread_count(environ, len(own))])
        cores = np.zeros(_MOST_CORES, np.bool_)
        cores[list(own)] = True
        # One bit per core, joined by a bitwise OR: bound ranks may have different cores.
        packed = np.packbits(cores)
        first = node.Get_rank() == 0
        # In place on the root, because MPI forbids one buffer as input and output otherwise.
        node.Reduce(MPI.IN_PLACE if first else started, started if first else None, MPI.SUM)
        node.Reduce(MPI.IN_PLACE if first else packed, packed if first else None, MPI.BOR)
        ranks = node.Get_size()
    finally:
        node.Free()
    return _warning(ranks, int(started[0]), int(np.unpackbits(packed).sum())) if first else None


def thread_count(environ: Mapping[str, str], cores: int) -> int:
    """Return the number of threads that the numerical libraries of a process start.

    Args:
        environ: the environment of the process; the largest number of its variables counts.
        cores: cores of the process, the number of threads if no variable is set.
    """
    # OpenMP takes a list, one number per level of nested regions.
    told = [environ.get(name, "").partition(",")[0].strip() for name in _VARIABLES]
    numbers = [int(text) for text in told if re.fullmatch("[0-9]{1,9}", text)]
    # The largest, because each library takes its own variable.
    return max((number for number in numbers if number > 0), default=cores)


def _warning(ranks: int, started: int, cores: int) -> str | None:
    # With one thread per rank only fewer ranks would help, and you asked for these.
    # Threads up to the number of cores do not disturb each other.
    if ranks == 1 or started <= max(cores, ranks):
        return None
    each = max(1, cores // ranks)
    return (
        f"init: the numerical libraries of {ranks} ranks on this node start {started} threads for "
        f"{cores} cores, expected at most one for each core, since they slow each other down. "
        f"Set OMP_NUM_THREADS={each} before the start, or bind ranks to cores of their own"
    )
