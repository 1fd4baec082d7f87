"""A queue between two ranks: items per second, bytes per second, latency, and cost of waiting.

    mpirun -np 2 python benchmarks/shared_queues.py [--json FILE]

Rank 0 has the queue. Ratios are to a plain MPI send of the same arrays, in the same run; medians of
several rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import collectives as cc
import strategies

ROUNDS = 5
BATCH = 64
BUFFERS = 4  # that a plain receive takes turns with, so that arrays are not in the cache
IDLE_SECONDS = 5.0


def main() -> None:
    """Measure, and print one line per figure on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    comm = cc.init()
    if comm.size != 2:
        sys.exit(f"shared_queues: expected 2 ranks, got {comm.size}")
    figures: dict[str, float] = {}
    with strategies.rpc.Service(comm) as service:
        figures["many small items, items/s"] = small_items(comm, service)
        figures["enqueue and dequeue, us each"] = latency(comm, service)
        for mebibytes in (1, 8, 64):
            ours, plain = large_arrays(comm, service, mebibytes)
            name = f"{mebibytes} MiB arrays"
            figures[f"{name}, GB/s"] = ours
            figures[f"{name}, share of a plain MPI send"] = ours / plain
        figures["idle, % of a core per rank"] = idle(comm)
        figures["idle with a dequeue that waits, % of a core"] = idle_waiting(comm, service)
    if comm.rank == 0:
        for name, value in figures.items():
            print(f"{name:50} {value:12.3g}")
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=1))


def rounds(comm: cc.Communicator, once: Callable[[int], None]) -> float:
    """Return the median time of a round in seconds; the first one only warms up."""
    times = []
    for number in range(ROUNDS + 1):
        comm.barrier()
        began = time.perf_counter()
        once(number)
        comm.barrier()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def small_items(comm, service) -> float:
    """Rank 1 enqueues items of 16 floats, 64 at a time; rank 0 dequeues them, 64 at a time."""
    queue = strategies.queues.shared_queue(
        strategies.queues.FIFOQueue, 1024, "float32", [(16,)], service=service, shared_name="small"
    )
    items = np.ones((BATCH, 16), np.float32)
    batches = 500

    def once(_: int) -> None:
        for _ in range(batches):
            queue.enqueue_many(items) if comm.rank else queue.dequeue_many(BATCH)

    return batches * BATCH / rounds(comm, once)


def latency(comm, service) -> float:
    """Rank 1 enqueues and dequeues one item on rank 0, again and again."""
    queue = strategies.queues.shared_queue(
        strategies.queues.FIFOQueue, 8, "float32", [()], service=service, shared_name="single"
    )
    times = 500

    def once(_: int) -> None:
        for _ in range(times if comm.rank else 0):
            queue.enqueue(1.0)
            queue.dequeue()

    return rounds(comm, once) / times / 2 * 1e6


def large_arrays(comm, service, mebibytes: int) -> tuple[float, float]:
    """Rank 1 enqueues arrays that rank 0 dequeues; GB/s through the queue, and by MPI alone."""
    from mpi4py import MPI

    length = mebibytes << 18
    queue = strategies.queues.shared_queue(
        strategies.queues.FIFOQueue, 4, "float32", service=service, shared_name=f"large_{mebibytes}"
    )
    array = np.ones(length, np.float32)
    into = [np.ones(length, np.float32) for _ in range(BUFFERS)]
    count = max(4, 128 // mebibytes)

    def through_queue(_: int) -> None:
        for _ in range(count):
            queue.enqueue((array,)) if comm.rank else queue.dequeue()

    def plain(_: int) -> None:
        for number in range(count):
            if comm.rank:
                MPI.COMM_WORLD.Send(array, 0)
            else:
                MPI.COMM_WORLD.Recv(into[number % BUFFERS], 1)

    size = count * array.nbytes / 1e9
    return size / rounds(comm, through_queue), size / rounds(comm, plain)


def idle(comm) -> float:
    """Cost of an unused service."""
    comm.barrier()
    began = time.process_time()
    time.sleep(IDLE_SECONDS)
    return (time.process_time() - began) / IDLE_SECONDS * 100


def idle_waiting(comm, service) -> float:
    """The same while rank 1 waits for an item, mostly."""
    queue = strategies.queues.shared_queue(
        strategies.queues.FIFOQueue, 8, "float32", [()], service=service, shared_name="waiting"
    )
    comm.barrier()
    began = time.process_time()
    if comm.rank:
        queue.dequeue()
    else:
        time.sleep(IDLE_SECONDS)
        queue.enqueue(1.0)
    share = (time.process_time() - began) / IDLE_SECONDS * 100
    return float(comm.allreduce(share, op=cc.MAX))


if __name__ == "__main__":
    main()
