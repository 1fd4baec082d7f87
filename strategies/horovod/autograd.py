"""Gradients of Horovod's operations for torch.autograd.

Gradients are Horovod's, so that ported programs train as before. In the table, g are the gradients
of the results on P ranks. The factor is relative to the gradient of the sum of all losses:

| operation | gradient on a rank | factor |
| --- | --- | --- |
| allreduce Sum, Average | the same of all g | 1 |
| allreduce Adasum | Adasum of all g, as in Horovod; not the derivative | |
| allreduce Min, Max | the sum of all g where the result is this rank's, over the ties | 1 |
| allreduce Product | the sum of all g times the product of the other ranks' numbers | 1 |
| allgather | this rank's rows of the mean of all g | 1/P |
| broadcast | on the root the mean of all g, elsewhere zeros | 1/P |
| alltoall | the rows that were sent, from their receivers | 1 |
| reducescatter Sum | all g, concatenated, times P | P |
| reducescatter Average | all g, concatenated | P |

The exceptions are Min, Max and Product, where Horovod reduces g by the same op.

The backward operations also have names, so ranks may run them in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from strategies.horovod import operations, requests
from strategies.horovod.operations import Adasum, Average, Max, Min, Product, Sum
from strategies.horovod.process_sets import ProcessSet

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "differentiable", "reducescatter"]

# Ops whose gradients are reduced by the same op.
_OWN = (Sum, Average, Adasum)

Back = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


class _Operation(torch.autograd.Function):
    """Runs an operation on tensors, and its backward function on their gradients."""

    @staticmethod
    def forward(ctx: Any, run: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Detached, so that the operation itself is not recorded.
        results, ctx.back = run([tensor.detach() for tensor in tensors])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # Expanded gradients, such as those of `sum`, are not contiguous.
        return None, *ctx.back([gradient.contiguous() for gradient in gradients])


def differentiable(run: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Call `run(tensors)`, and register its backward function with autograd.

    Args:
        run: returns a list of tensors, and the function from their gradients to those of `tensors`.
        tensors: tensors that autograd tracks.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Operation.apply(run, *tensors))
    # Detached as well: without gradients the result must not refer to a graph.
    return list(run([tensor.detach() for tensor in tensors])[0])


def _backward_name(name: str | None) -> str | None:
    """Return the name of the backward operation."""
    # A backward name of its own: the forward call of the next step may run at the same time.
    return None if name is None else f"gradient of {name}"


def allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> tuple[list[torch.Tensor], Back]:
    """Reduce tensors together; return the results and the backward function."""
    before, after = factors
    results = operations.grouped_allreduce(
        tensors, name=name, op=op, prescale_factor=before, postscale_factor=after,
        process_set=process_set,
    )  # fmt: skip
    # Copies, because the program may change the results in place before the backward pass.
    kept = [] if op in _OWN else [result.clone() for result in results]

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        again = _backward_name(name)
        if op in _OWN:
            return operations.grouped_allreduce(
                # The transpose applies the factors in reverse order.
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
    # Recomputed instead of kept, which saves a copy of each tensor until the backward pass.
    scaled = [requests.scaled(tensor, before) for tensor in tensors]
    if op in (Min, Max):
        shares = [
            # After both factors, as the result is; rounding is then the same.
            (requests.scaled(x, after) == y).to(y.dtype)
            for x, y in zip(scaled, results, strict=True)
        ]
    else:
        rows = [x[None] for x in scaled]
        all_rows = operations.grouped_allgather(rows, name and f"{name}, rows", process_set)
        rank = process_set.rank() or 0
        # Without this rank's own row: the quotient result / x would fail for zeros.
        shares = [torch.cat([x[:rank], x[rank + 1 :]]).prod(0) for x in all_rows]
    # Gradients and shares in one call, which costs one reduction.
    summed = operations.grouped_allreduce(
        [*gradients, *shares], name=name, op=Sum, process_set=process_set
    )
    sums, counts = summed[: len(gradients)], summed[len(gradients) :]
    factor = before * after
    if op is Product:
        return [g * share * factor for g, share in zip(sums, shares, strict=True)]
    # Ties share the gradient, so that it is not counted several times.
    return [g * share / n * factor for g, share, n in zip(sums, shares, counts, strict=True)]


def reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> tuple[list[torch.Tensor], Back]:
    """Reduce-scatter tensors together; return the results and the backward function."""
    before, after = factors
    results = operations.grouped_reducescatter(
        tensors, name=name, op=op, prescale_factor=before, postscale_factor=after,
        process_set=process_set,
    )  # fmt: skip

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # In the backward pass, as the forward pass is valid for all ops.
        if op not in (Sum, Average):
            raise ValueError(
                f"reducescatter: {op.value} has no gradient here, expected Sum or Average"
            )
        joined = operations.grouped_allgather(gradients, _backward_name(name), process_set)
        # Horovod's factor, see the table.
        size = (process_set.size() or 1) if op is Sum else 1
        return [g * (before * after * size) for g in joined]

    return results, back


def allgather(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet
) -> tuple[list[torch.Tensor], Back]:
    """Gather tensors of all ranks; return the results and the backward function."""
    results = operations.grouped_allgather(tensors, name, process_set)

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # The lengths of other ranks are not known here; a scalar has one row.
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
    """Broadcast a tensor from one rank; return the result and the backward function."""
    result = operations.broadcast(tensor, root_rank, name, process_set)

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        mean = operations.allreduce(
            gradients[0], name=_backward_name(name), op=Average, process_set=process_set
        )
        # `root_rank` is a rank of the world; the set has its own numbers.
        own = process_set.ranks.index(root_rank) == process_set.rank()
        return [mean if own else torch.zeros_like(mean)]

    return [result], back


def alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[list[torch.Tensor], Back]:
    """Exchange rows; return rows, the number from each rank, and the backward function."""
    size = process_set.size() or 1
    # With splits the operation also returns the received numbers, which the way back needs.
    if splits is None and tensor.ndim and not len(tensor) % size:
        splits = [len(tensor) // size] * size
    exchanged = operations.alltoall(tensor, splits, name, process_set)
    received = exchanged[1]

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        again = operations.alltoall(gradients[0], received, _backward_name(name), process_set)
        return [again[0]]

    return list(exchanged), back
