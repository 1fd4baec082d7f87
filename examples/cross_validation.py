"""Cross-validate networks: folds over ranks, one that is free takes the next.

    mpirun -np 4 python examples/cross_validation.py

Every fold is held out once, while a network learns from all others. Rank 0 has a line of numbers,
one for each fold of each size of network; every rank takes from it. What is found depends neither
on the number of ranks nor on who takes what.
"""

from __future__ import annotations

import time

import numpy as np

import collectives as cc
import strategies
from common.digits import Network, accuracy, batches, load

FOLDS, SIZES, EPOCHS = 5, (4, 16, 64), 12


def main() -> None:
    """Try every size on every fold, and print a table on rank 0."""
    comm = cc.init()
    load("training")
    comm.barrier()
    began = time.perf_counter()
    with strategies.rpc.Service(comm) as service:
        numbers = strategies.queues.shared_range(
            FOLDS * len(SIZES), service=service, shared_name="folds", shuffle=False, capacity=1
        )
        mine = dict(each(numbers))
    everyones = comm.gather_object(mine)
    seconds = time.perf_counter() - began
    if comm.rank == 0:
        found = {number: share for one in everyones for number, share in one.items()}
        for place, hidden in enumerate(SIZES):
            shares = [found[place * FOLDS + fold] for fold in range(FOLDS)]
            mean, deviation = np.mean(shares), np.std(shares)
            print(
                f"{hidden:3} hidden units: accuracy {mean:.4f}, from fold to fold {deviation:.4f}"
            )
        taken = " ".join(str(len(one)) for one in everyones)
        print(f"{len(found)} networks in {seconds:.2f} s, by rank: {taken}")


def each(numbers: strategies.queues.FIFOQueue):
    """Take numbers until there are no more; yield each with what its network has reached."""
    while True:
        try:
            number = int(numbers.dequeue())
        except strategies.errors.OutOfRangeError:
            return
        place, fold = divmod(number, FOLDS)
        yield number, validate(SIZES[place], fold)


def validate(hidden: int, fold: int) -> float:
    """Train without a fold; return the share of its digits that are recognised."""
    pixels, digits = load("training")
    rows = np.arange(len(digits))
    network = Network.random(hidden, seed=fold)
    optimizer = strategies.Momentum(0.1, 0.9)
    kept = rows[rows % FOLDS != fold]
    for epoch in range(EPOCHS):
        for batch in batches(len(kept), 50, seed=epoch):
            chosen = kept[batch]
            _, gradients = network.gradients(pixels[chosen], digits[chosen])
            optimizer.apply_gradients([(gradients[n], w) for n, w in network.weights.items()])
    held_out = rows[rows % FOLDS == fold]
    return accuracy(network.predict(pixels[held_out]), digits[held_out])


if __name__ == "__main__":
    main()
