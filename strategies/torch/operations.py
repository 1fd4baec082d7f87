"""Operations of torch.distributed, implemented by those of a communicator.

Between nodes, several tensors of one call are sent together, because each separate operation costs
messages. For 64 tensors of 4 KiB on 2 nodes with one rank each, together and one by one take: all-
reduce 470 and 674 us, all-gather 682 and 7929 us. On one node plans are faster one by one: 251 us
together and 185 one by one, 638 and 298.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ReduceOp

import collectives as cc
from collectives import extend
from strategies.torch.tensor_views import (
    Array,
    as_numpy,
    borrow,
    contiguous_view,
    has_arithmetic,
    is_contiguous_host,
)

__all__ = [
    "MEAN",
    "Reduction",
    "allgather",
    "allgather_each",
    "allreduce",
    "alltoall",
    "alltoall_rows",
    "broadcast",
    "differs_in_memory",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_each",
    "reduction",
    "scatter",
]

Tensors = Sequence[torch.Tensor]
Pairs = Sequence[tuple[Tensors, torch.Tensor]]


class Reduction(NamedTuple):
    """A reduction of torch.distributed.

    Attributes:
        op: op of a communicator.
        factor: factor of all numbers before the reduction; None for no factor.
    """

    op: Any
    factor: Any = None


_REDUCTIONS = {
    ReduceOp.SUM: Reduction(cc.SUM),
    ReduceOp.AVG: Reduction(cc.MEAN),
    ReduceOp.PRODUCT: Reduction(cc.PRODUCT),
    ReduceOp.MIN: Reduction(cc.MIN),
    ReduceOp.MAX: Reduction(cc.MAX),
    ReduceOp.BAND: Reduction(cc.BITWISE_AND),
    ReduceOp.BOR: Reduction(cc.BITWISE_OR),
    ReduceOp.BXOR: Reduction(cc.BITWISE_XOR),
}

MEAN = Reduction(cc.MEAN)

# Replacements of ops by NumPy's kind of the dtype. Bool has no sum, so use any and all. The average
# of integers is truncated toward zero, as by `ncclAvg`; frameworks over Gloo, which has no average,
# also truncate when they divide the sum.
_INSTEAD = {
    "b": {cc.SUM: cc.MAX, cc.PRODUCT: cc.MIN},
    "i": {cc.MEAN: cc.INTEGER_MEAN},
    "u": {cc.MEAN: cc.INTEGER_MEAN},
}


def reduction(op: Any) -> Reduction:
    """Return the reduction of a `ReduceOp`."""
    known = _REDUCTIONS.get(op.op)
    if known is None:  # PREMUL_SUM
        # The factor is a number, or a tensor with one element.
        factor = op.factor
        factor = factor.item() if isinstance(factor, torch.Tensor) else factor
        return Reduction(cc.SUM, factor=factor)
    return known


def allreduce(
    comm: cc.Communicator,
    tensors: Tensors,
    how: Reduction,
    limit: float,
    codec: cc.Compression = cc.NONE,
) -> None:
    """Reduce tensors in place."""
    if len(tensors) > 1 and comm.num_nodes > 1 and codec is cc.NONE:
        _allreduce_together(comm, [t for t in tensors if not t.is_sparse], how, limit)
        tensors = [t for t in tensors if t.is_sparse]
    for tensor in tensors:
        # Sparse tensors have another number of rows on each rank.
        if tensor.is_sparse:
            _allreduce_rows(comm, tensor, how, limit)
            continue
        # The usual call, without a NumPy array if it is repeated.
        plain = _is_plain(tensor, how) and codec is cc.NONE
        array, write = None, None
        try:
            if plain and extend.run_on_elements(
                comm, "allreduce", how.op, tensor, tensor, limit, _view
            ):
                continue
            array, write = _lend(comm, tensor, adds=True)
            _reduce(comm, array, how, limit, out=array, codec=codec)
        except cc.MismatchError as error:
            if not differs_in_memory(error):
                raise
            # A copy is in private memory on every rank, so the ranks agree.
            if array is None:
                array, write = _lend(comm, tensor, adds=True)
            array[...] = _reduce(comm, array.copy(), how, limit, codec=codec)
        if write is not None:
            write()


def _allreduce_together(
    comm: cc.Communicator, tensors: Tensors, how: Reduction, limit: float
) -> None:
    lent = [_lend(comm, tensor, adds=True) for tensor in tensors]
    # All were lent before the first exchange, so an error there raises before any message.
    by_op: dict[Any, list[tuple[Array, Array]]] = {}
    for array, _ in lent:
        op, sent = _prepare(array, how)
        by_op.setdefault(op, []).append((sent, array))
    for op, pairs in by_op.items():
        sent_arrays, arrays = zip(*pairs, strict=True)
        comm.grouped_allreduce(sent_arrays, op=op, out=arrays, timeout=limit)
    for _, write in lent:
        if write is not None:
            write()


def _allreduce_rows(
    comm: cc.Communicator, tensor: torch.Tensor, how: Reduction, limit: float
) -> None:
    """Reduce a sparse tensor in place; the result has the elements of all ranks."""
    own = tensor.detach().coalesce()
    sizes = tuple(own.shape[: own.sparse_dim()])
    values, _ = borrow(own.values())
    if how.factor is not None:
        # In the dtype of the values, since a float64 factor would widen them.
        values = values * np.asarray(how.factor, values.dtype)
    # Several sparse dimensions become one row number, which the exchange understands.
    where = np.ravel_multi_index(tuple(own.indices().cpu().numpy()), sizes)
    found, rows = comm.sparse_allreduce(
        where, values, num_rows=math.prod(sizes), op=how.op, timeout=limit
    )
    result = torch.empty(rows.shape, dtype=own.dtype)
    as_numpy(result)[...] = rows
    indices = torch.from_numpy(np.stack(np.unravel_index(found, sizes)))
    # The result replaces indices and values of the same tensor object, which DDP holds.
    with torch.no_grad():
        tensor.copy_(torch.sparse_coo_tensor(indices, result, own.shape, check_invariants=False))


def differs_in_memory(error: cc.MismatchError) -> bool:
    """Return whether ranks that reduce the same bucket differ only in its memory.

    This happens in DDP's `join`. Ranks without more data pass buckets that are new each time. The
    buckets of other ranks are in shared memory, or are just being moved by a call of
    `allgather_object` (`ddp_buckets`). All ranks get the same error, so they react alike.
    """
    if error.operations == {"allreduce"}:
        return "memory" in error.fields
    return error.operations == {"allreduce", "allgather_object"}


def broadcast(comm: cc.Communicator, tensor: torch.Tensor, root: int, limit: float) -> None:
    """Overwrite a tensor with the root's."""
    if extend.run_on_elements(comm, "broadcast", root, tensor, tensor, limit, _view):
        return
    array, write = _lend(comm, tensor)
    comm.broadcast(array, root, out=array, timeout=limit)
    # The root's tensor has the value already.
    if write is not None and comm.rank != root:
        write()


def reduce(
    comm: cc.Communicator, tensor: torch.Tensor, root: int, how: Reduction, limit: float
) -> None:
    """Overwrite the root's tensor with the reduction of all."""
    array, write = _lend(comm, tensor, adds=True)
    op, sent = _prepare(array, how)
    # Other ranks have no use for the result, and no memory for it.
    comm.reduce(sent, root, op=op, out=array if comm.rank == root else None, timeout=limit)
    if write is not None and comm.rank == root:
        write()


def allgather(comm: cc.Communicator, outputs: Tensors, tensor: torch.Tensor, limit: float) -> None:
    """Fill the outputs with the elements of all ranks in rank order."""
    if len(outputs) == 1 and extend.run_on_elements(
        comm, "allgather", None, tensor, outputs[0], limit, _flat_view
    ):
        return
    array, _ = _lend(comm, tensor)
    # Into the output itself if it is one contiguous tensor.
    own = _memory(outputs)
    joined = comm.allgather(array.reshape(-1), out=own, timeout=limit)
    if own is None:
        _fill("allgather", outputs, joined)


def allgather_each(comm: cc.Communicator, pairs: Pairs, limit: float) -> None:
    """Run `allgather` for several tensors and their outputs."""
    if comm.num_nodes > 1:
        arrays = [_lend(comm, tensor)[0].reshape(-1) for _, tensor in pairs]
        # One exchange for all tensors; the outputs are filled from its result.
        joined = comm.grouped_allgather(arrays, timeout=limit)
        for (outputs, _), elements in zip(pairs, joined, strict=True):
            _fill("allgather", outputs, elements)
        return
    for outputs, tensor in pairs:
        allgather(comm, outputs, tensor, limit)


def gather(
    comm: cc.Communicator, outputs: Tensors, tensor: torch.Tensor, root: int, limit: float
) -> None:
    """Fill the root's outputs with the elements of all ranks in rank order."""
    array, _ = _lend(comm, tensor)
    joined = comm.gather(array.reshape(-1), root, timeout=limit)
    if joined is not None:
        _fill("gather", outputs, joined)


def scatter(
    comm: cc.Communicator, output: torch.Tensor, parts: Tensors, root: int, limit: float
) -> None:
    """Fill the output with one of the root's parts."""
    joined, sizes = None, None
    if comm.rank == root:
        arrays = [_lend(comm, part)[0].reshape(-1) for part in parts]
        # One array with counts, because the parts may have different sizes.
        joined, sizes = np.concatenate(arrays), [array.size for array in arrays]
    own = _memory([output])
    received = comm.scatter(joined, root, out=own, counts=sizes, timeout=limit)
    if own is None:
        _fill("scatter", [output], received)


def reduce_scatter(
    comm: cc.Communicator, output: torch.Tensor, parts: Tensors, how: Reduction, limit: float
) -> None:
    """Fill the output with this rank's part of the reduction; a single part is split evenly."""
    if (
        len(parts) == 1
        and _is_plain(parts[0], how)
        and parts[0].numel() % comm.size == 0
        and extend.run_on_elements(
            comm, "reduce_scatter", how.op, parts[0], output, limit, _flat_view
        )
    ):
        return
    arrays = [_lend(comm, part, adds=True)[0].reshape(-1) for part in parts]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    sizes = [array.size for array in arrays] if len(arrays) > 1 else None
    # An uneven split is an error of the caller, which must raise on all ranks.
    if sizes is None and joined.size % comm.size:
        sizes = [joined.size // comm.size] * comm.size  # invalid: raises on all ranks
    own = _memory([output])
    op, sent = _prepare(joined, how)
    share = comm.reduce_scatter(sent, op=op, out=own, counts=sizes, timeout=limit)
    if own is None:
        _fill("reduce_scatter", [output], share)


def reduce_scatter_each(
    comm: cc.Communicator,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    how: Reduction,
    limit: float,
) -> None:
    """Run `reduce_scatter` for several tensors and their outputs."""
    arrays = [_lend(comm, tensor, adds=True)[0].reshape(-1) for _, tensor in pairs]
    prepared = [_prepare(array, how) for array in arrays]
    ops = {op for op, _ in prepared}
    even = all(array.size % comm.size == 0 for array in arrays)
    # Only even shares: a grouped reduce-scatter has no counts.
    if comm.num_nodes > 1 and even and len(ops) == 1:
        sent = [array for _, array in prepared]
        shares = comm.grouped_reduce_scatter(sent, op=ops.pop(), timeout=limit)
        for (output, _), share in zip(pairs, shares, strict=True):
            _fill("reduce_scatter", [output], share)
        return
    for output, tensor in pairs:
        reduce_scatter(comm, output, [tensor], how, limit)


def alltoall(comm: cc.Communicator, outputs: Tensors, inputs: Tensors, limit: float) -> None:
    """Send one input to each rank, and fill the outputs with the received elements."""
    arrays = [_lend(comm, tensor)[0].reshape(-1) for tensor in inputs]
    sizes = [array.size for array in arrays]
    joined = comm.alltoall(np.concatenate(arrays), counts=sizes, timeout=limit)
    _fill("alltoall", outputs, joined)


def alltoall_rows(
    comm: cc.Communicator, output: torch.Tensor, tensor: torch.Tensor,
    output_sizes: Sequence[int], input_sizes: Sequence[int], limit: float,
) -> None:  # fmt: skip
    """Send rows of a tensor to each rank, and fill the output with the received rows."""
    array, _ = _lend(comm, tensor)
    rows = len(array) if array.ndim else 1
    # PyTorch passes no sizes for even shares.
    sizes = list(input_sizes) or [rows // comm.size] * comm.size
    row = math.prod(array.shape[1:])
    joined, received = comm.alltoall(
        array.reshape(rows, row), counts=sizes, return_counts=True, timeout=limit
    )
    if output_sizes and list(output_sizes) != received.tolist():
        # The sizes of other ranks are known only after the exchange.
        raise ValueError(
            f"all_to_all_single: the received rows differ from the output sizes, expected "
            f"{list(output_sizes)}, got {received.tolist()} (rank {comm.rank} of {comm.size})"
        )
    _fill("all_to_all_single", [output], joined)


def _is_plain(tensor: torch.Tensor, how: Reduction) -> bool:
    """Return whether a tensor is reduced by the op itself; integers may have another one."""
    return tensor.is_floating_point() and how.factor is None


def _view(tensor: torch.Tensor) -> Array | None:
    """Return a tensor's memory as an array; None if its elements need a conversion."""
    if not (has_arithmetic(tensor.dtype) and is_contiguous_host(tensor)):
        return None
    return as_numpy(tensor)


def _flat_view(tensor: torch.Tensor) -> Array | None:
    """Return `_view` as shape (n,)."""
    array = _view(tensor)
    return None if array is None else array.reshape(-1)


def _lend(
    comm: cc.Communicator, tensor: torch.Tensor, *, adds: bool = False
) -> tuple[Array, Callable[[], Any] | None]:
    """Return a tensor's elements and the function that writes them back; raise on all ranks."""
    array = contiguous_view(tensor)
    if array is not None:
        return array, None
    if tensor.layout is not torch.strided or tensor.is_meta:
        comm.allreduce(tensor)  # raises on all ranks
    if adds and not has_arithmetic(tensor.dtype):
        comm.allreduce(tensor.detach())
    return borrow(tensor)


def _prepare(array: Array, how: Reduction) -> tuple[Any, Array]:
    """Return the op for the array's dtype, and the scaled array."""
    # Bool and integers have other ops for some reductions.
    instead = _INSTEAD.get(array.dtype.kind)
    op = how.op if instead is None else instead.get(how.op, how.op)
    if how.factor is None:
        return op, array
    with np.errstate(all="ignore"):  # an error on this rank alone would leave other ranks waiting
        return op, array * np.asarray(how.factor, array.dtype)


def _reduce(
    comm: cc.Communicator, array: Array, how: Reduction, limit: float,
    out: Array | None = None, codec: cc.Compression = cc.NONE,
) -> Array:  # fmt: skip
    """Return the reduction of the arrays of all ranks."""
    op, sent = _prepare(array, how)
    reduced: Array = comm.allreduce(sent, op=op, out=out, compression=codec, timeout=limit)
    return reduced


def _memory(outputs: Tensors) -> Array | None:
    """Return the memory of a single contiguous host output, otherwise None."""
    output = outputs[0]
    if len(outputs) == 1 and is_contiguous_host(output):
        return as_numpy(output).reshape(-1)
    return None


def _fill(operation: str, outputs: Tensors, elements: Array) -> None:
    """Write elements into tensors, in order."""
    elements = elements.reshape(-1)
    ends = list(itertools.accumulate(output.numel() for output in outputs))
    if ends[-1:] != [elements.size]:
        raise ValueError(
            f"{operation}: the outputs do not fit, expected {elements.size} elements in all, got "
            f"{ends[-1] if ends else 0}"
        )
    for output, end in zip(outputs, ends, strict=True):
        array, write = borrow(output)
        if array.dtype != elements.dtype:
            raise ValueError(
                f"{operation}: an output has another dtype, expected {elements.dtype}, got "
                f"{array.dtype}"
            )
        array.reshape(-1)[...] = elements[end - array.size : end]
        if write is not None:
            write()
