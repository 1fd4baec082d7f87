"""Python overhead of an algorithm, measured with messages that take no time.

Schedules, slices and scratch cost 5 to 40 us per call. No link includes them, and `tune` does not
measure them; on fast lines they are a third of the time of small arrays. The processor of this
machine is measured, so it should resemble the simulated machines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from collectives.algorithms import hierarchical, selection
from collectives.algorithms.cost_model import RankLayout
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import SUM
from collectives.transport.backoff import CompletedWait
from collectives.transport.transport import Deadline, PendingMessage, Transport

__all__ = ["seconds"]

# The fastest of 30 calls counts, because other programs of the machine only add time.
_CALLS = 30

_OVER = CompletedWait("nothing", (), has_come=True)


class _NullTransport(Transport):
    """Messages of one rank that are complete as soon as they are started."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def _start_send(self, data: Array, dest: int) -> PendingMessage:
        return _OVER

    def _start_receive(self, into: Array, source: int) -> PendingMessage:
        return _OVER

    def wait(self, messages: Sequence[PendingMessage], deadline: Deadline) -> None:
        pass

    def check_peers(self, operation: str, peers: Sequence[int] = ()) -> None:
        pass


def seconds(algorithm: str, layout: RankLayout, leaders: Sequence[int]) -> list[float]:
    """Return the processor seconds of an all-reduce algorithm on each rank.

    Args:
        algorithm: algorithm of an all-reduce, except "native".
        layout: the ranks.
        leaders: lowest rank of every rank's node.
    """
    run = selection.ALGORITHMS["allreduce"][algorithm].run
    # A limit that is never reached, because no message is missing.
    deadline = Deadline("allreduce", 60.0)
    # Small, because the bytes would add to the measured Python.
    data = np.zeros(8 * layout.size, np.float32)
    found = []
    for rank in range(layout.size):
        over: object = _NullTransport(rank, layout.size)
        if algorithm == "hierarchical":
            over = hierarchical.levels(_NullTransport(rank, layout.size), leaders, layout.machine)
        times = []
        for _ in range(_CALLS):
            began = time.perf_counter()
            run(over, data, SUM, deadline)
            times.append(time.perf_counter() - began)
        found.append(min(times))
    return found
