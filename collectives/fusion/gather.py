"""`grouped_allgather`, `grouped_reduce_scatter` and `grouped_broadcast`.

Arrays of any dtypes and shapes are packed side by side, so that all of them take one way:

    grouped_broadcast         the root's arrays are one stream of bytes
    grouped_allgather         so are each rank's; all tell how many rows they bring before
    grouped_reduce_scatter    by dtype; first what rank 0 gets of each array, then rank 1, and so on

    arrays    | a | b |    rank 0's stream    | a0 | b0 |    to be reduced    | a0 b0 | a1 b1 |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypedDict, overload

import numpy as np

from collectives.arrays import host_arrays, lowering
from collectives.arrays.host_arrays import Array, HostArgument, RowsOut
from collectives.arrays.reduction import MEAN, Op
from collectives.calls import counts as row_counts
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, CommonOptions, Detachable, Numbers, Unpack
from collectives.fusion import bucket_layout
from collectives.fusion.allreduce import pairs, result_view
from collectives.plans import planner as plans
from collectives.plans.by_messages import ReduceSpec

__all__ = [
    "FusedReduceOptions",
    "grouped_allgather",
    "grouped_broadcast",
    "grouped_reduce_scatter",
]


class FusedReduceOptions(TypedDict, total=False):
    """Options of `grouped_reduce_scatter`, for type checkers."""

    op: Op
    prescale: float
    postscale: float
    algorithm: str
    timeout: float | None


@overload
def grouped_broadcast(
    group: Group, xs: Sequence[Numbers], root: int = 0, *, out: None = None,
    **options: Unpack[CommonOptions],
) -> list[Array]: ...  # fmt: skip
@overload
def grouped_broadcast(
    group: Group, xs: Sequence[Detachable[A]], root: int = 0, *, out: None = None,
    **options: Unpack[CommonOptions],
) -> list[A]: ...  # fmt: skip
@overload
def grouped_broadcast(
    group: Group, xs: Sequence[A], root: int = 0, *, out: None = None,
    **options: Unpack[CommonOptions],
) -> list[A]: ...  # fmt: skip
@overload
def grouped_broadcast(
    group: Group, xs: Sequence[object], root: int = 0, *, out: Sequence[A],
    **options: Unpack[CommonOptions],
) -> list[A]: ...  # fmt: skip
def grouped_broadcast(
    group: Group,
    xs: Sequence[Any],
    root: int = 0,
    *,
    out: Sequence[Any] | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> list[Any]:
    """Give every rank the root's arrays, as if `broadcast` were called for each.

    Args:
        xs: arrays of any kinds, shapes and dtypes; on the other ranks any arrays of the same shapes
            and dtypes.
        root: whose arrays.
        out: where to put the results, an array for each of `xs`, perhaps that one itself.
        algorithm: as for `broadcast`; not "nccl".
        timeout: seconds.

    Returns:
        The arrays of `out`; or one new array for each of `xs`, of its kind, shape and dtype, those
        of NumPy and PyTorch as views of one piece of memory.

    Raises:
        ValueError: no such root, there is not an `out` for each array, or one does not fit.
        MismatchError: ranks differ in number, shapes or dtypes; on all ranks.

    Cost: that of one broadcast of all bytes, and a copy of them.
    """
    with begin_call(group, "grouped_broadcast", timeout) as call:
        loans = [
            host_arrays.host_view(x, to, operation=call.operation)
            for x, to in pairs(call.operation, xs, out)
        ]
        call.check_root(root)
        kinds = [(str(loan.host.dtype), loan.host.shape) for loan in loans]
        arrays = bucket_layout.summary(kinds)
        call.describe(count=len(loans), arrays=arrays, root=root, algorithm=algorithm)
        own = group.rank == root
        starts, nbytes = _places([loan.host for loan in loans])
        stream = np.empty(nbytes, np.uint8)
        parts = [_part(stream, at, loan.host) for at, loan in zip(starts, loans, strict=True)]
        for part, loan in zip(parts, loans, strict=True):
            if own:
                part[...] = loan.host
        plans.broadcast(call, stream, root, algorithm).first(call, stream, stream)
    made = [
        host_arrays.in_order_of(loan.host, part) for part, loan in zip(parts, loans, strict=True)
    ]
    return [result_view(part, loan, out) for part, loan in zip(made, loans, strict=True)]


@overload
def grouped_allgather(
    group: Group, xs: Sequence[Numbers], *, out: None = None, **options: Unpack[CommonOptions]
) -> list[Array]: ...
@overload
def grouped_allgather(
    group: Group, xs: Sequence[Detachable[A]], *, out: None = None, **options: Unpack[CommonOptions]
) -> list[A]: ...
@overload
def grouped_allgather(
    group: Group, xs: Sequence[A], *, out: None = None, **options: Unpack[CommonOptions]
) -> list[A]: ...
@overload
def grouped_allgather(
    group: Group, xs: Sequence[object], *, out: Sequence[A], **options: Unpack[CommonOptions]
) -> list[A]: ...
def grouped_allgather(
    group: Group,
    xs: Sequence[Any],
    *,
    out: Sequence[Any] | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> list[Any]:
    """Join the arrays of all ranks on every rank, as if `allgather` were called for each.

    Args:
        xs: arrays of any kinds and dtypes, shape (n, ...) each; n may differ between ranks and
            arrays, the rest may not between ranks; a scalar counts as shape (1,).
        out: where to put the results, an array of its shape for each of `xs`.
        algorithm: as for `allgather`.
        timeout: seconds.

    Returns:
        The arrays of `out`; or new arrays of shape (sum of n, ...), of the kinds of `xs`, in the
        order of the ranks.

    Raises:
        ValueError: there is not an `out` for each array, or one does not fit; the other ranks get a
            `MismatchError`.
        MismatchError: ranks differ in number, dtypes or shapes of rows; on all ranks.

    Cost: two meetings; or two exchanges of messages, that of one all-gather of all bytes and one of
        16 bytes for each array.
    """
    with begin_call(group, "grouped_allgather", timeout) as call:
        arrays, tos = [], []
        for x, to in pairs(call.operation, xs, out):
            loan = host_arrays.host_view(x, operation=call.operation)
            array = np.ascontiguousarray(np.atleast_1d(loan.host))
            row, dtype = array.shape[1:], array.dtype
            tos.append(host_arrays.check_out_rows(to, row, dtype, loan, operation=call.operation))
            arrays.append(array)
        kinds = [(str(array.dtype), array.shape[1:]) for array in arrays]
        shapes = bucket_layout.summary(kinds)
        call.describe(count=len(arrays), arrays=shapes, algorithm=algorithm)
        told = call.exchange_integers(*(len(array) for array in arrays), *(to.number for to in tos))
        told = told.reshape(group.size, 2, len(arrays))
        rows = told[:, 0].T.tolist()  # of each array, how many each rank brings
        for array, given, numbers in zip(arrays, told[:, 1].T.tolist(), rows, strict=True):
            expected = [sum(numbers)] * group.size
            if error := row_counts.output_mismatch(
                group, call.operation, array.shape[1:], given, expected
            ):
                raise call.announce(error)
        results = _fused_gather(call, arrays, rows, tos, algorithm)
    return [to.restore(result) for to, result in zip(tos, results, strict=True)]


def _fused_gather(
    call: Call,
    arrays: Sequence[Array],
    rows: Sequence[Sequence[int]],
    tos: Sequence[RowsOut],
    algorithm: str,
) -> list[Array]:
    """Move what each rank has packed, once all know how many rows of each array it brings."""
    size, rank = call.group.size, call.group.rank
    widths = [array.itemsize * math.prod(array.shape[1:]) for array in arrays]
    streams = [
        bucket_layout.offsets(
            [numbers[source] * width for numbers, width in zip(rows, widths, strict=True)],
            range(len(arrays)),
        )
        for source in range(size)
    ]
    bounds = [0, *itertools.accumulate(nbytes for _, nbytes in streams)]
    engine = call.engine_for(algorithm)
    everything = np.empty(bounds[-1] if engine is None else 0, np.uint8)
    own = np.empty(streams[rank][1], np.uint8)
    if engine is None:
        own = everything[bounds[rank] : bounds[rank + 1]]
    for at, array in zip(streams[rank][0], arrays, strict=True):
        own[at : at + array.nbytes] = host_arrays.raw_bytes(array)
    flats, results, wanted = [], [], []
    for i, (array, numbers, to) in enumerate(zip(arrays, rows, tos, strict=True)):
        shape = (sum(numbers), *array.shape[1:])
        result, flat = host_arrays.output(to.target, shape, array.dtype, None)
        results.append(result)
        flats.append(flat)
        ends = itertools.accumulate(n * widths[i] for n in numbers)
        raw = host_arrays.raw_bytes(flat)
        for source, end in enumerate(ends):
            part = raw[end - numbers[source] * widths[i] : end]
            wanted.append((source, streams[source][0][i], part))
    if engine is None:
        move = call.algorithm("allgather", algorithm, everything.nbytes)
        move(everything, bounds, call.deadline)
        for source, at, part in wanted:
            first = bounds[source] + at
            part[...] = everything[first : first + part.size]
    else:
        longest = max(nbytes for _, nbytes in streams)
        call.checked(engine.publish(own, wanted, call.digest, call.deadline, longest))
    return [host_arrays.copy_to(flat, result) for flat, result in zip(flats, results, strict=True)]


@overload
def grouped_reduce_scatter(
    group: Group, xs: Sequence[Numbers], *, out: None = None, **options: Unpack[FusedReduceOptions]
) -> list[Array]: ...
@overload
def grouped_reduce_scatter(
    group: Group,
    xs: Sequence[Detachable[A]],
    *,
    out: None = None,
    **options: Unpack[FusedReduceOptions],
) -> list[A]: ...
@overload
def grouped_reduce_scatter(
    group: Group, xs: Sequence[A], *, out: None = None, **options: Unpack[FusedReduceOptions]
) -> list[A]: ...
@overload
def grouped_reduce_scatter(
    group: Group, xs: Sequence[object], *, out: Sequence[A], **options: Unpack[FusedReduceOptions]
) -> list[A]: ...
def grouped_reduce_scatter(
    group: Group,
    xs: Sequence[Any],
    *,
    op: Op = MEAN,
    out: Sequence[Any] | None = None,
    prescale: float = 1,
    postscale: float = 1,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> list[Any]:
    """Reduce many arrays, and give each rank its rows of each, as if by `reduce_scatter` for each.

    Args:
        xs: arrays of any kinds and dtypes, shape (n, ...) each; the same shapes and dtypes on all
            ranks. The first `n % size` ranks get one row more.
        op: how to combine, defined for all of the dtypes.
        out: where to put the own rows, an array of their shape for each of `xs`.
        prescale: as for `allreduce`.
        postscale: likewise.
        algorithm: as for `reduce_scatter`.
        timeout: seconds.

    Returns:
        The arrays of `out`; or one new array for each of `xs`, of its kind and dtype, with the own
        rows; those of NumPy and PyTorch of one dtype are views of one piece of memory.

    Raises:
        TypeError: the op is not defined for a dtype.
        ValueError: an array is a scalar; there is not an `out` for each, or one does not fit.
        MismatchError: ranks differ in number, shapes, dtypes or options; on all ranks.

    Cost: one reduce-scatter for each dtype, and a copy of all arrays.
    """
    with begin_call(group, "grouped_reduce_scatter", timeout) as call:
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        loans, shares, kinds, by = [], [], [], op
        for x, to in pairs(call.operation, xs, out):
            loan = host_arrays.host_view(x, operation=call.operation)
            array = loan.host
            rows = row_counts.split_counts(call, array, None)
            kinds.append((array.dtype.name, array.shape))
            target, give_back = None, loan.restore
            if to is not None:
                shape = (rows[group.rank], *array.shape[1:])
                target, give_back = host_arrays.check_out(
                    to, shape, array.dtype, operation=call.operation
                )
            loan = HostArgument(array, target, give_back)
            way = lowering.lower(op, array.dtype, group.size, scales, operation=call.operation)
            if way is not None:
                loan, by = way.lend(loan)._replace(target=None), way.op
            loans.append(loan)
            shares.append(rows)
        call.describe(
            op=op.value, count=len(loans), arrays=bucket_layout.summary(kinds), **scales,
            algorithm=algorithm,
        )  # fmt: skip
        hosts = [loan.host for loan in loans]
        results = [np.empty(0)] * len(hosts)
        dtypes = [array.dtype for array in hosts]
        for dtype in dict.fromkeys(dtypes):
            members = [i for i, other in enumerate(dtypes) if other == dtype]
            own, rows_of = [hosts[i] for i in members], [shares[i] for i in members]
            parts = _fused_reduce_scatter(call, own, rows_of, ReduceSpec(by, algorithm))
            for i, part in zip(members, parts, strict=True):
                results[i] = part
        if not hosts:
            call.agree()
    return [result_view(part, loan, out) for part, loan in zip(results, loans, strict=True)]


def _fused_reduce_scatter(
    call: Call, arrays: Sequence[Array], shares: Sequence[Sequence[int]], how: ReduceSpec
) -> list[Array]:
    """Reduce arrays of one dtype, and return this rank's rows of each."""
    rank = call.group.rank
    pieces, bounds = [], [0]
    for owner in range(call.group.size):
        for array, rows in zip(arrays, shares, strict=True):
            first = sum(rows[:owner])
            pieces.append(array[first : first + rows[owner]])
        own = pieces[-len(arrays) :]
        bounds.append(bounds[-1] + sum(piece.size for piece in own))
    send = np.concatenate(pieces, axis=None)
    taken = np.empty(bounds[rank + 1] - bounds[rank], send.dtype)
    plan = plans.reduce_scatter(call, send, bounds, how)
    plan.first(call, send, taken)
    shapes = [piece.shape for piece in pieces[len(arrays) * rank : len(arrays) * (rank + 1)]]
    ends = itertools.accumulate(math.prod(shape) for shape in shapes)
    return [
        taken[end - math.prod(shape) : end].reshape(shape)
        for shape, end in zip(shapes, ends, strict=True)
    ]


def _places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    return bucket_layout.offsets([array.nbytes for array in arrays], range(len(arrays)))


def _part(stream: Array, at: int, like: Array) -> Array:
    """View a part of a stream as an array like another one."""
    return stream[at : at + like.nbytes].view(like.dtype).reshape(like.shape)
