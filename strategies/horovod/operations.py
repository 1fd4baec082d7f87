"""Named operations on arrays of any library.

Each operation has a form that returns a `Handle` at once; `synchronize` waits for it. Ranks may
make calls in any order. Calls with the same `name` match; calls without a name match in the order
in which they are made. Arrays must not change until the call is done.

Invalid arguments raise at once on their rank. The same call on the other ranks raises a
`MismatchError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategies.horovod.compression import Compression, Compressor
from strategies.horovod.controller.request_signature import RequestSignature
from strategies.horovod.handles import Handle, poll, start, synchronize
from strategies.horovod.process_sets import ProcessSet, global_process_set
from strategies.horovod.requests import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    RequestSpec,
    Sum,
    allgather_request,
    allreduce_request,
    alltoall_request,
    broadcast_request,
    reducescatter_request,
)

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]


# All-reduce.


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce the arrays of all ranks; return a new array.

    Args:
        tensor: shape (...); the same shape and dtype on all ranks.
        average: True is `op=Average`, False is `op=Sum`.
        name: name that identifies the call on all ranks.
        compression: compression of the messages.
        op: Average (default; rounded toward zero for integers), Sum, Min, Max, Product, or Adasum
            of floating-point arrays (`strategies.horovod.adasum`).
        prescale_factor: factor of the arrays before the reduction.
        postscale_factor: factor of the result.
        process_set: the ranks.
    """
    how = allreduce_request(
        [tensor], average, op, prescale_factor, postscale_factor, compression, one=True
    )
    return start("allreduce", process_set, name, how, alone=False).wait()


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce`."""
    how = allreduce_request([tensor], average, op, prescale_factor, postscale_factor, one=True)
    return start("allreduce", process_set, name, how)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce the arrays of all ranks in place."""
    how = allreduce_request([tensor], average, op, prescale_factor, postscale_factor, in_place=True)
    start("allreduce", process_set, name, how, alone=False).wait()
    return tensor


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce_`."""
    how = allreduce_request(
        [tensor], average, op, prescale_factor, postscale_factor, in_place=True, one=True
    )
    return start("allreduce", process_set, name, how)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several arrays by one call; return new arrays."""
    how = allreduce_request(tensors, average, op, prescale_factor, postscale_factor, compression)
    return list(start("allreduce", process_set, name, how, alone=False).wait())


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce`."""
    how = allreduce_request(tensors, average, op, prescale_factor, postscale_factor)
    return start("allreduce", process_set, name, how)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several arrays in place by one call."""
    how = allreduce_request(tensors, average, op, prescale_factor, postscale_factor, in_place=True)
    start("allreduce", process_set, name, how, alone=False).wait()
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce_`."""
    how = allreduce_request(tensors, average, op, prescale_factor, postscale_factor, in_place=True)
    return start("allreduce", process_set, name, how)


# Reduce-scatter.


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce the arrays of all ranks, and return this rank's share of the rows.

    If the rows cannot be divided evenly, the first ranks get one row more.
    """
    how = reducescatter_request(
        [tensor], op, prescale_factor, postscale_factor, compression, one=True
    )
    return start("reducescatter", process_set, name, how, alone=False).wait()


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`."""
    how = reducescatter_request([tensor], op, prescale_factor, postscale_factor, one=True)
    return start("reducescatter", process_set, name, how)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce-scatter several arrays by one call."""
    how = reducescatter_request(tensors, op, prescale_factor, postscale_factor, compression)
    return list(start("reducescatter", process_set, name, how, alone=False).wait())


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`."""
    how = reducescatter_request(tensors, op, prescale_factor, postscale_factor)
    return start("reducescatter", process_set, name, how)


# Rows.


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all ranks along the first axis, whose length may differ."""
    how = allgather_request([tensor], one=True)
    return start("allgather", process_set, name, how, alone=False).wait()


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather`."""
    return start("allgather", process_set, name, allgather_request([tensor], one=True))


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several arrays by one call."""
    joined = start("allgather", process_set, name, allgather_request(tensors), alone=False).wait()
    return list(joined)


def grouped_allgather_async(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allgather`."""
    return start("allgather", process_set, name, allgather_request(tensors))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank, and return the rows that all ranks sent to this one.

    Args:
        tensor: shape (n, ...).
        splits: number of rows for each rank, with sum n; None divides them evenly.
        name: as for `allreduce`.
        process_set: as for `allreduce`.

    Returns:
        The rows; with `splits` a pair of the rows and the number of rows from each rank.
    """
    how = alltoall_request(tensor, splits)
    return start("alltoall", process_set, name, how, alone=False).wait()


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `alltoall`."""
    return start("alltoall", process_set, name, alltoall_request(tensor, splits))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the array of one rank as a new array; `root_rank` is a rank of the world."""
    how = broadcast_request(tensor, root_rank)
    return start("broadcast", process_set, name, how, alone=False).wait()


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast`."""
    return start("broadcast", process_set, name, broadcast_request(tensor, root_rank))


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite an array with that of one rank."""
    how = broadcast_request(tensor, root_rank, in_place=True)
    start("broadcast", process_set, name, how, alone=False).wait()
    return tensor


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast_`."""
    return start(
        "broadcast", process_set, name, broadcast_request(tensor, root_rank, in_place=True)
    )


# All at once.


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called this."""
    what = RequestSpec(RequestSignature("barrier"), (), lambda results: None)
    start("barrier", process_set, None, lambda bound: what, alone=False).wait()
