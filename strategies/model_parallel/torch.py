"""Differentiable collectives for PyTorch.

They take and return what those of `blocks` do, but for the way back, which `backward` takes::

    joined = model_parallel.torch.allgather(own)
    loss(joined).backward()

Where a block has no result on a rank (after `send`, after `gather` on all but the root) it returns
a scalar 0 that stands for the result elsewhere: a rank without a loss of its own calls `backward`
on that. The ranks agree on whether a gradient goes back: it does if any of them asks for one.
Autograd takes the last operation first, so ranks that make the same operations go back in the same
order.

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
from strategies.model_parallel import collectives_with_grad

__all__ = [
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
    """Add up the tensors of all ranks, and keep a share of the rows."""
    return _collective(collectives_with_grad.reduce_scatter, x, comm)


def allreduce(x: Any, *, comm: cc.Communicator | None = None) -> Any:
    """Add up the tensors of all ranks."""
    return _collective(collectives_with_grad.allreduce, x, comm)


def alltoall(
    x: Any, *, counts: Sequence[int] | None = None, comm: cc.Communicator | None = None
) -> Any:
    """Give every rank some rows, and join what all ranks give to this one."""
    return _collective(collectives_with_grad.alltoall, x, comm, counts=counts)


def broadcast(x: Any, root: int = 0, *, comm: cc.Communicator | None = None) -> Any:
    """Give every rank the root's tensor."""
    return _collective(collectives_with_grad.broadcast, x, comm, root=root)


def scatter(
    x: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    comm: cc.Communicator | None = None,
) -> Any:
    """Share the rows of the root's tensor among all ranks; elsewhere `x` may be None."""
    return _collective(collectives_with_grad.scatter, x, comm, root=root, counts=counts)


def gather(x: Any, root: int = 0, *, comm: cc.Communicator | None = None) -> Any:
    """Join the tensors of all ranks on the root; a scalar 0 elsewhere."""
    return _collective(collectives_with_grad.gather, x, comm, root=root)


def send(x: Any, dest: int, *, comm: cc.Communicator | None = None) -> Any:
    """Send a tensor to another rank, and return a scalar 0 that stands for it."""
    ranks = cc.init() if comm is None else comm
    needed = _asks(x)
    ranks.send(needed, dest)
    return _apply(x, functools.partial(collectives_with_grad.send, dest=dest, comm=ranks), needed)


def recv(source: int, *, comm: cc.Communicator | None = None) -> Any:
    """Receive a tensor on the CPU from another rank, which calls `send`."""
    ranks = cc.init() if comm is None else comm
    needed = bool(ranks.recv(source))
    return _apply(None, lambda _: collectives_with_grad.recv(source, comm=ranks), needed)


def _collective(block: _Block, x: Any, comm: cc.Communicator | None, **how: Any) -> Any:
    """Carry out a block on all ranks."""
    ranks = cc.init() if comm is None else comm
    needed = bool(ranks.allreduce(_asks(x), op=cc.MAX))
    return _apply(x, functools.partial(block, comm=ranks, **how), needed)


def _asks(x: Any) -> bool:
    """Tell whether this rank wants the gradient of `x`."""
    import torch

    return x is not None and bool(x.requires_grad) and torch.is_grad_enabled()


def _apply(x: Any, block: _Block, needed: bool) -> Any:
    """Carry out a block; `needed` says whether its way back will be taken."""
    import torch

    # What makes autograd come by where `x` itself has no gradient.
    anchor = torch.zeros((), requires_grad=needed)
    return _function().apply(x, anchor, block)


@functools.cache
def _function() -> Any:
    """Return the autograd function of all blocks; made here, since torch may be absent."""
    import torch

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, anchor: Any, block: Any) -> Any:
            ctx.place = (x if x is not None else anchor).device
            result, ctx.way_back = block(None if x is None else x.detach())
            if result is None:
                return x.new_zeros(())
            return torch.as_tensor(result, device=ctx.place)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            back = ctx.way_back(gradients[0].contiguous())
            return None if back is None else torch.as_tensor(back, device=ctx.place), None, None

    return Block
