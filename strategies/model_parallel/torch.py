"""Differentiable collectives for PyTorch, and `Stages`, a pipeline.

The functions match those of `collectives_with_grad`, except that autograd runs the backward pass::

    joined = model_parallel.torch.allgather(own)
    loss(joined).backward()

On a rank without a result (after `send`, or after `gather` except on the root) a function returns a
scalar 0 in its place: a rank without a loss of its own calls `backward` on it. The ranks agree on
whether gradients are propagated: they are if any rank needs one. Autograd runs the last operation
first, so ranks with the same operations run backward in the same order.

Example:
    >>> import collectives as cc
    >>> import torch
    >>> from strategies.model_parallel import torch as parallel
    >>> comm = cc.init()
    >>> x = torch.ones(3, requires_grad=True)
    >>> parallel.allreduce(x, comm=comm).sum().backward()
    >>> x.grad.tolist() == [comm.size] * 3
    True
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import collectives as cc
from collectives import extend
from strategies.model_parallel import collectives_with_grad
from strategies.model_parallel.stages import Stages

__all__ = [
    "Stages",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "gather",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]

_Block = Callable[..., tuple[Any, collectives_with_grad.Backward]]


def allgather(x: Any, *, comm: cc.Communicator | None = None) -> Any:
    """Join the tensors of all ranks along their first axis."""
    return _collective(collectives_with_grad.allgather, x, comm)


def reduce_scatter(x: Any, *, comm: cc.Communicator | None = None) -> Any:
    """Sum the tensors of all ranks, and keep a share of the rows."""
    return _collective(collectives_with_grad.reduce_scatter, x, comm)


def allreduce(x: Any, *, comm: cc.Communicator | None = None) -> Any:
    """Sum the tensors of all ranks."""
    return _collective(collectives_with_grad.allreduce, x, comm)


def alltoall(
    x: Any, *, counts: Sequence[int] | None = None, comm: cc.Communicator | None = None
) -> Any:
    """Send some rows to every rank, and join the rows received from all ranks."""
    return _collective(collectives_with_grad.alltoall, x, comm, counts=counts)


def broadcast(x: Any, root: int = 0, *, comm: cc.Communicator | None = None) -> Any:
    """Return the root's tensor on every rank."""
    return _collective(collectives_with_grad.broadcast, x, comm, root=root)


def scatter(
    x: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    comm: cc.Communicator | None = None,
) -> Any:
    """Divide the rows of the root's tensor among all ranks; `x` may be None on other ranks."""
    return _collective(collectives_with_grad.scatter, x, comm, root=root, counts=counts)


def gather(x: Any, root: int = 0, *, comm: cc.Communicator | None = None) -> Any:
    """Join the tensors of all ranks on the root; a scalar 0 elsewhere."""
    return _collective(collectives_with_grad.gather, x, comm, root=root)


def send(x: Any, dest: int, *, comm: cc.Communicator | None = None) -> Any:
    """Send a tensor to another rank; return a scalar 0 for the backward pass."""
    ranks = extend.comm_or_world(comm, "send")
    # Sent first: the receiver must know whether it has a backward pass that sends a gradient.
    needed = _asks(x)
    # As a message of its own: a tensor cannot carry the flag.
    ranks.send(needed, dest)
    return _apply(x, functools.partial(collectives_with_grad.send, dest=dest, comm=ranks), needed)


def recv(source: int, *, comm: cc.Communicator | None = None) -> Any:
    """Receive a tensor on the CPU from another rank, which calls `send`."""
    ranks = extend.comm_or_world(comm, "recv")
    needed = bool(ranks.recv(source))
    return _apply(None, lambda _: collectives_with_grad.recv(source, comm=ranks), needed)


def _collective(block: _Block, x: Any, comm: cc.Communicator | None, **how: Any) -> Any:
    """Run an operation on all ranks."""
    ranks = extend.comm_or_world(comm, block.__name__)
    # A rank whose tensor needs no gradient must still take part in the backward operation.
    needed = bool(ranks.allreduce(_asks(x), op=cc.MAX))
    return _apply(x, functools.partial(block, comm=ranks, **how), needed)


def _asks(x: Any) -> bool:
    """Return whether this rank needs the gradient of `x`."""
    import torch

    return x is not None and bool(x.requires_grad) and torch.is_grad_enabled()


def _apply(x: Any, block: _Block, needed: bool) -> Any:
    """Run an operation; `needed` says whether its backward function will run."""
    import torch

    # Makes autograd call the function even if `x` needs no gradient.
    anchor = torch.zeros((), requires_grad=needed)
    return _function().apply(x, anchor, block)


@functools.cache
def _function() -> Any:
    """Return the autograd function of all operations; defined here because torch is optional."""
    import torch

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, anchor: Any, block: Any) -> Any:
            # Without a tensor the result is on the CPU, like the anchor.
            ctx.place = (x if x is not None else anchor).device
            # Detached, because the operation must not be part of the graph itself.
            result, ctx.way_back = block(None if x is None else x.detach())
            if result is None:
                # A scalar for `backward` on ranks without a result.
                return x.new_zeros(())
            return torch.as_tensor(result, device=ctx.place)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            # Autograd may pass expanded views, such as from `sum`, which cannot be sent.
            back = ctx.way_back(gradients[0].contiguous())
            # One gradient per argument of `forward`; `anchor` and `block` need none.
            return None if back is None else torch.as_tensor(back, device=ctx.place), None, None

    return Block
