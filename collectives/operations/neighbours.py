"""Averages over neighbours: each rank combines the arrays of a few ranks instead of all.

Comments name the steps of `docs/how-a-call-goes.md`. Among ranks that share memory each rank
publishes its array in slices, and reads those of its neighbours. Otherwise ranks send their slices
to their neighbours, and to no other rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from collectives.algorithms import ring
from collectives.arrays import host_arrays, reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MEAN
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group
from collectives.core import mixing
from collectives.core.mixing import Graph, Row

__all__ = ["Neighbours", "neighbours"]

# Bytes of each rank's array that are published at a time, as in `collectives.operations.scan`.
_SLICE_BYTES = 1 << 18


def neighbours(group: Group, graph: Graph, *, timeout: float | None = None) -> Neighbours:
    """Define which ranks average with each other, for gossip among a few ranks.

    *Collective*: all ranks, with the same graph.

    Args:
        graph: "ring": each rank and the two ranks beside it. "exponential": one other rank in each
            average, at a distance of 1, 2, 4 and so on in turn. A mapping from each rank to its
            neighbours, in both directions. Or the weights: shape (P, P), row r of rank r, >= 0,
            whose rows and columns add up to 1. `collectives.core.mixing` has the weights.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        an object whose `average` combines the arrays of neighbours.

    Raises:
        ValueError: the graph is unknown, not symmetric or not connected, or the weights do not add
            up; on all ranks with the same graph.
        MismatchError: ranks differ in the graph; on all ranks.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> ring = comm.neighbours("ring")
        >>> x = float(comm.rank)
        >>> for _ in range(50):
        ...     x = ring.average(x).item()
        >>> abs(x - (comm.size - 1) / 2) < 1e-3         # near the mean over all ranks
        True
    """
    with begin_call(group, "neighbours", timeout) as call:
        if not isinstance(graph, str | Mapping):
            graph = np.asarray(graph, float).tolist()
        rounds = mixing.matrices(graph, group.size)
        digest = hashlib.sha256(repr(rounds).encode()).hexdigest()[:16]
        name = f"{graph} {digest}" if isinstance(graph, str) else digest
        call.describe(graph=name)
        call.agree()
    return Neighbours(group, name, rounds)


class Neighbours:
    """Averages with the neighbours of each rank; made by `Communicator.neighbours`.

    Args:
        group: the ranks.
        name: name of the graph in comparisons.
        rounds: the mixing matrices, which averages take in turn.

    Attributes:
        step: number of averages so far; set it to continue a sequence.
    """

    def __init__(self, group: Group, name: str, rounds: list[list[Row]]) -> None:
        self._group, self._name, self._rounds = group, name, rounds
        self.step = 0

    @property
    def weights(self) -> Row:
        """Rank -> weight of its array in the next average of this rank."""
        return dict(self._matrix()[self._group.rank])

    def average(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
        """Return the weighted mean of the arrays of this rank and its neighbours.

        *Collective*: all ranks, as `allreduce`. As if each rank gathered the arrays and multiplied
        them by its row of the mixing matrix.

        Args:
            x: shape (...), float or complex, as for `allreduce`; the same shape on all ranks.
            out: as for `allreduce`; may be `x`.
            timeout: seconds; None uses UNISONO_TIMEOUT.

        Returns:
            `out`, or a new array of the kind, shape and dtype of `x`. It differs between ranks.

        Raises:
            TypeError: the dtype is neither float nor complex.
            MismatchError: ranks differ in graph, step, dtype or shape; on all ranks.
            CollectiveTimeout, PeerFailure: as `allreduce`.

        Cost: the comparison, and S bytes sent to each neighbour; scratch S, and 256 KiB to 1 MiB
            for each neighbour.
        Order: rank order; reproducible. 16-bit floats are added in float32 and rounded once.
        """
        operation, group = "neighbours.average", self._group
        with begin_call(group, operation, timeout) as call:  # step 2
            loan = host_arrays.host_view(x, out, operation=operation)  # step 3
            array = loan.host
            reduction.check(MEAN, array.dtype, operation=operation)
            call.describe(  # step 4
                graph=self._name, step=self.step, dtype=array.dtype, shape=array.shape
            )
            total = _average(call, host_arrays.flat(array), self._matrix())  # step 6
            result = np.empty_like(array) if loan.target is None else loan.target
        self.step += 1
        return loan.restore(host_arrays.copy_to(total, result))

    def _matrix(self) -> list[Row]:
        return self._rounds[self.step % len(self._rounds)]


def _average(call: Call, own: Array, matrix: list[Row]) -> Array:
    """Return the weighted mean of flat arrays in the dtype of sums."""
    rank, engine = call.group.rank, call.engine
    weights = matrix[rank]
    sources = [source for source in weights if source != rank]
    dests = [dest for dest, row in enumerate(matrix) if dest != rank and rank in row]
    step = _SLICE_BYTES // own.itemsize if engine else max(1, ring.SLICE_BYTES // own.itemsize)
    total = np.empty(own.size, reduction.work_dtype(own.dtype))
    arrays = {source: np.empty(min(step, own.size), own.dtype) for source in sources}
    if engine is None:
        call.agree()
    for at in range(0, max(own.size, 1), step):  # at least once, because it compares the calls
        part = own[at : at + step]
        landed = {source: array[: part.size] for source, array in arrays.items()}
        if engine is not None:
            wanted = [(source, 0, array) for source, array in landed.items()]
            call.checked(engine.publish(part, wanted, call.digest, call.deadline, part.nbytes))
        elif part.size:
            ranks = call.group.transport
            # Receives first, so that data lands without a copy.
            messages = [ranks.start_receive(array, source) for source, array in landed.items()]
            messages += [ranks.start_send(part, dest) for dest in dests]
            ranks.wait(messages, call.deadline)
        with reduction.ignore_float_errors():
            _mix(total[at : at + step], {**landed, rank: part}, weights)
    return total


def _mix(total: Array, arrays: Mapping[int, Array], weights: Row) -> None:
    total[...] = 0
    for source, weight in weights.items():
        # Widened first, because a product of 16-bit floats would be rounded.
        total += arrays[source].astype(total.dtype, copy=False) * total.dtype.type(weight)
