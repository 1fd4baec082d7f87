"""Rows of all ranks, moved: in the node engine, or by messages.

Arrays are flat and contiguous here, and the call has been described. In the engine every rank
publishes its array, and copies the parts of the others' that it wants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from collectives.algorithms import rotation
from collectives.arrays.host import Array, address
from collectives.node.engine import Engine
from collectives.operations.call import Call
from collectives.operations.ready import NodePlan

__all__ = ["JoinPlan", "allgather", "alltoall", "gather", "scatter"]


class JoinPlan:
    """An all-gather in the node engine: ranks tell how many rows they bring, and then move them.

    Args:
        call: that makes it, and has been described.
        array: shape (n, ...).

    Attributes:
        rows: how many each rank has brought in the last call.
    """

    by_messages = False

    def __init__(self, call: Call, engine: Engine, array: Array) -> None:
        self._dtype, self._row = array.dtype, array.shape[1:]
        self._row_bytes = array.itemsize * math.prod(self._row)
        self._own = np.array([len(array)])
        self._everyones = np.empty(engine.size, np.int64)
        each = self._own.nbytes
        table = [(rank, 0, each, each * rank) for rank in range(engine.size)]
        self._addresses = address(self._own), address(self._everyones)
        self._tell = NodePlan(call, engine.plan_publish(each, table, call.digest, each))
        self._move = self._tell  # for rows of all ranks that are not known yet
        self.rows: list[int] = []

    def first(self, call: Call, flat: Array) -> Array:
        """Carry out the call that has made the plan."""
        self._tell.first(call, self._own, self._everyones)
        joined = self._joined()
        self._move.first(call, flat, joined)
        return joined

    def run(self, send: int, _: int, timeout: float | None) -> Array:
        """Make the call once more, whatever the other ranks bring; as `NodePlan.run`."""
        joined = np.empty(0)

        def move() -> None:
            nonlocal joined
            joined = self._joined()
            self._move.meet(send, address(joined), timeout)

        self._tell.run(*self._addresses, timeout, move)
        return joined

    def _joined(self) -> Array:
        """Plan the move of what each rank has said it brings, and make room for all of it."""
        rows = self._everyones.tolist()
        if rows != self.rows:
            bounds = [0, *(self._row_bytes * n for n in itertools.accumulate(rows))]
            table = [
                (rank, 0, stop - start, start)
                for rank, (start, stop) in enumerate(itertools.pairwise(bounds))
                if start < stop
            ]
            own = int(self._own[0]) * self._row_bytes
            self._move = self._tell.like(own, table, max(rows) * self._row_bytes)
            self.rows = rows
        return np.empty((sum(rows), *self._row), self._dtype)


def gather(
    call: Call, own: Array, counts: Sequence[int], root: int, algorithm: str
) -> Array | None:
    """Join the ranks' arrays on the root; the counts have been agreed on."""
    engine = call.engine_for(algorithm)
    if engine is None:
        run = call.algorithm("gather", algorithm, sum(counts) * own.itemsize)
        result: Array | None = run(own, counts, root, call.deadline)
        return result
    joined = np.empty(sum(counts), own.dtype) if call.group.rank == root else None
    wanted = [] if joined is None else _parts(joined, counts)
    longest = max(counts) * own.itemsize
    call.met(engine.publish(own, wanted, call.digest, call.deadline, longest))
    return joined


def allgather(
    call: Call, array: Array, algorithm: str = "auto"
) -> tuple[Array, list[int], JoinPlan | None]:
    """Join the ranks' arrays, shape (n, ...), on all ranks, in a call that has been described.

    Returns:
        The rows of all ranks, how many each has brought, and in the engine the plan for later.
    """
    own = array.reshape(-1)
    if engine := call.engine_for(algorithm):
        plan = JoinPlan(call, engine, array)  # step 5
        joined = plan.first(call, own)  # step 6
        return joined, plan.rows, plan
    rows = call.agree_on_rows(len(array))  # step 6
    width = math.prod(array.shape[1:])
    bounds = [0, *(width * n for n in itertools.accumulate(rows))]
    joined = np.empty((sum(rows), *array.shape[1:]), array.dtype)
    flat = joined.reshape(-1)
    flat[bounds[call.group.rank] : bounds[call.group.rank + 1]] = own
    call.algorithm("allgather", algorithm, joined.nbytes)(flat, bounds, call.deadline)
    return joined, rows, None


def scatter(
    call: Call, send: Array | None, counts: Sequence[int], root: int, out: Array, algorithm: str
) -> None:
    """Give every rank its part of the root's array; the counts are known to all."""
    nbytes = sum(counts) * out.itemsize
    first = sum(counts[: call.group.rank]) * out.itemsize
    if engine := call.engine_for(algorithm):
        wanted = [(root, first, out)]
        call.met(engine.publish(send, wanted, call.digest, call.deadline, nbytes))
    elif call.carries(algorithm, nbytes):
        data = np.zeros(nbytes, np.uint8) if send is None else send.view(np.uint8)
        joined = call.carry(data)
        out.view(np.uint8)[:] = joined[first : first + out.nbytes]
    else:
        call.agree()
        run = call.algorithm("scatter", algorithm, nbytes)
        out[...] = run(send, counts, root, out.dtype, call.deadline)


def alltoall(
    call: Call, send: Array, rows: Sequence[int], width: int, algorithm: str
) -> tuple[Array, int]:
    """Give every rank its rows of this rank's array.

    Args:
        rows: for every rank.
        width: elements of a row, perhaps 0; equal on all ranks.

    Returns:
        This rank's rows of all arrays, flat, and how many they are.
    """
    ranks = call.group.transport
    starts = [0, *itertools.accumulate(rows)]
    # What every rank has for every other: the first row, how many, and how many in all.
    own = np.array([[starts[r], rows[r], starts[-1]] for r in range(ranks.size)], np.int64)
    engine = call.engine_for(algorithm)
    if engine is None:
        call.agree()
        threes = [3] * ranks.size
        flat = rotation.alltoall(ranks, own.reshape(-1), threes, threes, call.deadline)
        received = flat.reshape(-1, 3)[:, 1]
        counts = [n * width for n in rows]
        run = call.algorithm("alltoall", algorithm, send.nbytes)
        result: Array = run(send, counts, (width * received).tolist(), call.deadline)
        return result, int(received.sum())
    facts = np.empty_like(own)
    mine = 3 * own.itemsize * ranks.rank
    table = [(rank, mine, facts[rank]) for rank in range(ranks.size)]
    call.met(engine.publish(own.reshape(-1), table, call.digest, call.deadline, own.nbytes))
    row_bytes = width * send.itemsize
    joined = np.empty(int(facts[:, 1].sum()) * width, send.dtype)
    parts = _parts(joined, (facts[:, 1] * width).tolist())
    wanted = [(rank, int(facts[rank, 0]) * row_bytes, part) for rank, _, part in parts]
    longest = int(facts[:, 2].max()) * row_bytes
    call.met(engine.publish(send, wanted, call.digest, call.deadline, longest))
    return joined, int(facts[:, 1].sum())


def _parts(joined: Array, counts: Sequence[int]) -> list[tuple[int, int, Array]]:
    """Say which rank's bytes go where in the joined array."""
    bounds = itertools.pairwise([0, *itertools.accumulate(counts)])
    return [(rank, 0, joined[start:stop]) for rank, (start, stop) in enumerate(bounds)]
