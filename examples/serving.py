"""Serve single queries by whichever replica is free.

    mpirun -np 3 python examples/serving.py

Rank 0 has a line of queries and a line of answers; each other rank is a replica of one network, and
takes the next query when it is free. Rank 0 asks for each number of replicas from 1 on, and says
how many queries per second were answered, and how long one waits. A replica also waits for
something besides its processor, as for a device: `--wait` ms each, which are slept here.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import collectives as cc
import strategies
from common.digits import Network, load

QUERIES = 2  # for each replica: one that it computes, one on its way


def main() -> None:
    """Ask, or answer."""
    options = parse_arguments()
    comm = cc.init()
    if comm.size == 1:
        raise SystemExit("serving: rank 0 asks, expected a replica besides")
    network = Network.random(64, seed=1)
    network.train(0.1, 0.9, 10, seed=1)  # the same on all ranks
    with strategies.rpc.Service(comm) as service:
        for replicas in range(1, comm.size):
            lines = [line(service, f"{what} of {replicas}") for what in ("queries", "answers")]
            comm.barrier()
            if comm.rank == 0:
                ask(*lines, replicas, options.queries)
            elif comm.rank <= replicas:
                answer(network, *lines, options.wait / 1000)
            comm.barrier()


def line(service: strategies.rpc.Service, name: str) -> strategies.queues.FIFOQueue:
    """Make or find a line of numbered arrays on rank 0."""
    return strategies.queues.shared_queue(
        strategies.queues.FIFOQueue, 64, ["int64", "float64"], None,
        service=service, shared_name=name,
    )  # fmt: skip


def answer(network: Network, queries, answers, wait: float) -> None:
    """Answer one query after the other until there are no more."""
    while True:
        try:
            number, pixels = queries.dequeue()
        except strategies.errors.OutOfRangeError:  # closed, and nothing left
            return
        time.sleep(wait)
        answers.enqueue((number, network.predict(pixels[None])[0]))


def ask(queries, answers, replicas: int, count: int) -> None:
    """Put single queries, as many as replicas can have at a time, and take what is answered."""
    pixels, digits = load("held out")
    under_way = min(QUERIES * replicas, count)
    began, took, hits = [], [], 0
    for number in range(count + under_way):
        if number >= under_way:
            answered, probabilities = answers.dequeue(timeout=60)
            took.append(time.perf_counter() - began[answered])
            hits += probabilities.argmax() == digits[answered % len(digits)]
        if number < count:
            began.append(time.perf_counter())
            queries.enqueue((number, pixels[number % len(digits)]))
    seconds = time.perf_counter() - began[0]
    queries.close()
    print(
        f"replicas: {replicas}, {count / seconds:.0f} queries per second, "
        f"each {1000 * np.median(took):.1f} ms, accuracy {hits / count:.4f}",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=297, help="for each number of replicas")
    parser.add_argument("--wait", type=float, default=5.0, help="ms for each query")
    return parser.parse_args()


if __name__ == "__main__":
    main()
