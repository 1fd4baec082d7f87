"""Train by one program or one per replica, in step or not: all four ways side by side.

    mpirun -np 3 python examples/four_ways.py

Rank 0 holds the variables, each other rank is a replica. With *one program* rank 0 alone has a
training loop, and calls a function on the replicas; with *one per replica* each has a loop of its
own. *In step* an update is the mean of a gradient of each replica; else every gradient is one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np

import collectives as cc
import strategies
from common.digits import Network, accuracy, batches, load

EPOCHS, BATCH, HIDDEN, RATE = 12, 50, 32, 0.3
Arrays = dict[str, np.ndarray]


def main() -> None:
    """Train in each of the four ways, and print the results."""
    comm = cc.init()
    if comm.size == 1:
        raise SystemExit("four ways: rank 0 holds the variables, expected a replica besides")
    pixels, digits = load("held out")
    for programs, train in (("one program", one_program), ("one per replica", one_per_replica)):
        for in_step in (True, False):
            began = time.perf_counter()
            found = comm.allgather_object(train(comm, in_step))
            seconds = time.perf_counter() - began
            if comm.rank == 0:
                weights, updates = next(one for one in found if one is not None)
                share = accuracy(Network(weights).predict(pixels), digits)
                how = f"{programs}, {'synchronous' if in_step else 'asynchronous'}"
                print(f"{how:>29}: {updates:3} updates, {seconds:.2f} s, accuracy {share:.4f}")


def one_program(comm: cc.Communicator, in_step: bool) -> tuple[Arrays, int] | None:
    """Train from rank 0; the other ranks serve until it is done."""
    with strategies.rpc.Service(comm) as service:
        if comm.rank != 0:
            return None
        replicas = [strategies.rpc.Task(service, rank) for rank in range(1, comm.size)]
        weights = Network.random(HIDDEN, seed=1).weights
        optimizer, number = strategies.SGD(RATE), 0
        updates = (means if in_step else singles)(replicas, weights, every_batch())
        for gradients in updates:
            number += 1
            optimizer.apply_gradients([(gradients[name], w) for name, w in weights.items()])
        return weights, number


def means(replicas: list, weights: Arrays, work: Iterator[np.ndarray]) -> Iterator[Arrays]:
    """Yield the mean over all replicas, each with a batch of the next ones."""
    for group in zip(*[work] * len(replicas), strict=False):
        pairs = zip(replicas, group, strict=True)
        calls = [replica.submit(gradients_of, weights, rows) for replica, rows in pairs]
        found = [call.result() for call in calls]
        yield {name: np.mean([gradients[name] for gradients in found], axis=0) for name in weights}


def singles(replicas: list, weights: Arrays, work: Iterator[np.ndarray]) -> Iterator[Arrays]:
    """Yield the gradients of whichever replica is done, and give it the next batch then."""
    free, busy = list(replicas), {}
    while True:
        while free and (rows := next(work, None)) is not None:
            values = {name: w.copy() for name, w in weights.items()}  # others change meanwhile
            replica = free.pop()
            busy[replica.submit(gradients_of, values, rows)] = replica
        if not busy:
            return
        for call in wait(busy, return_when=FIRST_COMPLETED).done:
            free.append(busy.pop(call))
            yield call.result()


def one_per_replica(comm: cc.Communicator, in_step: bool) -> tuple[Arrays, int] | None:
    """Train on every rank but the first, which holds the variables."""
    spec = strategies.cluster.ClusterSpec.from_ranks(comm.size, ps=1)
    with strategies.Cluster(spec, comm) as cluster, strategies.Server(cluster) as server:
        optimizer = strategies.SGD(RATE)
        strategy = strategies.ParameterServerStrategy(server, optimizer, synchronous=in_step)
        for name, value in Network.random(HIDDEN, seed=1).weights.items():
            strategy.variable(value, name=name)
        if cluster.job == "ps":
            server.join()
            return None
        workers, variables = cluster.workers, strategy.variables
        for rows in list(every_batch())[workers.rank :: workers.size]:
            gradients = gradients_of({name: v.value for name, v in variables.items()}, rows)
            pairs = [(gradients[name], variable) for name, variable in variables.items()]
            strategy.apply_gradients(optimizer, pairs)
        strategy.leave()
        workers.barrier()  # now the newest values are those of all
        strategy.pull()
        weights = {name: np.array(variable.value) for name, variable in variables.items()}
        return (weights, strategy.reports()[0].version) if workers.rank == 0 else None


def every_batch() -> Iterator[np.ndarray]:
    """Yield the rows of each batch of all epochs."""
    for epoch in range(EPOCHS):
        yield from batches(len(load("training")[1]), BATCH, epoch)


def gradients_of(weights: Arrays, rows: np.ndarray) -> Arrays:
    """Return the gradients of one batch; runs on a replica."""
    pixels, digits = (part[rows] for part in load("training"))
    return Network(weights).gradients(pixels, digits)[1]


if __name__ == "__main__":
    main()
