"""What `send`, `recv` and the building blocks of model parallelism cost, in turns with MPI's own.

OPENBLAS_NUM_THREADS=1 mpirun -np 2 python benchmarks/model_parallel.py
"""

import time

import numpy as np
from mpi4py import MPI

import collectives as cc
from strategies import model_parallel

SIZES = [8, 400, 8 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20]
ROUNDS = 3


def seconds(comm, function, count):
    """Median time of a call, over all ranks the slowest."""
    function()
    times = []
    for _ in range(count):
        comm.barrier()
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return float(comm.allreduce(float(np.median(times)), op=cc.MAX))


def in_turns(comm, functions, nbytes):
    """Best time of each function, in microseconds."""
    count = int(np.clip((1 << 26) // (nbytes + 1), 5, 200))
    runs = [[seconds(comm, f, count) for f in functions] for _ in range(ROUNDS)]
    return 1e6 * np.min(runs, axis=0)


def point_to_point(comm):
    """There and back, half of it, beside MPI's blocking operations."""
    world = MPI.COMM_WORLD
    if comm.rank == 0:
        print(f"{'bytes':>10} {'send, recv':>12} {'MPI':>12}   us")
    for nbytes in SIZES:
        x, out = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

        def ours(x=x, out=out):
            if comm.rank == 0:
                comm.send(x, 1)
                comm.recv(1, out=out)
            elif comm.rank == 1:
                comm.recv(0, out=out)
                comm.send(x, 0)

        def mpi(x=x, out=out):
            if comm.rank == 0:
                world.Send(x, 1)
                world.Recv(out, 1)
            elif comm.rank == 1:
                world.Recv(out, 0)
                world.Send(x, 0)

        times = in_turns(comm, [ours, mpi], nbytes) / 2
        if comm.rank == 0:
            print(f"{nbytes:10} {times[0]:12.1f} {times[1]:12.1f}")


def blocks(comm):
    """There and back through a block, beside the two operations that it is made of."""
    if comm.rank == 0:
        print(f"{'bytes':>10} {'all-gather and back':>22} {'the operations':>16}   us")
    for nbytes in SIZES[1:-1]:
        x = np.zeros(nbytes // 8 // comm.size)

        def block(x=x):
            y, backward = model_parallel.allgather(x, comm=comm)
            backward(y)

        def operations(x=x):
            comm.reduce_scatter(comm.allgather(x), op=cc.SUM)

        times = in_turns(comm, [block, operations], nbytes)
        if comm.rank == 0:
            print(f"{nbytes:10} {times[0]:22.1f} {times[1]:16.1f}")


def main():
    comm = cc.init()
    if comm.size == 1:
        raise SystemExit("this measures messages: run it with mpirun -np 2")
    point_to_point(comm)
    blocks(comm)


if __name__ == "__main__":
    main()
