"""A variable on another task: pull and push, sparse push, many small ones, and what idling costs.

    mpirun -np 2 python benchmarks/servers.py [--megabytes 100] [--json FILE]

Rank 0 has the variables. Ratios are to plain MPI messages of the same arrays, in turns with them in
the same run; medians of several rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import collectives as cc
import strategies

ROUNDS = 5
REPEATS = 3  # of a call in one turn
SHORT = 20  # short calls in a row
ROW = 1000  # elements of a row of the variable
IDLE_SECONDS = 3.0


def main() -> None:
    """Measure, and print one line per figure on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100, help="size of the large variable")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    comm = cc.init()
    if comm.size != 2:
        sys.exit(f"servers: expected 2 ranks, got {comm.size}")
    with strategies.rpc.Service(comm) as service:
        figures = large(comm, service, options.megabytes * 250)
        figures |= small(comm, service)
        figures["idle, % of a core per rank"] = idle(comm)
    if comm.rank == 0:
        for name, value in figures.items():
            print(f"{name:55} {value:10.3g}")
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=1))


over = threading.Event()  # whether rank 1 has done what it measures


def in_turns(comm, service, **calls: Callable[[], None]) -> dict[str, float]:
    """Return the median time of each call on rank 1 in seconds; the first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            comm.barrier()
            for _ in range(REPEATS):
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
            if comm.rank:
                strategies.rpc.Task(service, 0).run("__main__:over.set")
            else:
                over.wait(60)  # as a ps does, which only serves
                over.clear()
    medians = [statistics.median(found[REPEATS:]) for found in times.values()]
    return dict(zip(times, comm.broadcast_object(medians, root=1), strict=True))


def large(comm, service, rows: int) -> dict[str, float]:
    """Rank 1 pulls a large variable and pushes gradients for all rows, or for 1 % of them."""
    from mpi4py import MPI

    start = np.zeros((rows, ROW), np.float32) if comm.rank == 0 else None
    variable = strategies.variables.shared_variable(
        start, service=service, shared_name="large", optimizer=strategies.SGD(0.1)
    )
    gradient = np.ones((rows, ROW), np.float32)
    into = np.ones((rows, ROW), np.float32)
    chosen = np.sort(np.random.default_rng(0).choice(rows, max(rows // 100, 1), replace=False))
    sparse = strategies.Rows(chosen, np.ones((len(chosen), ROW), np.float32))

    def only_rank_1(call: Callable[[], object]) -> Callable[[], None]:
        return lambda: call() if comm.rank else None

    def plain() -> None:
        if comm.rank:
            MPI.COMM_WORLD.Recv(into, 0)
            MPI.COMM_WORLD.Send(gradient, 0)
        else:
            MPI.COMM_WORLD.Send(gradient, 1)
            MPI.COMM_WORLD.Recv(into, 1)

    def both(compression: cc.Compression) -> None:
        variable.read(compression=compression)
        variable.apply_gradients(gradient, compression=compression)

    times = in_turns(
        comm,
        service,
        plain=plain,
        both=only_rank_1(lambda: both(cc.NONE)),
        packed=only_rank_1(lambda: both(cc.BF16)),
        dense=only_rank_1(lambda: variable.apply_gradients(gradient)),
        sparse=only_rank_1(lambda: [variable.apply_gradients(sparse) for _ in range(SHORT)]),
        gather=only_rank_1(lambda: [variable.gather(chosen) for _ in range(SHORT)]),
    )
    size = gradient.nbytes // 1_000_000
    return {
        f"pull and push {size} MB, ms": times["both"] * 1e3,
        "two plain MPI sends, ms": times["plain"] * 1e3,
        "pull and push, share of two plain sends' rate": times["plain"] / times["both"],
        "pull and push as bfloat16, ms": times["packed"] * 1e3,
        "push all rows, ms": times["dense"] * 1e3,
        "push 1 % of the rows, share of that time": times["sparse"] / SHORT / times["dense"],
        "gather 1 % of the rows, ms": times["gather"] / SHORT * 1e3,
    }


def small(comm, service) -> dict[str, float]:
    """Rank 1 reads and updates 1,000 variables of 16 floats, together and one by one."""
    variables = [
        strategies.variables.shared_variable(
            np.zeros(16, np.float32) if comm.rank == 0 else None,
            service=service,
            shared_name=f"small_{number}",
            optimizer=strategies.SGD(0.1),
        )
        for number in range(1000)
    ]
    pairs = [(np.ones(16, np.float32), variable) for variable in variables]

    def one_by_one() -> None:
        for variable in variables[:100] if comm.rank else []:
            variable.read()

    times = in_turns(
        comm,
        service,
        together=lambda: strategies.variables.read_all(variables) if comm.rank else None,
        push=lambda: strategies.variables.apply_all(pairs) if comm.rank else None,
        single=one_by_one,
    )
    return {
        "read 1,000 small variables together, ms": times["together"] * 1e3,
        "update 1,000 small variables together, ms": times["push"] * 1e3,
        "read one small variable, ms": times["single"] / 100 * 1e3,
    }


def idle(comm) -> float:
    """Cost of an unused service."""
    comm.barrier()
    began = time.process_time()
    time.sleep(IDLE_SECONDS)
    share = (time.process_time() - began) / IDLE_SECONDS * 100
    return float(comm.allreduce(share, op=cc.MAX))


if __name__ == "__main__":
    main()
