"""Does a job grow back when a rank has died? A trial of Open MPI, for anyone to repeat.

    mpirun --with-ft ulfm -np 4 python benchmarks/growing_back.py
    mpirun --with-ft ulfm -np 4 python benchmarks/growing_back.py --kill-the-new
    mpirun --with-ft ulfm -np 4 python benchmarks/growing_back.py --spawn missing
    mpirun --with-ft ulfm -np 4 python benchmarks/growing_back.py --spawn failing

Four ranks add up steps; rank 1 is killed. Those that live shrink, spawn a process in its place, and
merge with it; rank 0 hands on what was committed, and all train to the end as a communicator of
four. With `--kill-the-new` the new process is killed, too, and the others go on as three. With
`--spawn` there is no new process: there is no such program, or it fails before it starts MPI. The
others give up after 5 s, and go on as three.

Every rank says how it has ended; one that hangs is ended after 20 s. docs/reliability.md has what
was seen, and why `run_elastic` does not do this: its spare ranks (`max_ranks`) are there from the
start. Whether processes of a second mpirun can join is tried by `joining_later.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

import numpy as np
from mpi4py import MPI

import collectives as cc

STEPS, DEATH, SECOND_DEATH = 60, 20, 40
SPAWN_WITHIN = 5  # seconds

COMMANDS: dict[str, tuple[str, list[str]]] = {
    "this": (sys.executable, sys.argv),
    "missing": ("/no/such/program", []),
    "failing": (sys.executable, ["-c", "raise SystemExit(3)"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill-the-new", action="store_true", help="a second death")
    parser.add_argument("--spawn", choices=COMMANDS, default="this", help="what is to be spawned")
    options = parser.parse_args()
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
        comm, total, step = joined(grown(options.spawn), total, step)
    while step < STEPS:
        if options.kill_the_new and is_new and step == SECOND_DEATH:
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


def grown(command: str) -> MPI.Intracomm:
    """Spawn a process in the place of the dead one, by all that live; without it if that fails."""
    part = MPI.COMM_WORLD.Shrink()
    among = part.Dup()  # of a spawn that does not return
    spawned: list[MPI.Intercomm] = []

    def spawn() -> None:
        program, arguments = COMMANDS[command]
        try:
            spawned.append(among.Spawn(program, arguments, maxprocs=1))
        except MPI.Exception as error:
            print(f"Spawn: {error}", flush=True)

    thread = threading.Thread(target=spawn, daemon=True)  # a call of MPI has no limit of its own
    thread.start()
    thread.join(SPAWN_WITHIN)
    if thread.is_alive():
        print(f"Spawn: no answer within {SPAWN_WITHIN} s", flush=True)
    if not part.allreduce(len(spawned), op=MPI.MIN):
        return part
    return spawned[0].Merge(high=False)


def joined(whole: MPI.Intracomm, total: float, step: int) -> tuple[cc.Communicator, float, int]:
    """Make a communicator of ours; rank 0 hands on what it has."""
    comm = cc.from_mpi(whole)
    total, step = comm.broadcast(np.array([total, step])).tolist()
    return comm, total, int(step)


if __name__ == "__main__":
    main()
