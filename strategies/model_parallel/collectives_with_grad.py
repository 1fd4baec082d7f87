"""Collectives paired with their gradients, without automatic differentiation.

Each function carries out an operation, and returns the result together with the function that takes
the gradient back::

    joined, backward = allgather(own)
    ...
    gradient_of_own = backward(gradient_of_joined)

The way back is the *adjoint*: the transpose of the operation, seen as one large matrix between the
arrays of all ranks. So gradients are those of the **sum of all ranks' losses**. Where every rank
computes the same loss, that sum is `size` times the loss: let each rank compute the loss of its own
examples, or divide by `size`.

| operation | result on rank r | adjoint: gradient on rank r |
| --- | --- | --- |
| `allgather` | all rows, by rank | sum of all ranks' gradients of the rows of rank r |
| `reduce_scatter` | sum over ranks, the rows of rank r | all gradients, by rank |
| `allreduce` | sum over ranks | sum of all ranks' gradients |
| `alltoall` | rows that all ranks have for r | the gradients of the rows go where these came from |
| `broadcast` | the root's array | on the root: sum of all ranks' gradients |
| `scatter` | the root's rows for r | on the root: all gradients, by rank |
| `gather` | on the root: all rows | the root's gradient of the rows of rank r |
| `send` to s, `recv` on s | on s: the array | on the sender: the gradient that s has |

The way back is *collective* where the way there is: all ranks take it, the last operation first.
Arrays are of any kind that the operations take, a gradient has the shape and dtype of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

import collectives as cc

__all__ = [
    "Backward",
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

# Takes the gradient of a result, and returns that of the argument; None where there is none.
Backward: TypeAlias = Callable[[Any], Any]


def allgather(x: Any, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Join the arrays of all ranks along their first axis; back: reduce-scatter.

    Args:
        x: shape (n, ...); n may differ between ranks.
        comm: the ranks; the whole job if None.

    Returns:
        The rows of all ranks, shape (sum of n, ...), and the way back.

    Cost: there (P - 1)/P of the result's bytes; back as many, and a few to learn all n.
    """
    ranks = _ranks(comm)
    shape = np.shape(x)

    def backward(gradient: Any) -> Any:
        rows = ranks.allgather(_rows(shape)).tolist()
        if rows == _even(sum(rows), ranks.size):
            # Adds up on the way, without an array of all parts.
            return ranks.reduce_scatter(gradient, op=cc.SUM).reshape(shape)
        parts = ranks.alltoall(gradient, counts=rows)
        return parts.reshape(ranks.size, -1).sum(0).reshape(shape)

    return ranks.allgather(x), backward


def reduce_scatter(x: Any, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Add up the arrays of all ranks, and keep a share of the rows; back: all-gather.

    Args:
        x: shape (n, ...), the same on all ranks; the first `n % size` ranks get one row more.
        comm: the ranks; the whole job if None.

    Returns:
        This rank's rows of the sum, and the way back.
    """
    ranks = _ranks(comm)
    return ranks.reduce_scatter(x, op=cc.SUM), ranks.allgather


def allreduce(x: Any, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Add up the arrays of all ranks; back: the same.

    Each rank's array is part of every rank's result, and gets the gradients of all of them.

    Args:
        x: shape (...), the same on all ranks.
        comm: the ranks; the whole job if None.

    Returns:
        The sum, and the way back.
    """
    ranks = _ranks(comm)

    def total(array: Any) -> Any:
        return ranks.allreduce(array, op=cc.SUM)

    return total(x), total


def alltoall(
    x: Any, *, counts: Sequence[int] | None = None, comm: cc.Communicator | None = None
) -> tuple[Any, Backward]:
    """Give every rank some rows, and join what all ranks give to this one; back: the same.

    Args:
        x: shape (n, ...); n may differ between ranks.
        counts: the rows for every rank, which add up to n; even shares if None.
        comm: the ranks; the whole job if None.

    Returns:
        The rows from all ranks in their order, and the way back.
    """
    ranks = _ranks(comm)
    result = ranks.alltoall(x, counts=counts)
    rows = _even(len(x), ranks.size) if counts is None else list(counts)

    def backward(gradient: Any) -> Any:
        return ranks.alltoall(gradient, counts=ranks.alltoall(rows))

    return result, backward


def broadcast(
    x: Any, root: int = 0, *, comm: cc.Communicator | None = None
) -> tuple[Any, Backward]:
    """Give every rank the root's array; back: the sum on the root, None elsewhere.

    Args:
        x: shape (...); on the other ranks any array of the same shape and dtype.
        root: whose array.
        comm: the ranks; the whole job if None.

    Returns:
        The root's array, and the way back.
    """
    ranks = _ranks(comm)

    def backward(gradient: Any) -> Any:
        return ranks.reduce(gradient, root, op=cc.SUM)

    return ranks.broadcast(x, root), backward


def scatter(
    x: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    comm: cc.Communicator | None = None,
) -> tuple[Any, Backward]:
    """Share the rows of the root's array among all ranks; back: gather, None on the others.

    Args:
        x: on the root shape (n, ...); not looked at elsewhere.
        root: whose array.
        counts: on the root, the rows of every rank, which add up to n; even shares if None.
        comm: the ranks; the whole job if None.

    Returns:
        This rank's rows, and the way back.
    """
    ranks = _ranks(comm)

    def backward(gradient: Any) -> Any:
        return ranks.gather(gradient, root)

    return ranks.scatter(x, root, counts=counts), backward


def gather(x: Any, root: int = 0, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Join the arrays of all ranks on one of them; back: each rank gets its rows' gradients.

    Args:
        x: shape (n, ...); n may differ between ranks.
        root: who gets the result.
        comm: the ranks; the whole job if None.

    Returns:
        On the root all rows, elsewhere None, and the way back, whose argument counts on the root.
    """
    ranks = _ranks(comm)
    shape = np.shape(x)

    def backward(gradient: Any) -> Any:
        rows = ranks.gather(_rows(shape), root)
        return ranks.scatter(gradient, root, counts=rows).reshape(shape)

    return ranks.gather(x, root), backward


def send(x: Any, dest: int, *, comm: cc.Communicator | None = None) -> tuple[None, Backward]:
    """Send an array to another rank, which calls `recv`; back: receive its gradient.

    Args:
        x: shape (...).
        dest: another rank.
        comm: the ranks; the whole job if None.

    Returns:
        None, and the way back, whose argument does not count; what it returns is a NumPy array.
    """
    ranks = _ranks(comm)
    ranks.send(x, dest)
    return None, lambda _=None: ranks.recv(dest)


def recv(source: int, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Receive an array from another rank, which calls `send`; back: send its gradient.

    Args:
        source: another rank.
        comm: the ranks; the whole job if None.

    Returns:
        A NumPy array, and the way back, which returns None.
    """
    ranks = _ranks(comm)
    return ranks.recv(source), lambda gradient: ranks.send(gradient, source)


def _ranks(comm: cc.Communicator | None) -> cc.Communicator:
    return cc.init() if comm is None else comm


def _rows(shape: tuple[int, ...]) -> int:
    """Return the length of the first axis; a number counts as one row."""
    return shape[0] if shape else 1


def _even(count: int, size: int) -> list[int]:
    """Return the rows that each rank gets where nothing else is said."""
    share, rest = divmod(count, size)
    return [share + (rank < rest) for rank in range(size)]
