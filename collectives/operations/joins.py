"""Rows of all ranks, moved: in the node engine, or by messages.

Arrays are flat and contiguous here, and the call has been described. In the engine every rank
publishes its array, and copies the parts of the others' that it wants.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import topology
from collectives.arrays import host
from collectives.arrays.host import NEW, Array, Rows, address
from collectives.errors import MismatchError, in_turn, some
from collectives.node.engine import Engine
from collectives.operations import compare
from collectives.operations.call import Call
from collectives.operations.group import Group
from collectives.operations.ready import NodePlan
from collectives.operations.signatures import Splits

__all__ = [
    "JoinPlan",
    "allgather",
    "allgather_known",
    "alltoall",
    "gather",
    "scatter",
    "shares",
    "unfit",
]


class JoinPlan:
    """A gather or an all-gather in the node engine: all move what each has brought the last time.

    As they meet they compare what they know of that. Where a rank knows anything else, or nothing
    yet, all tell how many rows they bring, and how many rows their `out` takes, so that all know of
    one that does not fit; and then they move them.

    Args:
        call: that makes it, and has been described.
        array: shape (n, ...).
        root: who gets the rows; None for all.

    Attributes:
        rows: how many each rank has brought in the last call.
    """

    by_messages = False

    def __init__(self, call: Call, engine: Engine, array: Array, root: int | None = None) -> None:
        self._group, self._operation = call.group, call.operation
        self._takes = root in (None, call.group.rank)
        self._alone = root is not None and self._takes  # nobody else wants what this rank brings
        self._dtype, self._row = array.dtype, array.shape[1:]
        self._row_bytes = array.itemsize * math.prod(self._row)
        self._own = np.array([len(array), NEW.number])
        self._everyones = np.empty((engine.size, 2), np.int64)
        each = self._own.nbytes
        table = [(rank, 0, each, each * rank) for rank in range(engine.size)]
        self._addresses = address(self._own), address(self._everyones)
        self._tell = NodePlan(call, engine.plan_publish(each, table, call.digest, each))
        unknown = compare.digest({"rows": "unknown", "rank": engine.rank})
        self._move = self._tell.like(0, [], 0, detail=unknown)
        self._told: list[list[int]] = []
        self.rows: list[int] = []

    def first(self, call: Call, flat: Array, out: Rows = NEW) -> Array | None:
        """Carry out the call that has made the plan; returns the rows, None where nobody asks."""
        self._move.first(call)  # with ranks that know rows of earlier calls
        self._own[1] = out.number
        self._tell.first(call, self._own, self._everyones)
        self._own[1] = NEW.number  # in later calls
        if error := self._look():
            raise call.known(error)
        if not self._takes:
            self._move.first(call, flat)
            return None
        result, joined = host.room(out.target, self.shape, self._dtype, flat, self.inside)
        self._move.first(call, flat, joined)
        return host.store(joined, result)

    def run(self, send: int, out: int, timeout: float | None) -> Array | None:
        """Make the call once more, whatever the other ranks bring; as `NodePlan.run`.

        Args:
            send: address of this rank's array.
            out: address of the result, of the shape of the last one; 0 for a new array.
            timeout: seconds, None for the setting.

        Returns:
            The new array, if it is one.

        Raises:
            ValueError: the ranks bring another number of rows than `out` takes.
        """
        made: Array | None = None
        error: Exception | None = None

        def room() -> int:
            nonlocal made
            made = None
            if not self._takes or (out and self._is_free(send, out)):
                return out
            made = np.empty(self.shape, self._dtype)
            return address(made)

        def tell_and_move() -> None:
            nonlocal error
            if not self._move.unlike:
                return
            self._own[1] = sum(self.rows) if out else NEW.number
            try:
                self._tell.meet(*self._addresses, timeout)
            finally:
                self._own[1] = NEW.number
            error = self._look()
            if error is None:
                self._move.meet(send, room(), timeout)

        self._move.run(send, room(), timeout, tell_and_move)
        if error is not None:  # which all ranks know
            raise error
        if out and made is not None:
            ctypes.memmove(out, address(made), made.nbytes)
            return None
        return made

    def _is_free(self, send: int, out: int) -> bool:
        """Whether a result may grow where it shall lie while the array is read."""
        own, all_of_it = (self._row_bytes * n for n in (int(self._own[0]), sum(self.rows)))
        return out + self.inside == send or out - send >= own or send - out >= all_of_it

    @property
    def inside(self) -> int:
        """After how many bytes of the last result this rank's array lies in it."""
        return self._row_bytes * sum(self.rows[: self._group.rank])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the last result."""
        return (sum(self.rows), *self._row)

    def _look(self) -> Exception | None:
        """Plan the move of what each rank has said it brings; or say whose `out` does not fit."""
        told = self._everyones.tolist()
        if told == self._told:
            return None
        rows, given = ([pair[i] for pair in told] for i in (0, 1))
        error = unfit(self._group, self._operation, self._row, given, [sum(rows)] * len(rows))
        if error is not None:
            return error
        if rows != self.rows:
            bounds = [0, *(self._row_bytes * n for n in itertools.accumulate(rows))]
            table = [
                (rank, 0, stop - start, start)
                for rank, (start, stop) in enumerate(itertools.pairwise(bounds))
                if start < stop and self._takes
            ]
            own = int(self._own[0]) * self._row_bytes
            kept = (0, own) if self._alone else (0, 0)
            detail, longest = compare.digest({"rows": tuple(rows)}), max(rows) * self._row_bytes
            self._move = self._tell.like(own, table, longest, kept, detail)
            self.rows = rows
        self._told = told
        return None


def gather(
    call: Call, array: Array, root: int, algorithm: str = "auto", out: Rows = NEW
) -> tuple[Array | None, list[int], JoinPlan | None]:
    """Join the ranks' arrays, shape (n, ...), on the root, in a call that has been described.

    Returns:
        The rows of all ranks, None elsewhere; how many each has brought; and in the engine the plan
        for later.
    """
    row, own = array.shape[1:], host.flat(array)
    if engine := call.engine_for(algorithm):
        plan = JoinPlan(call, engine, array, root)  # step 5
        return plan.first(call, own, out), plan.rows, plan  # step 6
    told = call.tell(len(array), out.number)  # step 6
    rows, given = told.T.tolist()
    if error := unfit(call.group, call.operation, row, given, [sum(rows)] * len(rows)):
        raise call.known(error)
    counts, shape = [n * math.prod(row) for n in rows], (sum(rows), *row)
    run = call.algorithm("gather", algorithm, sum(counts) * own.itemsize)
    joined: Array | None = run(own, counts, root, call.deadline)
    if joined is None:
        return None, rows, None
    result = joined.reshape(shape) if out.target is None else host.store(joined, out.target)
    return result, rows, None


def allgather(
    call: Call, array: Array, algorithm: str = "auto", out: Rows = NEW
) -> tuple[Array, list[int], JoinPlan | None]:
    """Join the ranks' arrays, shape (n, ...), on all ranks, in a call that has been described.

    Returns:
        The rows of all ranks, how many each has brought, and in the engine the plan for later.
    """
    own, row = array.reshape(-1), array.shape[1:]
    if engine := call.engine_for(algorithm):
        plan = JoinPlan(call, engine, array)  # step 5
        joined = plan.first(call, own, out)  # step 6
        assert joined is not None
        return joined, plan.rows, plan
    rows, given = call.tell(len(array), out.number).T.tolist()  # step 6
    if error := unfit(call.group, call.operation, row, given, [sum(rows)] * len(rows)):
        raise call.known(error)
    width = math.prod(row)
    bounds = [0, *(width * n for n in itertools.accumulate(rows))]
    first, stop = bounds[call.group.rank : call.group.rank + 2]
    shape, before = (sum(rows), *row), first * array.itemsize
    result, joined = host.room(out.target, shape, array.dtype, own, before)
    joined[first:stop] = own
    call.algorithm("allgather", algorithm, joined.nbytes)(joined, bounds, call.deadline)
    return host.store(joined, result), rows, None


def allgather_known(
    bounds: Sequence[int], algorithm: str, call: Call, send: Array, out: Array
) -> None:
    """Join the ranks' arrays by messages, each of which begins at its bound, as all know."""
    first, stop = bounds[call.group.rank : call.group.rank + 2]
    if call.carries(algorithm, out.nbytes):
        bits = np.zeros(out.nbytes, np.uint8)
        bits[first * out.itemsize : stop * out.itemsize] = host.raw_bytes(send)
        host.raw_bytes(out)[:] = call.carry(bits)
        return
    call.agree()
    out[first:stop] = send
    call.algorithm("allgather", algorithm, out.nbytes)(out, bounds, call.deadline)


def scatter(
    call: Call,
    send: Array | None,
    rows: Sequence[int],
    row: tuple[int, ...],
    dtype: np.dtype[Any],
    root: int,
    algorithm: str = "auto",
    out: Rows = NEW,
) -> Array:
    """Give every rank its part of the root's array; all else is known to all."""
    rank, counts = call.group.rank, [n * math.prod(row) for n in rows]
    nbytes, first = dtype.itemsize * sum(counts), dtype.itemsize * sum(counts[:rank])
    result, own = host.room(out.target, (rows[rank], *row), dtype, send, -first)
    if engine := call.engine_for(algorithm):
        wanted, kept = [(root, first, own)], (first, first + own.nbytes)
        call.met(engine.publish(send, wanted, call.digest, call.deadline, nbytes, kept))
    elif call.carries(algorithm, nbytes):
        data = np.zeros(nbytes, np.uint8) if send is None else send.view(np.uint8)
        joined = call.carry(data)
        own.view(np.uint8)[:] = joined[first : first + own.nbytes]
    else:
        call.agree()
        run = call.algorithm("scatter", algorithm, nbytes)
        own[...] = run(send, counts, root, dtype, call.deadline)
    return host.store(own, result)


def alltoall(
    call: Call, array: Array, rows: Sequence[int], algorithm: str, out: Rows
) -> tuple[Array, list[int]]:
    """Give every rank its rows of this rank's array.

    Args:
        array: shape (n, ...).
        rows: for every rank.

    Returns:
        This rank's rows of all arrays, and how many have come from each rank.
    """
    rank, size = call.group.rank, call.group.size
    send, row = host.flat(array), array.shape[1:]
    told = call.tell(*rows, out.number)  # step 6
    table = told[:, :size]  # what every rank has for every other
    everyones = table.sum(axis=0).tolist()
    if error := unfit(call.group, call.operation, row, told[:, size].tolist(), everyones):
        raise call.known(error)
    received, width = table[:, rank].tolist(), math.prod(row)
    shape = (sum(received), *row)
    engine = call.engine_for(algorithm)
    if engine is None:
        sent, came = ([n * width for n in numbers] for numbers in (rows, received))
        run = call.algorithm("alltoall", algorithm, send.nbytes)
        joined = run(send, sent, came, call.deadline)
        if out.target is None:
            return joined.reshape(shape), received
        return host.store(joined, out.target), received
    result, joined = host.room(out.target, shape, array.dtype, send)
    row_bytes = width * array.itemsize
    starts = (table[:, :rank].sum(axis=1) * row_bytes).tolist()
    parts = _parts(joined, [n * width for n in received])
    wanted = [(source, starts[source], part) for source, _, part in parts]
    longest = int(table.sum(axis=1).max()) * row_bytes
    kept = starts[rank], starts[rank] + received[rank] * row_bytes
    call.met(engine.publish(send, wanted, call.digest, call.deadline, longest, kept))
    return host.store(joined, result), received


def shares(call: Call, array: Array, **given: Splits | None) -> list[int]:
    """Return the rows of an array for every rank.

    Args:
        array: shape (n, ...).
        given: by the caller's word for it, the rows for every rank; even shares if None, the first
            `n % size` ranks getting one row more.

    Raises:
        ValueError: the array is a scalar, or the numbers do not add up to n.
    """
    size, operation = call.group.size, call.operation
    if array.ndim == 0:
        raise ValueError(f"{operation}: a scalar has no rows, expected shape (n, ...)")
    ((word, numbers),) = given.items()
    if numbers is None:
        bounds = topology.chunk_bounds(array.shape[0], size)
        return [stop - start for start, stop in itertools.pairwise(bounds)]
    rows = [operator.index(n) for n in numbers]
    if len(rows) != size or min(rows) < 0 or sum(rows) != array.shape[0]:
        raise ValueError(
            f"{operation}: {word} do not fit, expected {size} numbers >= 0 that add "
            f"up to {array.shape[0]} rows, got {rows}"
        )
    return rows


def unfit(
    group: Group,
    operation: str,
    row: tuple[int, ...],
    given: Sequence[int],
    expected: Sequence[int],
) -> Exception | None:
    """Return the error of this rank if the `out` of any rank does not fit, which all know.

    Args:
        group: the ranks.
        operation: its name.
        row: the shape of a row.
        given: rows of everyone's `out`, that of `NEW` where there is none.
        expected: rows of everyone's result.
    """
    wrong = {
        rank: f"out has the wrong shape, expected {(right, *row)}, got {(n, *row)}"
        for rank, (n, right) in enumerate(zip(given, expected, strict=True))
        if n not in (NEW.number, right)
    }
    if not wrong:
        return None
    if group.rank in wrong:
        return ValueError(f"{operation}: {wrong[group.rank]}")
    name, first = group.transport.name, next(iter(wrong))
    whys = some([f"{name([rank])}: {why}" for rank, why in wrong.items()])
    text = f"{operation}: refused on {name(list(wrong))}, so none goes on: {whys}"
    return in_turn(MismatchError(text), (group.rank - first) % group.size)


def _parts(joined: Array, counts: Sequence[int]) -> list[tuple[int, int, Array]]:
    """Say which rank's bytes go where in the joined array."""
    bounds = itertools.pairwise([0, *itertools.accumulate(counts)])
    return [(rank, 0, joined[start:stop]) for rank, (start, stop) in enumerate(bounds)]
