"""`import strategies.horovod.torch as hvd`: Horovod's API for PyTorch.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Operations that return new tensors are differentiable; `autograd` defines their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import collectives as cc
from strategies.horovod import autograd, common, operations
from strategies.horovod.common import *  # noqa: F403  # listed there
from strategies.horovod.compression import Compression, Compressor
from strategies.horovod.handles import start
from strategies.horovod.objects import broadcast_parameters
from strategies.horovod.operations import (
    Average,
    allreduce_,
    allreduce_async_,
    broadcast_,
    broadcast_async_,
    grouped_allreduce_,
    grouped_allreduce_async_,
)
from strategies.horovod.process_sets import Bound, ProcessSet, global_process_set
from strategies.horovod.requests import RequestSpec, allgather_request
from strategies.torch import sync_batch_norm

__all__ = [
    "SyncBatchNorm",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_async_",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "reducescatter",
    "sparse_allreduce_async",
]
__all__ += common.__all__


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """Batch normalization over the rows of all ranks of a process set.

    Args:
        arguments: as for `strategies.torch.SyncBatchNorm`.
        process_set: the ranks, unless `comm` is set.
    """

    def __init__(
        self, *arguments: Any, process_set: ProcessSet = global_process_set, **how: Any
    ) -> None:
        super().__init__(*arguments, **how)
        # None instead of the global set, because models are copied.
        self._process_set = None if process_set is global_process_set else process_set

    def _ranks(self) -> cc.Communicator:
        among = self._process_set or global_process_set
        # A rank outside of the set normalizes its own rows.
        return self._comm or among.own_ranks("SyncBatchNorm")


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the tensors of all ranks; as `operations.allreduce`, differentiable."""
    # Sparse tensors have no backward function here.
    if isinstance(tensor, torch.Tensor) and tensor.is_sparse:
        return sparse_allreduce_async(tensor, name, _op(average, op), process_set)()
    return grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )[0]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors by one call; differentiable."""
    # The operation raises the error with its own words.
    if average is not None and op is not None:  # raises
        return list(
            operations.grouped_allreduce(tensors, average, name, op=op, process_set=process_set)
        )
    how = _op(average, op)
    factors = prescale_factor, postscale_factor

    def run(given: Sequence[torch.Tensor]) -> Any:
        return autograd.allreduce(given, name, how, factors, process_set)

    return _compress(run, tensors, compression)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce the tensors of all ranks, and return this rank's share of the rows; differentiable."""
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce-scatter several tensors by one call; differentiable."""
    factors = prescale_factor, postscale_factor

    def run(given: Sequence[torch.Tensor]) -> Any:
        return autograd.reducescatter(given, name, op, factors, process_set)

    return _compress(run, tensors, compression)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along their first axis; differentiable."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors by one call; differentiable."""
    return autograd.differentiable(
        lambda given: autograd.allgather(given, name, process_set), _tensors(tensors)
    )


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of one rank as a new one; differentiable."""
    return autograd.differentiable(
        lambda given: autograd.broadcast(given[0], root_rank, name, process_set),
        _tensors([tensor]),
    )[0]


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Exchange rows with all ranks, as `operations.alltoall`; differentiable."""
    rows, received = autograd.differentiable(
        lambda given: autograd.alltoall(given[0], splits, name, process_set), _tensors([tensor])
    )
    # The number of received rows is only wanted by programs that pass splits.
    return rows if splits is None else (rows, received)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to sum or average the sparse tensors of all ranks.

    Args:
        tensor: a COO tensor; the same shape and dtype on all ranks.
        name: name that identifies the call on all ranks.
        op: Average or Sum.
        process_set: the ranks.

    Returns:
        A function that waits and returns the sum, or the mean over the ranks that have not joined,
        coalesced.
    """

    def prepare(bound: Bound) -> RequestSpec:
        if op not in (operations.Average, operations.Sum):
            raise ValueError(f"sparse_allreduce: expected Average or Sum as op, got {op!r}")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_sparse:
            raise TypeError("sparse_allreduce: expected a sparse tensor of the layout COO")
        # Coalesced here, so that each index is sent once per rank.
        whole = tensor.detach().coalesce()
        # Rows of indices and values travel as all-gathers of one call. The third one counts the
        # ranks that have not joined.
        values = whole.values()
        rows = [whole.indices().t().contiguous(), values, values.new_ones(1)]
        call = allgather_request(rows)(bound)
        what = call.description
        return call._replace(
            # In one text, so that ranks with another op or shape get an error.
            description=what._replace(op=f"{op.value} of shape {tuple(tensor.shape)}"),
            finish=_sparse,
        )

    def _sparse(results: Sequence[torch.Tensor]) -> torch.Tensor:
        indices, values, ones = results
        values = values / len(ones) if op is Average else values
        joined = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
        # Indices of different ranks repeat; their values are added here.
        return joined.coalesce()

    handle = start("sparse_allreduce", process_set, name, prepare)
    return handle.wait


def _op(average: bool | None, op: Any) -> Any:
    usual = operations.Sum if average is False else Average
    return usual if op is None else op


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [x if isinstance(x, torch.Tensor) else torch.as_tensor(x) for x in values]


def _compress(run: Any, values: Iterable[Any], compression: Compressor) -> list[torch.Tensor]:
    """Call a differentiable operation on compressed tensors."""
    pairs = [compression.compress(x) for x in _tensors(values)]
    # Compressed outside of the function, so that autograd passes through the conversion.
    results = autograd.differentiable(run, [x for x, _ in pairs])
    return [
        compression.decompress(x, context) for x, (_, context) in zip(results, pairs, strict=True)
    ]
