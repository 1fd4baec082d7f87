"""Gradients of Horovod's operations for torch.autograd.

Gradients are Horovod's, so that ported programs train as before. In the table g are the gradients
of the results on P ranks; the factor is relative to the gradient of the sum of all losses:

| operation | gradient on a rank | factor |
| --- | --- | --- |
| allreduce Sum, Average | the same of all g | 1 |
| allreduce Min, Max | the sum of all g where the result is this rank's, over the ties | 1 |
| allreduce Product | the sum of all g times the product of the other ranks' numbers | 1 |
| allgather | this rank's rows of the mean of all g | 1/P |
| broadcast | on the root the mean of all g, elsewhere zeros | 1/P |
| alltoall | the rows that went out, from where they went | 1 |
| reducescatter Sum | all g, joined, times P | P |
| reducescatter Average | all g, joined | P |

The exceptions are Min, Max and Product, where Horovod reduces g by the same op.

The way back is made of named operations as well: ranks may go it in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from strategies.horovod import operations, requests
from strategies.horovod.operations import Average, Max, Min, Product, Sum
from strategies.horovod.process_sets import ProcessSet

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "differentiable", "reducescatter"]

Back = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


class _Operation(torch.autograd.Function):
    """Some tensors through an operation, and back through what it has returned for that."""

    @staticmethod
    def forward(ctx: Any, run: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, ctx.back = run([tensor.detach() for tensor in tensors])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.back([gradient.contiguous() for gradient in gradients])


def differentiable(run: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Call `run(tensors)`, which returns results and the way back, and tell autograd.

    Args:
        run: returns a list of tensors, and what makes the gradients of `tensors` of theirs.
        tensors: what autograd looks at.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Operation.apply(run, *tensors))
    return list(run([tensor.detach() for tensor in tensors])[0])


def _backward_name(name: str | None) -> str | None:
    """Return by which name ranks find each other on the way back."""
    return None if name is None else f"gradient of {name}"


def allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> tuple[list[torch.Tensor], Back]:
    """Reduce tensors together; returns the results and the way back."""
    before, after = factors
    results = operations.grouped_allreduce(
        tensors, name=name, op=op, prescale_factor=before, postscale_factor=after,
        process_set=process_set,
    )  # fmt: skip
    kept = [] if op in (Sum, Average) else [result.clone() for result in results]

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        again = _backward_name(name)
        if op in (Sum, Average):
            return operations.grouped_allreduce(
                gradients, name=again, op=op, prescale_factor=after, postscale_factor=before,
                process_set=process_set,
            )  # fmt: skip
        return _select(tensors, kept, gradients, again, op, factors, process_set)

    return results, back


def _select(
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    name: str | None,
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    """Return the gradients of Min, Max and Product."""
    before, after = factors
    scaled = [requests.scaled(tensor, before) for tensor in tensors]
    if op in (Min, Max):
        shares = [
            (requests.scaled(x, after) == y).to(y.dtype)
            for x, y in zip(scaled, results, strict=True)
        ]
    else:
        rows = [x[None] for x in scaled]
        all_rows = operations.grouped_allgather(rows, name and f"{name}, rows", process_set)
        rank = process_set.rank() or 0
        shares = [torch.cat([x[:rank], x[rank + 1 :]]).prod(0) for x in all_rows]
    summed = operations.grouped_allreduce(
        [*gradients, *shares], name=name, op=Sum, process_set=process_set
    )
    sums, counts = summed[: len(gradients)], summed[len(gradients) :]
    factor = before * after
    if op is Product:
        return [g * share * factor for g, share in zip(sums, shares, strict=True)]
    return [g * share / n * factor for g, share, n in zip(sums, shares, counts, strict=True)]


def reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> tuple[list[torch.Tensor], Back]:
    """Make reduce-scatters together; returns the results and the way back."""
    before, after = factors
    results = operations.grouped_reducescatter(
        tensors, name=name, op=op, prescale_factor=before, postscale_factor=after,
        process_set=process_set,
    )  # fmt: skip

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if op not in (Sum, Average):
            raise ValueError(
                f"reducescatter: {op.value} has no gradient here, expected Sum or Average"
            )
        joined = operations.grouped_allgather(gradients, _backward_name(name), process_set)
        size = (process_set.size() or 1) if op is Sum else 1
        return [g * (before * after * size) for g in joined]

    return results, back


def allgather(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet
) -> tuple[list[torch.Tensor], Back]:
    """Join tensors of all ranks; returns the results and the way back."""
    results = operations.grouped_allgather(tensors, name, process_set)

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows = torch.tensor([[len(t) if t.ndim else 1 for t in tensors]])
        again = _backward_name(name)
        counts = operations.allgather(rows, again and f"{again}, rows", process_set)
        means = operations.grouped_allreduce(
            gradients, name=again, op=Average, process_set=process_set
        )
        rank = process_set.rank() or 0
        starts = counts[:rank].sum(0).tolist()
        return [
            g[start : start + (len(t) if t.ndim else 1)].reshape(t.shape)
            for g, t, start in zip(means, tensors, starts, strict=True)
        ]

    return results, back


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> tuple[list[torch.Tensor], Back]:
    """Send a tensor from one rank to all; returns the result and the way back."""
    result = operations.broadcast(tensor, root_rank, name, process_set)

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        mean = operations.allreduce(
            gradients[0], name=_backward_name(name), op=Average, process_set=process_set
        )
        own = process_set.ranks.index(root_rank) == process_set.rank()
        return [mean if own else torch.zeros_like(mean)]

    return [result], back


def alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[list[torch.Tensor], Back]:
    """Exchange rows; returns them with how many came from each rank, and the way back."""
    size = process_set.size() or 1
    if splits is None and tensor.ndim and not len(tensor) % size:
        splits = [len(tensor) // size] * size
    exchanged = operations.alltoall(tensor, splits, name, process_set)
    received = exchanged[1]

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        again = operations.alltoall(gradients[0], received, _backward_name(name), process_set)
        return [again[0]]

    return list(exchanged), back
