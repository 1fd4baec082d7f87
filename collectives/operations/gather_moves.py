"""Data movement of gathers: through the node engine or by messages.

Arrays are flat and contiguous here, and the call has a description. In the engine every rank
publishes its array and copies the parts that it needs from the other ranks' arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import host_arrays
from collectives.arrays.host_arrays import ALLOCATE, Array, RowsOut
from collectives.calls.call import Call
from collectives.calls.counts import output_mismatch
from collectives.plans.gather_plan import GatherPlan
from collectives.plans.lone_call import LoneCall
from collectives.plans.planner import is_alone

__all__ = [
    "allgather",
    "allgather_known",
    "alltoall",
    "gather",
    "scatter",
]


def gather(
    call: Call, array: Array, root: int, algorithm: str = "auto", out: RowsOut = ALLOCATE
) -> tuple[Array | None, list[int], GatherPlan | LoneCall | None]:
    """Join the ranks' arrays, shape (n, ...), on the root, in a described call.

    Returns:
        The rows of all ranks, None on the other ranks; the number of rows of each rank; the plan
        for repeated calls, None by messages.
    """
    row, own = array.shape[1:], host_arrays.flat(array)
    if engine := call.engine_for(algorithm):
        plan = GatherPlan(call, engine, array, root)  # step 5
        return plan.first(call, own, out), plan.rows, plan  # step 6
    told = call.exchange_integers(len(array), out.number)  # step 6
    rows, given = told.T.tolist()
    # All ranks know the rows of every `out`, so all raise or none.
    if error := output_mismatch(call.group, call.operation, row, given, [sum(rows)] * len(rows)):
        raise call.announce(error)
    counts, shape = [n * math.prod(row) for n in rows], (sum(rows), *row)
    run = call.algorithm("gather", algorithm, sum(counts) * own.itemsize)
    joined: Array | None = run(own, counts, root, call.deadline)
    # `run` returns None on all ranks but the root.
    if joined is None:
        return None, rows, None
    result = (
        joined.reshape(shape) if out.target is None else host_arrays.copy_to(joined, out.target)
    )
    return result, rows, _lone_plan(call, own, shape, algorithm)


def allgather(
    call: Call, array: Array, algorithm: str = "auto", out: RowsOut = ALLOCATE
) -> tuple[Array, list[int], GatherPlan | LoneCall | None]:
    """Join the ranks' arrays, shape (n, ...), on all ranks, in a described call.

    Returns:
        The rows of all ranks; the number of rows of each rank; the plan for repeated calls, None by
        messages.
    """
    own, row = array.reshape(-1), array.shape[1:]
    if engine := call.engine_for(algorithm):
        plan = GatherPlan(call, engine, array)  # step 5
        joined = plan.first(call, own, out)  # step 6
        assert joined is not None
        return joined, plan.rows, plan
    rows, given = call.exchange_integers(len(array), out.number).T.tolist()  # step 6
    if error := output_mismatch(call.group, call.operation, row, given, [sum(rows)] * len(rows)):
        raise call.announce(error)
    width = math.prod(row)
    bounds = [0, *(width * n for n in itertools.accumulate(rows))]
    first, stop = bounds[call.group.rank : call.group.rank + 2]
    # The own part may be in its place already, if the array is a part of `out`.
    shape, before = (sum(rows), *row), first * array.itemsize
    result, joined = host_arrays.output(out.target, shape, array.dtype, own, before)
    # The own chunk must be in place before the all-gather, which sends it.
    joined[first:stop] = own
    call.algorithm("allgather", algorithm, joined.nbytes)(joined, bounds, call.deadline)
    result = host_arrays.copy_to(joined, result)
    return result, rows, _lone_plan(call, own, shape, algorithm)


def _lone_plan(call: Call, own: Array, shape: tuple[int, ...], algorithm: str) -> LoneCall | None:
    """Return the plan of one rank; None for several ranks."""
    return LoneCall(call, own.nbytes, shape) if is_alone(call, algorithm) else None


def allgather_known(
    bounds: Sequence[int], algorithm: str, call: Call, send: Array, out: Array
) -> None:
    """Join the ranks' arrays by messages; `bounds` are the first elements of all ranks' parts."""
    first, stop = bounds[call.group.rank : call.group.rank + 2]
    if call.fits_eager(algorithm, out.nbytes):
        # Each rank fills its own part of zeros; the maximum of all ranks joins the parts.
        bits = np.zeros(out.nbytes, np.uint8)
        bits[first * out.itemsize : stop * out.itemsize] = host_arrays.raw_bytes(send)
        host_arrays.raw_bytes(out)[:] = call.reduce_eager(bits)
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
    out: RowsOut = ALLOCATE,
) -> Array:
    """Send every rank its part of the root's array; all ranks know rows, row shape and dtype."""
    rank, counts = call.group.rank, [n * math.prod(row) for n in rows]
    # `out` may be the own rows of the root in `x`, which then begins `first` bytes before `out`.
    nbytes, first = dtype.itemsize * sum(counts), dtype.itemsize * sum(counts[:rank])
    result, own = host_arrays.output(out.target, (rows[rank], *row), dtype, send, -first)
    if engine := call.engine_for(algorithm):
        # No other rank reads the root's own rows, so the root keeps them out of the slots.
        wanted, kept = [(root, first, own)], (first, first + own.nbytes)
        call.checked(engine.publish(send, wanted, call.digest, call.deadline, nbytes, kept))
    elif call.fits_eager(algorithm, nbytes):
        # MAX of the root's bytes and zeros elsewhere: small arrays need no tree.
        data = np.zeros(nbytes, np.uint8) if send is None else send.view(np.uint8)
        joined = call.reduce_eager(data)
        own.view(np.uint8)[:] = joined[first : first + own.nbytes]
    else:
        call.agree()
        run = call.algorithm("scatter", algorithm, nbytes)
        own[...] = run(send, counts, root, dtype, call.deadline)
    return host_arrays.copy_to(own, result)


def alltoall(
    call: Call, array: Array, rows: Sequence[int], algorithm: str, out: RowsOut
) -> tuple[Array, list[int]]:
    """Send every rank its rows of this rank's array.

    Args:
        array: shape (n, ...).
        rows: number of rows for every rank.

    Returns:
        The rows received from all ranks, and the number of rows from each rank.
    """
    rank, size = call.group.rank, call.group.size
    send, row = host_arrays.flat(array), array.shape[1:]
    # Each rank learns the whole table, because the place of its rows in another rank's array
    # depends on what that rank sends to lower ranks.
    told = call.exchange_integers(*rows, out.number)  # step 6
    table = told[:, :size]  # row r: the number of rows that rank r sends to each rank
    # Column r: the rows that rank r receives.
    everyones = table.sum(axis=0).tolist()
    if error := output_mismatch(call.group, call.operation, row, told[:, size].tolist(), everyones):
        raise call.announce(error)
    received, width = table[:, rank].tolist(), math.prod(row)
    shape = (sum(received), *row)
    engine = call.engine_for(algorithm)
    if engine is None:
        sent, came = ([n * width for n in numbers] for numbers in (rows, received))
        run = call.algorithm("alltoall", algorithm, send.nbytes)
        joined = run(send, sent, came, call.deadline)
        if out.target is None:
            return joined.reshape(shape), received
        return host_arrays.copy_to(joined, out.target), received
    result, joined = host_arrays.output(out.target, shape, array.dtype, send)
    row_bytes = width * array.itemsize
    # For each source, the rows that it sends to lower ranks are before the rows for this one.
    starts = (table[:, :rank].sum(axis=1) * row_bytes).tolist()
    parts = _parts(joined, [n * width for n in received])
    wanted = [(source, starts[source], part) for source, _, part in parts]
    # The number of rounds must be equal on all ranks, so it follows from the longest array.
    longest = int(table.sum(axis=1).max()) * row_bytes
    # No other rank reads the rows that this rank sends to itself.
    kept = starts[rank], starts[rank] + received[rank] * row_bytes
    call.checked(engine.publish(send, wanted, call.digest, call.deadline, longest, kept))
    return host_arrays.copy_to(joined, result), received


def _parts(joined: Array, counts: Sequence[int]) -> list[tuple[int, int, Array]]:
    """Return for each rank the destination of its bytes in the joined array."""
    bounds = itertools.pairwise([0, *itertools.accumulate(counts)])
    return [(rank, 0, joined[start:stop]) for rank, (start, stop) in enumerate(bounds)]
