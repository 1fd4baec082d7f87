"""Does a job grow back when a rank has died? A trial of Open MPI, for anyone to repeat.

    mpirun --with-ft ulfm -np 4 python benchmarks/growing_back.py
    mpirun --with-ft ulfm -np 4 python benchmarks/growing_back.py --kill-the-new

Four ranks add up steps; rank 1 is killed. Those that live shrink, spawn a process in its place, and
merge with it; rank 0 hands on what was committed, and all train to the end as a communicator of
four. With `--kill-the-new` the new process is killed, too, and the others go on as three.

Every rank says how it has ended; one that hangs is ended after 20 s. docs/reliability.md has what
was seen, and why `run_elastic` does not do this.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import numpy as np
from mpi4py import MPI

import collectives as cc

STEPS, DEATH, SECOND_DEATH = 60, 20, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill-the-new", action="store_true", help="a second death")
    kill_the_new = parser.parse_args().kill_the_new
    signal.alarm(20)
    parent = MPI.Comm.Get_parent()
    is_new = parent != MPI.COMM_NULL
    if is_new:
        comm, total, step = joined(parent.Merge(high=True), 0.0, 0)
    else:
        world = cc.init()
        if not cc.is_fault_tolerant():
            raise SystemExit("growing_back: expected mpirun --with-ft ulfm of Open MPI >= 5")
        total, step = until_a_death(world)
        comm, total, step = joined(grown(), total, step)
    while step < STEPS:
        if kill_the_new and is_new and step == SECOND_DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            total, step = total + float(comm.allreduce(1.0, op=cc.SUM)), step + 1
        except cc.PeerFailure:
            comm = comm.shrink()
    print(f"{'new' if is_new else 'old'} rank: {comm.size} ranks, total {total:g}", flush=True)


def until_a_death(world: cc.Communicator) -> tuple[float, int]:
    """Make steps until rank 1 dies; returns the sum and the number of steps, equal on all."""
    total, step = 0.0, 0
    while True:
        if world.rank == 1 and step == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            total, step = total + float(world.allreduce(1.0, op=cc.SUM)), step + 1
        except cc.PeerFailure:
            cc.shrink()
            return total, step


def grown() -> MPI.Intracomm:
    """Spawn a process in the place of the dead one, by all that live."""
    part = MPI.COMM_WORLD.Shrink()
    return part.Spawn(sys.executable, sys.argv, maxprocs=1).Merge(high=False)


def joined(whole: MPI.Intracomm, total: float, step: int) -> tuple[cc.Communicator, float, int]:
    """Make a communicator of ours; rank 0 hands on what it has."""
    comm = cc.from_mpi(whole)
    total, step = comm.broadcast(np.array([total, step])).tolist()
    return comm, total, int(step)


if __name__ == "__main__":
    main()
