"""Named operations on arrays of any library.

Each has a form that returns a `Handle` at once; `synchronize` waits for it. Ranks may make calls in
any order: those of one `name` belong together, and calls without a name in the order in which they
are made. Arrays must not change until a call is done.

An error in the arguments is raised at once on the rank that has made it, and as a `MismatchError`
by the same call of the others.
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
    "join",
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
    """Reduce the arrays of all ranks; returns a new array.

    Args:
        tensor: shape (...); the same shape and dtype on all ranks.
        average: as `op=Average`, or `op=Sum` if False.
        name: by which ranks find each other's calls.
        compression: how it travels.
        op: Average, the default; of integers it is rounded towards zero. Sum, Min, Max, Product.
        prescale_factor: what arrays are multiplied by before.
        postscale_factor: what the result is multiplied by.
        process_set: among whom.
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
    """Reduce several arrays by one call; returns new ones."""
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
    """Reduce the arrays of all ranks, and keep a share of the rows.

    The first ranks get one row more where the rows cannot be shared evenly.
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
    """Make several reduce-scatters by one call."""
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
    """Join the arrays of all ranks along their first axis, which may differ in length."""
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
    """Join several arrays by one call."""
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
    """Give every rank some rows, and join what all ranks give to this one.

    Args:
        tensor: shape (n, ...).
        splits: how many rows for every rank; they add up to n. None: the same for all.
        name: as for `allreduce`.
        process_set: as for `allreduce`.

    Returns:
        The rows; with `splits` a pair of these, and of how many each rank has given.
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
    """Return the array of one rank, whose number is that of the world, in a new one."""
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
    """Overwrite an array by that of one rank."""
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
    """Wait until all ranks are here."""
    what = RequestSpec(RequestSignature("barrier"), (), lambda results: None)
    start("barrier", process_set, None, lambda bound: what, alone=False).wait()


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has no more data, and wait until all ranks do.

    Meanwhile it takes part in what the others do: an all-reduce is then one over the ranks that
    still have data, whatever its op; an Average divides by their number. It gives no rows to an
    allgather. An alltoall or a reducescatter, and a broadcast from it, is an error on all ranks.

    Args:
        device: not looked at.
        process_set: among whom.

    Returns:
        The rank that has called this last; the same on all ranks.
    """
    bound = process_set.bound("join")
    assert bound.controller is not None
    return bound.ranks[bound.controller.join()]
