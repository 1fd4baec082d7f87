"""`python -m strategies.torch`: runs a program with torchrun's variables set.

    mpirun -np 4 python -m strategies.torch train.py ARGUMENTS
    mpirun -np 4 python -m strategies.torch -m package.train ARGUMENTS
    mpirun -np 4 python -m strategies.torch --replace gloo train.py ARGUMENTS

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK are MPI's numbers. MASTER_ADDR is an
address of rank 0's machine, and MASTER_PORT a port that is reserved there for the job.
With `--replace gloo` the process groups of a program that asks for Gloo are this library's.
"""

from __future__ import annotations

import os
import socket
import sys

import collectives as cc
import unisono_torch
from strategies.core import run_program
from strategies.torch.rendezvous import addresses

# Bound but not listening until the process exits. This reserves the port, because the kernel gives
# it to no other program, and lets the program's own store listen on it.
_port = socket.socket()
# Without it the program's store could not bind the same port as well.
_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def tell() -> None:
    """Set the variables that torchrun sets; *collective*."""
    comm = cc.init()
    place = ("", "")
    if comm.rank == 0:
        # Port 0: the kernel chooses a free one, which rank 0 broadcasts below.
        _port.bind(("", 0))
        hosts = addresses() if comm.num_nodes > 1 else []
        # On one node the loopback address suffices, and works without a network.
        place = ([*hosts, "127.0.0.1"][0], str(_port.getsockname()[1]))
    address, port = comm.broadcast_object(place)
    # Before the program: `init_process_group("env://")` must accept numbers of MPI.
    unisono_torch.trust_mpi()
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "RANK": str(comm.rank),
        "WORLD_SIZE": str(comm.size),
        "LOCAL_RANK": str(comm.local_rank),
        "LOCAL_WORLD_SIZE": str(comm.local_size),
        "GROUP_RANK": str(comm.node_rank),
    }


def main(command: list[str]) -> int:
    """Run a command line after `python -m strategies.torch`, and return the exit status."""
    if command[:1] == ["--replace"]:
        os.environ["UNISONO_TORCH_REPLACE"], command = "".join(command[1:2]), command[2:]
        unisono_torch.register()
    return run_program.run(command, __doc__, tell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
