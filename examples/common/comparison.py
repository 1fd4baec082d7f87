"""Train on all ranks and on one in turns, and print how losses and times compare."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

import collectives as cc


class Trainer(Protocol):
    """A network that is trained by all ranks of a communicator together."""

    def epoch(self, number: int) -> float:
        """Go once through the data; returns this rank's share of the loss."""

    def accuracy(self) -> float:
        """Return the share of held-out digits that are recognised."""


def compare(comm: cc.Communicator, make: Callable[[cc.Communicator], Trainer], epochs: int) -> None:
    """Train `make(comm)`, and on rank 0 also the same alone; rank 0 prints the result."""
    together = make(comm)
    group = comm.group([0])
    alone = None if group is None else make(group)
    losses: list[tuple[float, float]] = []
    seconds: list[tuple[float, float]] = []
    for number in range(epochs):
        comm.barrier()
        began = time.perf_counter()
        loss = float(comm.allreduce(together.epoch(number), op=cc.SUM))
        middle = time.perf_counter()
        comm.barrier()  # others compute nothing while rank 0 does
        if alone is not None:
            began_alone = time.perf_counter()
            losses.append((loss, alone.epoch(number)))
            seconds.append((middle - began, time.perf_counter() - began_alone))
    accuracy = together.accuracy()
    if comm.rank == 0:
        both, one = np.median(seconds, axis=0) * 1000
        print(f"loss: {' '.join(f'{loss:.4f}' for loss, _ in losses)}")
        print(f"accuracy on the held-out digits: {accuracy:.4f}")
        worst = max(abs(a - b) for a, b in losses)
        print(f"largest difference to the losses of one rank: {worst:.1e}")
        ranks = f"{comm.size} {'rank' if comm.size == 1 else 'ranks'}"
        print(f"{both:.0f} ms per epoch on {ranks}, {one:.0f} ms on one", end=": ")
        print(f"{one / both:.2f} times as fast")
