"""Runs a program that asks the variables of torchrun for its rank.

    mpirun -np 4 python -m strategies.torch train.py ARGUMENTS
    mpirun -np 4 python -m strategies.torch -m package.train ARGUMENTS

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK say what MPI does. MASTER_ADDR and
MASTER_PORT need not be set.
"""

from __future__ import annotations

import os
import sys

import collectives as cc
from strategies import programs


def tell() -> None:
    """Set the variables by which torchrun tells a process its rank."""
    comm = cc.init()
    os.environ |= {
        "RANK": str(comm.rank),
        "WORLD_SIZE": str(comm.size),
        "LOCAL_RANK": str(comm.local_rank),
        "LOCAL_WORLD_SIZE": str(comm.local_size),
        "GROUP_RANK": str(comm.node_rank),
    }


if __name__ == "__main__":
    sys.exit(programs.run(sys.argv[1:], __doc__, tell))
