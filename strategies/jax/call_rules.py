"""Operations on traced arrays, in one table: what moves, result shapes and adjoints.

The handler of compiled programs, the transformation rules and the tests read `RULES`. This module
computes on NumPy arrays and integers only.

An operation is a linear map between the arrays of all ranks, if its reduction is SUM or MEAN. Its
*adjoint* is the transposed map, which carries gradients back:

| operation | adjoint |
| --- | --- |
| `allreduce`, `grouped_allreduce`, `alltoall` | the same |
| `allgather` | `reduce_scatter` |
| `broadcast` | `reduce` |
| `gather` | `scatter` |
| `scan`, `exscan` | the same over the ranks in reverse order |
| `send` | `recv` |
| `sendrecv` | the same with `dest` and `source` exchanged |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import collectives as cc
from collectives.extend import CallOrigin, calls_from, check_usable

__all__ = [
    "RULES",
    "Call",
    "Rule",
    "adjoint_of",
    "communicator_of",
    "forget",
    "is_repeatable",
    "run",
]

Array: TypeAlias = np.ndarray[Any, Any]
Shape: TypeAlias = tuple[int, ...]


class Call(NamedTuple):
    """One call in a program: a parameter of its primitive, so all values have a hash.

    Attributes:
        operation: key of `RULES`.
        comm: the user's communicator.
        origin: line of the program.
        op: reduction, such as `cc.SUM`; None for operations that only move data.
        root: rank of `broadcast`, `gather`, `reduce` and `scatter`.
        dest: rank that receives a message; None for none.
        source: rank that sends a message; None for none.
        tag: tag of a message.
        rows: length of the result's first axis, where it differs from the operand's.
        reverse: whether rank r reduces the arrays of the ranks above, for the adjoint of a scan.
        options: other keywords of the communicator's method, such as `timeout`.
    """

    operation: str
    comm: cc.Communicator
    origin: CallOrigin
    op: Any = None
    root: int = 0
    dest: int | None = None
    source: int | None = None
    tag: int = 0
    rows: int = 0
    reverse: bool = False
    options: tuple[tuple[str, Any], ...] = ()


class Rule(NamedTuple):
    """One operation.

    Attributes:
        move: runs the call: `move(comm, call, operands, results)` fills the results.
        shape: shape of a result, from the call and the operand's shape.
        adjoint: the call that carries gradients back, from the call and the operand's first axis.
        has_rows: whether the first axis counts rows; `vmap` then adds its axis behind.
    """

    move: Callable[[cc.Communicator, Call, Sequence[Array], Sequence[Array]], None]
    shape: Callable[[Call, Shape], Shape]
    adjoint: Callable[[Call, int], Call]
    has_rows: bool = False


def adjoint_of(call: Call, rows: int) -> tuple[Call, float]:
    """Return the call that carries gradients back, and a factor of the gradient before it.

    Args:
        call: the call.
        rows: length of the operand's first axis.

    Raises:
        ValueError: the reduction has no gradient.
    """
    if call.op not in (None, cc.SUM, cc.MEAN):
        raise ValueError(
            f"{call.operation}: this reduction has no gradient, expected SUM or MEAN, got "
            f"{call.op.value}; use jax.lax.stop_gradient where you need none"
        )
    adjoint = RULES[call.operation].adjoint(call, rows)
    if call.op is not cc.MEAN or adjoint.op is cc.MEAN:
        return adjoint, 1.0
    # A scan divides by the number of arrays that it has added on this rank.
    rank, size = call.comm.rank, call.comm.size
    divisor = {"scan": rank + 1, "exscan": max(rank, 1)}.get(call.operation, size)
    return adjoint, 1 / divisor


# User's communicator -> communicator of the programs.
_private: weakref.WeakKeyDictionary[cc.Communicator, cc.Communicator]
_private = weakref.WeakKeyDictionary()


def communicator_of(call: Call) -> cc.Communicator:
    """Return the communicator that a call uses; *collective* before the first collective call.

    JAX runs programs in a thread of its own, while the program's thread calls operations of the
    user's communicator. Messages between two ranks need no separate communicator, because any
    thread may send and receive.
    """
    if call.operation in _MESSAGES:
        return call.comm
    own = _private.get(call.comm)
    if own is None:
        own = call.comm.split(0, call.comm.rank)
        assert own is not None
        _private[call.comm] = own
    return own


def forget(comm: cc.Communicator) -> None:
    """Drop the private communicator of a closed or failed communicator."""
    _private.pop(comm, None)


def is_repeatable(call: Call) -> bool:
    """Return whether a plan of the communicator alone fills the result on this rank."""
    return call.operation in ("allreduce", "broadcast")


def run(call: Call, operands: Sequence[Array], results: Sequence[Array]) -> None:
    """Run a call on host arrays; errors name the line of the program."""
    check_usable(call.comm, call.operation)
    with calls_from(call.origin):
        RULES[call.operation].move(communicator_of(call), call, operands, results)


def _options(call: Call) -> dict[str, Any]:
    return dict(call.options)


def _timeout(call: Call) -> tuple[tuple[str, Any], ...]:
    """Return the only option that every operation has."""
    return tuple(pair for pair in call.options if pair[0] == "timeout")


def _reducing(name: str) -> Callable[..., None]:
    """Return the `move` of a reduction to all ranks."""

    def move(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
        getattr(comm, name)(operands[0], op=call.op, out=results[0], **_options(call))

    return move


def _joining(name: str) -> Callable[..., None]:
    """Return the `move` of an operation without a reduction or root."""

    def move(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
        getattr(comm, name)(operands[0], out=results[0], **_options(call))

    return move


def _reduce(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    if comm.rank != call.root:
        results[0][...] = 0
    comm.reduce(operands[0], call.root, op=call.op, out=results[0], **_options(call))


def _scan(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    exclusive = call.operation == "exscan"
    if call.reverse:
        # The ranks below get this rank's array. A sum of P arrays per rank costs P times the bytes
        # of a scan, but needs no communicator in reverse order.
        parts = np.zeros((comm.size, *operands[0].shape), operands[0].dtype)
        parts[: comm.rank + (not exclusive)] = operands[0]
        out = results[0][np.newaxis]
        comm.reduce_scatter(parts, op=cc.SUM, out=out, **_options(call))
        return
    if exclusive and comm.rank == 0:
        results[0][...] = 0
    method = comm.exscan if exclusive else comm.scan
    method(operands[0], op=call.op, out=results[0], **_options(call))


def _broadcast(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    comm.broadcast(operands[0], call.root, out=results[0], **_options(call))


def _gather(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    if comm.rank != call.root:
        results[0][...] = 0
    comm.gather(operands[0], call.root, out=results[0], **_options(call))


def _scatter(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    comm.scatter(operands[0], call.root, out=results[0], **_options(call))


def _grouped_allreduce(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    comm.grouped_allreduce(operands, op=call.op, out=results, **_options(call))


def _send(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    assert call.dest is not None
    comm.send(operands[0], call.dest, tag=call.tag, **_options(call))
    results[0][...] = 0


def _recv(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    comm.recv(call.source, tag=call.tag, out=results[0], **_options(call))


def _sendrecv(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    # A rank sends no message to itself, as the only rank of a periodic grid would.
    if call.dest == call.source == comm.rank:
        results[0][...] = operands[0]
        return
    if call.dest is not None:
        _send(comm, call, operands, [np.empty(())])
    if call.source is None:
        results[0][...] = 0
    else:
        _recv(comm, call, operands, results)


def _barrier(comm: cc.Communicator, call: Call, operands: Any, results: Any) -> None:
    comm.barrier(**_options(call))


def _same_shape(call: Call, shape: Shape) -> Shape:
    return shape


def _rows(call: Call, shape: Shape) -> Shape:
    return (call.rows, *shape[1:])


def _itself(call: Call, rows: int) -> Call:
    return call


def _becomes(operation: str, op: Any = None) -> Callable[[Call, int], Call]:
    """Return the `adjoint` that runs another operation with the same root, ranks and timeout."""

    def adjoint(call: Call, rows: int) -> Call:
        return call._replace(operation=operation, op=op, rows=rows, options=_timeout(call))

    return adjoint


def _reversed(call: Call, rows: int) -> Call:
    return call._replace(op=cc.SUM, reverse=not call.reverse, options=_timeout(call))


def _answered(operation: str) -> Callable[[Call, int], Call]:
    """Return the `adjoint` of a message: `operation` with source and destination exchanged."""
    return lambda call, rows: call._replace(operation=operation, dest=call.source, source=call.dest)


_MESSAGES = ("recv", "send", "sendrecv")

RULES = {
    "allgather": Rule(
        _joining("allgather"), _rows, _becomes("reduce_scatter", cc.SUM), has_rows=True
    ),
    "allreduce": Rule(_reducing("allreduce"), _same_shape, _itself),
    "alltoall": Rule(_joining("alltoall"), _rows, _itself, has_rows=True),
    "barrier": Rule(_barrier, _same_shape, _itself),
    "broadcast": Rule(_broadcast, _same_shape, _becomes("reduce", cc.SUM)),
    "exscan": Rule(_scan, _same_shape, _reversed),
    "gather": Rule(_gather, _rows, _becomes("scatter"), has_rows=True),
    "grouped_allreduce": Rule(_grouped_allreduce, _same_shape, _itself),
    "recv": Rule(_recv, _same_shape, _answered("send")),
    "reduce": Rule(_reduce, _same_shape, _becomes("broadcast")),
    "reduce_scatter": Rule(
        _reducing("reduce_scatter"), _rows, _becomes("allgather"), has_rows=True
    ),
    "scan": Rule(_scan, _same_shape, _reversed),
    "scatter": Rule(_scatter, _rows, _becomes("gather"), has_rows=True),
    "send": Rule(_send, lambda call, shape: (), _answered("recv")),
    "sendrecv": Rule(_sendrecv, _same_shape, _answered("sendrecv")),
}
