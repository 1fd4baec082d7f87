"""Collective operations for JAX, on concrete arrays and inside compiled programs.

The functions have the names and defaults of a communicator's methods. They take JAX arrays, NumPy
arrays and numbers, and return new JAX arrays, whose shapes are known while JAX traces. `comm` is
the communicator; None is the whole job.

*Collective*, as the methods are: all ranks make the same calls in the same order, compiled or not.
Compiled programs run the calls in program order. The first call on a communicator creates a private
communicator of the same ranks, when JAX compiles the call. So `.lower()` on one rank alone waits
for the other ranks.

`jax.grad` propagates gradients of the sum of all ranks' losses: compute the loss of each rank's own
examples (`strategies.model_parallel`). `jax.vmap` makes one call for the whole batch.

Example:
    >>> import collectives as cc
    >>> import jax
    >>> from strategies.jax import allreduce
    >>> comm = cc.init()
    >>> norm = jax.jit(lambda x: allreduce((x * x).sum(), op=cc.SUM, comm=comm) ** 0.5)
    >>> norm(jax.numpy.ones(4)).item() == (4 * comm.size) ** 0.5
    True
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import collectives as cc
from collectives.extend import current_origin
from strategies.jax.call_rules import Call
from strategies.jax.primitives import bind

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "grouped_allreduce",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]


def allreduce(
    x: Any, *, op: Any = cc.MEAN, comm: cc.Communicator | None = None, **options: Any
) -> Any:
    """Reduce the arrays of all ranks, and return the result on every rank.

    Args:
        x: shape (...), the same on all ranks.
        op: reduction operation. SUM and MEAN have gradients: the same reduction of the gradients.
        comm: the ranks.
        options: `algorithm`, `compression`, `prescale`, `postscale` and `timeout`, as for
            `Communicator.allreduce`.

    Returns:
        An array of the shape and dtype of `x`.
    """
    return _call("allreduce", x, comm, options, op=_checked(op, "allreduce"))


def grouped_allreduce(
    tree: Any, *, op: Any = cc.MEAN, comm: cc.Communicator | None = None, **options: Any
) -> Any:
    """Reduce all arrays of a tree in one call.

    Arguments as `allreduce`, for every leaf.

    Returns:
        A tree of the same structure.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    call = _describe("grouped_allreduce", comm, options, op=_checked(op, "grouped_allreduce"))
    results = bind(call, [jnp.asarray(x) for x in leaves]) if leaves else []
    return jax.tree_util.tree_unflatten(structure, results)


def reduce(
    x: Any,
    root: int = 0,
    *,
    op: Any = cc.MEAN,
    comm: cc.Communicator | None = None,
    **options: Any,
) -> Any:
    """Reduce the arrays of all ranks on one rank; gradient: the root's on every rank.

    Arguments as `allreduce`; options are `algorithm` and `timeout`.

    Returns:
        On the root an array of the shape and dtype of `x`, elsewhere zeros.
    """
    return _call("reduce", x, comm, options, op=_checked(op, "reduce"), root=root)


def broadcast(x: Any, root: int = 0, *, comm: cc.Communicator | None = None, **options: Any) -> Any:
    """Return the root's array on every rank; gradient: the sum on the root, zeros elsewhere.

    Args:
        x: shape (...); on the other ranks any array of the same shape and dtype.
        root: rank of the array.
        comm: the ranks.
        options: `algorithm` and `timeout`.
    """
    return _call("broadcast", x, comm, options, root=root)


def allgather(
    x: Any, *, tiled: bool = True, comm: cc.Communicator | None = None, **options: Any
) -> Any:
    """Join the arrays of all ranks on every rank; gradient: `reduce_scatter` of the sum.

    Args:
        x: shape (n, ...), the same on all ranks; a number counts as one row.
        tiled: whether to join along the first axis; False adds an axis of ranks.
        comm: the ranks.
        options: `algorithm` and `timeout`.

    Returns:
        An array of shape (size * n, ...), or (size, n, ...) if not tiled.
    """
    ranks, x = _ranks(comm), _row(x, tiled)
    return _call("allgather", x, ranks, options, rows=ranks.size * x.shape[0])


def gather(
    x: Any,
    root: int = 0,
    *,
    tiled: bool = True,
    comm: cc.Communicator | None = None,
    **options: Any,
) -> Any:
    """Join the arrays of all ranks on one rank; gradient: each rank's rows from the root.

    Arguments as `allgather`.

    Returns:
        On the root as `allgather`; elsewhere an array without rows.
    """
    ranks, x = _ranks(comm), _row(x, tiled)
    rows = ranks.size * x.shape[0] if ranks.rank == root else 0
    return _call("gather", x, ranks, options, root=root, rows=rows)


def scatter(x: Any, root: int = 0, *, comm: cc.Communicator | None = None, **options: Any) -> Any:
    """Divide the rows of the root's array among all ranks; gradient: all rows on the root.

    Args:
        x: on the root shape (size * n, ...); elsewhere any array of the result's shape and dtype.
        root: rank of the array.
        comm: the ranks.
        options: `algorithm` and `timeout`.

    Returns:
        This rank's rows, shape (n, ...).
    """
    ranks, x = _ranks(comm), jnp.asarray(x)
    rows = _share(x, ranks, "scatter") if ranks.rank == root else _count(x, "scatter")
    return _call("scatter", x, ranks, options, root=root, rows=rows)


def reduce_scatter(
    x: Any, *, op: Any = cc.MEAN, comm: cc.Communicator | None = None, **options: Any
) -> Any:
    """Reduce the arrays of all ranks, and keep a share of the rows; gradient: `allgather`.

    Args:
        x: shape (n, ...), the same on all ranks; the first `n % size` ranks get one row more.
        op: reduction operation.
        comm: the ranks.
        options: `algorithm` and `timeout`.
    """
    ranks, x = _ranks(comm), jnp.asarray(x)
    share, rest = divmod(_count(x, "reduce_scatter"), ranks.size)
    return _call(
        "reduce_scatter", x, ranks, options, op=_checked(op, "reduce_scatter"),
        rows=share + (ranks.rank < rest),
    )  # fmt: skip


def alltoall(x: Any, *, comm: cc.Communicator | None = None, **options: Any) -> Any:
    """Send each rank a share of the rows, and join the received rows; gradient: the same.

    Args:
        x: shape (size * n, ...), the same on all ranks.
        comm: the ranks.
        options: `algorithm` and `timeout`.
    """
    ranks, x = _ranks(comm), jnp.asarray(x)
    _share(x, ranks, "alltoall")
    return _call("alltoall", x, ranks, options, rows=x.shape[0])


def scan(x: Any, *, op: Any = cc.SUM, comm: cc.Communicator | None = None, **options: Any) -> Any:
    """Reduce the arrays of ranks 0 to r on rank r; gradient: a scan in reverse order.

    Arguments as `allreduce`; options are `algorithm` and `timeout`.
    """
    return _call("scan", x, comm, options, op=_checked(op, "scan"))


def exscan(x: Any, *, op: Any = cc.SUM, comm: cc.Communicator | None = None, **options: Any) -> Any:
    """Reduce the arrays of ranks 0 to r - 1 on rank r; zeros on rank 0. Otherwise as `scan`."""
    return _call("exscan", x, comm, options, op=_checked(op, "exscan"))


def send(
    x: Any, dest: int, *, tag: int = 0, comm: cc.Communicator | None = None, **options: Any
) -> Any:
    """Send an array to another rank, which calls `recv`; gradient: the receiver's.

    Args:
        x: shape (...).
        dest: another rank.
        tag: integer that the other rank passes.
        comm: the ranks; only both ranks call.
        options: `timeout`.

    Returns:
        A scalar 0 of the dtype of `x`. Add it to the loss of a rank whose gradients depend on the
        receiver's, because `jax.grad` differentiates what a loss depends on.
    """
    return _call("send", x, comm, options, dest=dest, tag=tag)


def recv(
    like: Any, source: int, *, tag: int = 0, comm: cc.Communicator | None = None, **options: Any
) -> Any:
    """Receive an array from another rank, which calls `send`.

    Args:
        like: any array of the shape and dtype that was sent. The gradient travels back to the
            sender if `like` depends on a differentiated argument, as `0 * w` does; its own gradient
            is zero.
        source: another rank.
        tag: as for `send`.
        comm: the ranks.
        options: `timeout`.
    """
    return _call("recv", like, comm, options, source=source, tag=tag)


def sendrecv(
    x: Any,
    dest: int | None,
    source: int | None,
    *,
    tag: int = 0,
    comm: cc.Communicator | None = None,
    **options: Any,
) -> Any:
    """Send an array to one rank and receive one of the same shape; gradient: the way back.

    Args:
        x: shape (...).
        dest: rank that receives; None at the edge of a grid, where no rank does.
        source: rank that sends; None at the edge of a grid. This rank itself if it is also `dest`.
        tag: as for `send`.
        comm: the ranks.
        options: `timeout`.

    Returns:
        The array from `source`; zeros without one.
    """
    return _call("sendrecv", x, comm, options, dest=dest, source=source, tag=tag)


def barrier(*, comm: cc.Communicator | None = None, **options: Any) -> None:
    """Wait for all ranks, at this place of a program; options are `algorithm` and `timeout`."""
    bind(_describe("barrier", comm, options), [])


def _ranks(comm: cc.Communicator | None) -> cc.Communicator:
    return cc.init() if comm is None else comm


def _describe(
    operation: str, comm: cc.Communicator | None, options: dict[str, Any], **facts: Any
) -> Call:
    return Call(
        operation, _ranks(comm), current_origin(), options=tuple(sorted(options.items())), **facts
    )


def _call(
    operation: str, x: Any, comm: cc.Communicator | None, options: dict[str, Any], **facts: Any
) -> Any:
    (result,) = bind(_describe(operation, comm, options, **facts), [jnp.asarray(x)])
    return result


def _checked(op: Any, operation: str) -> Any:
    if op in (cc.MINLOC, cc.MAXLOC):
        raise ValueError(
            f"{operation}: locations are not available in strategies.jax, expected another op than "
            f"{op.value}"
        )
    return op


def _row(x: Any, tiled: bool) -> Any:
    """Return the rows of a rank; without tiling the whole array is one row."""
    array = jnp.asarray(x)
    return array if tiled and array.ndim else array[jnp.newaxis]


def _count(x: Any, operation: str) -> int:
    if not x.ndim:
        raise ValueError(f"{operation}: expected an array of rows, got a scalar")
    rows: int = x.shape[0]
    return rows


def _share(x: Any, comm: cc.Communicator, operation: str) -> int:
    """Return the number of rows for each rank."""
    rows = _count(x, operation)
    if rows % comm.size:
        raise ValueError(
            f"{operation}: expected a multiple of the number of ranks {comm.size}, got {rows} rows"
        )
    return rows // comm.size
