"""Collectives paired with their gradients, without automatic differentiation.

Each function runs an operation, and returns the result and the backward function::

    joined, backward = allgather(own)
    ...
    gradient_of_own = backward(gradient_of_joined)

The backward function is the *adjoint*: the transpose of the operation, seen as one large matrix
between the arrays of all ranks. So gradients are those of the **sum of all ranks' losses**. If
every rank computes the same loss, that sum is `size` times the loss: compute the loss of each
rank's own examples, or divide by `size`.

| operation | result on rank r | adjoint: gradient on rank r |
| --- | --- | --- |
| `allgather` | all rows, by rank | sum of all ranks' gradients of the rows of rank r |
| `reduce_scatter` | sum over ranks, the rows of rank r | all gradients, by rank |
| `allreduce` | sum over ranks | sum of all ranks' gradients |
| `alltoall` | the rows of all ranks for r | the gradients of rows, sent back to their ranks |
| `broadcast` | the root's array | on the root: sum of all ranks' gradients |
| `scatter` | the root's rows for r | on the root: all gradients, by rank |
| `gather` | on the root: all rows | the root's gradient of the rows of rank r |
| `send` to s, `recv` on s | on s: the array | on the sender: the gradient from s |

Backward functions are *collective* if their operation is: all ranks call them, the last operation
first. Arrays are of any library; a gradient has the shape and dtype of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

import collectives as cc
from collectives import extend

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

# Takes the gradient of a result, and returns that of the argument; None on ranks without one.
Backward: TypeAlias = Callable[[Any], Any]


def allgather(x: Any, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Join the arrays of all ranks along their first axis; backward: reduce-scatter.

    Args:
        x: shape (n, ...); n may differ between ranks.
        comm: the ranks; the whole job if None.

    Returns:
        the rows of all ranks, shape (sum of n, ...), and the backward function.

    Cost: (P - 1)/P of the result's bytes in each direction, and a few bytes to exchange all n.
    """
    ranks = extend.comm_or_world(comm, "allgather")
    # The shape alone: the array itself need not live until the backward pass.
    shape = np.shape(x)

    def backward(gradient: Any) -> Any:
        # The backward pass exchanges the lengths, so the forward pass costs no extra message.
        rows = ranks.allgather(_rows(shape)).tolist()
        if rows == _even(sum(rows), ranks.size):
            # Sums during the exchange, without an array of all parts.
            return ranks.reduce_scatter(gradient, op=cc.SUM).reshape(shape)
        # Uneven shares: each rank gets all parts of its rows, and adds them in rank order.
        parts = ranks.alltoall(gradient, counts=rows)
        return parts.reshape(ranks.size, -1).sum(0).reshape(shape)

    return ranks.allgather(x), backward


def reduce_scatter(x: Any, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Sum the arrays of all ranks, and keep a share of the rows; backward: all-gather.

    Args:
        x: shape (n, ...), the same on all ranks; the first `n % size` ranks get one row more.
        comm: the ranks; the whole job if None.

    Returns:
        this rank's rows of the sum, and the backward function.
    """
    ranks = extend.comm_or_world(comm, "reduce_scatter")
    # Ranks hold consecutive shares, so joining them is the transpose.
    return ranks.reduce_scatter(x, op=cc.SUM), ranks.allgather


def allreduce(x: Any, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Sum the arrays of all ranks; backward: the same.

    Each rank's array contributes to every rank's result, so its gradient is the sum of all
    gradients.

    Args:
        x: shape (...), the same on all ranks.
        comm: the ranks; the whole job if None.

    Returns:
        the sum, and the backward function.
    """
    ranks = extend.comm_or_world(comm, "allreduce")

    # One function for both directions, because a sum over ranks is its own adjoint.
    def total(array: Any) -> Any:
        return ranks.allreduce(array, op=cc.SUM)

    return total(x), total


def alltoall(
    x: Any, *, counts: Sequence[int] | None = None, comm: cc.Communicator | None = None
) -> tuple[Any, Backward]:
    """Send some rows to every rank, and join the rows received from all ranks; backward: the same.

    Args:
        x: shape (n, ...); n may differ between ranks.
        counts: number of rows for every rank, which add up to n; even shares if None.
        comm: the ranks; the whole job if None.

    Returns:
        the rows from all ranks in rank order, and the backward function.
    """
    ranks = extend.comm_or_world(comm, "alltoall")
    result = ranks.alltoall(x, counts=counts)
    # The rows that this rank sent to each rank, which come back in the same numbers.
    rows = _even(len(x), ranks.size) if counts is None else list(counts)

    def backward(gradient: Any) -> Any:
        # Each rank learns how many rows it received from every rank.
        return ranks.alltoall(gradient, counts=ranks.alltoall(rows))

    return result, backward


def broadcast(
    x: Any, root: int = 0, *, comm: cc.Communicator | None = None
) -> tuple[Any, Backward]:
    """Return the root's array on every rank; backward: the sum on the root, None on others.

    Args:
        x: shape (...); on the other ranks any array of the same shape and dtype.
        root: rank of the array.
        comm: the ranks; the whole job if None.

    Returns:
        the root's array, and the backward function.
    """
    ranks = extend.comm_or_world(comm, "broadcast")

    def backward(gradient: Any) -> Any:
        # Every rank's result depends on the root's array, so all gradients are added.
        return ranks.reduce(gradient, root, op=cc.SUM)

    return ranks.broadcast(x, root), backward


def scatter(
    x: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    comm: cc.Communicator | None = None,
) -> tuple[Any, Backward]:
    """Divide the rows of the root's array among all ranks; backward: gather, None on others.

    Args:
        x: on the root shape (n, ...); ignored on other ranks.
        root: rank of the array.
        counts: on the root, number of rows of every rank, which add up to n; even shares if None.
        comm: the ranks; the whole job if None.

    Returns:
        this rank's rows, and the backward function.
    """
    ranks = extend.comm_or_world(comm, "scatter")

    def backward(gradient: Any) -> Any:
        # The rows of all ranks in rank order, as they were scattered.
        return ranks.gather(gradient, root)

    return ranks.scatter(x, root, counts=counts), backward


def gather(x: Any, root: int = 0, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Join the arrays of all ranks on the root; backward: each rank gets its rows' gradients.

    Args:
        x: shape (n, ...); n may differ between ranks.
        root: rank of the result.
        comm: the ranks; the whole job if None.

    Returns:
        all rows on the root, None elsewhere, and the backward function, whose argument is used on
        the root.
    """
    ranks = extend.comm_or_world(comm, "gather")
    shape = np.shape(x)

    def backward(gradient: Any) -> Any:
        # Only the root needs all lengths.
        rows = ranks.gather(_rows(shape), root)
        return ranks.scatter(gradient, root, counts=rows).reshape(shape)

    return ranks.gather(x, root), backward


def send(x: Any, dest: int, *, comm: cc.Communicator | None = None) -> tuple[None, Backward]:
    """Send an array to another rank, which calls `recv`; backward: receive its gradient.

    Args:
        x: shape (...).
        dest: another rank.
        comm: the ranks; the whole job if None.

    Returns:
        None, and the backward function, which ignores its argument and returns a NumPy array.
    """
    ranks = extend.comm_or_world(comm, "send")
    ranks.send(x, dest)
    # The roles are exchanged: the receiver's gradient travels back.
    return None, lambda _=None: ranks.recv(dest)


def recv(source: int, *, comm: cc.Communicator | None = None) -> tuple[Any, Backward]:
    """Receive an array from another rank, which calls `send`; backward: send its gradient.

    Args:
        source: another rank.
        comm: the ranks; the whole job if None.

    Returns:
        a NumPy array, and the backward function, which returns None.
    """
    ranks = extend.comm_or_world(comm, "recv")
    return ranks.recv(source), lambda gradient: ranks.send(gradient, source)


def _rows(shape: tuple[int, ...]) -> int:
    """Return the length of the first axis; a number counts as one row."""
    return shape[0] if shape else 1


def _even(count: int, size: int) -> list[int]:
    """Return each rank's number of rows in even shares."""
    # The first ranks get the rest, as `Communicator.reduce_scatter` divides rows.
    share, rest = divmod(count, size)
    return [share + (rank < rest) for rank in range(size)]
