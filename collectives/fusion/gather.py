"""`grouped_allgather`, `grouped_reduce_scatter` and `grouped_broadcast`.

Arrays of any dtypes and shapes are packed side by side and move together:

    grouped_broadcast         the root's arrays form one stream of bytes
    grouped_allgather         each rank's arrays form one stream; first, ranks exchange row counts
    grouped_reduce_scatter    one array per dtype: rank 0's part of each array, then rank 1's, ...

    arrays    | a | b |    rank 0's stream    | a0 | b0 |    to be reduced    | a0 b0 | a1 b1 |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from collectives.arrays import host_arrays, lowering
from collectives.arrays.host_arrays import Array, HostArgument, RowsOut
from collectives.arrays.reduction import MEAN, Op
from collectives.calls import counts as row_counts
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, CommonOptions, Numbers, ReduceOptions, Tensor, Unpack
from collectives.fusion import bucket_layout
from collectives.fusion.allreduce import pairs, result_view
from collectives.plans import planner as plans
from collectives.plans.by_messages import ReduceSpec

__all__ = ["grouped_allgather", "grouped_broadcast", "grouped_reduce_scatter"]


@overload
def grouped_broadcast(
    group: Group, xs: Sequence[Numbers], root: int = 0, *, out: None = None,
    **options: Unpack[CommonOptions],
) -> list[Array]: ...  # fmt: skip
@overload
def grouped_broadcast(
    group: Group, xs: Sequence[Tensor[A]], root: int = 0, *, out: None = None,
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
    """Copy the root's arrays to all ranks, as if you called `broadcast` for each array.

    Args:
        xs: arrays of any kinds, shapes and dtypes; on the other ranks any arrays of the same shapes
            and dtypes.
        root: rank whose arrays are copied.
        out: arrays for the results, one for each of `xs`; may be the arrays of `xs`. None returns
            new arrays.
        algorithm: as for `broadcast`; not "nccl".
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        The arrays of `out`; or a new array for each of `xs`, of its kind, shape and dtype. New
        NumPy arrays and PyTorch tensors are views of one memory block.

    Raises:
        ValueError: the root is not a rank, or the arrays of `out` do not fit in number or kind.
        MismatchError: ranks differ in number, shapes or dtypes; on all ranks.

    Cost: one broadcast of all bytes, and one copy.
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
        starts, nbytes = bucket_layout.offsets([x.host.nbytes for x in loans], range(len(loans)))
        stream = np.empty(nbytes, np.uint8)
        parts = [_part(stream, at, loan.host) for at, loan in zip(starts, loans, strict=True)]
        # Only the root's elements count; the stream of another rank is overwritten.
        for part, loan in zip(parts, loans, strict=True):
            if own:
                part[...] = loan.host
        plans.broadcast(call, stream, root, algorithm).first(call, stream, stream)
    # After the call, because copies to the caller need no other rank.
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
    group: Group, xs: Sequence[Tensor[A]], *, out: None = None, **options: Unpack[CommonOptions]
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
    """Join the arrays of all ranks on every rank, as if you called `allgather` for each array.

    Args:
        xs: arrays of any kinds and dtypes, shape (n, ...) each. n may differ between ranks and
            arrays; the other dimensions must be equal on all ranks. A scalar counts as shape (1,).
        out: arrays for the results, with their shapes, one for each of `xs`. None returns new
            arrays.
        algorithm: as for `allgather`.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        The arrays of `out`; or new arrays of shape (sum of n, ...), of the kinds of `xs`, in rank
        order.

    Raises:
        ValueError: the arrays of `out` do not fit in number or shape; the other ranks raise
            `MismatchError`.
        MismatchError: ranks differ in number, dtypes or shapes of rows; on all ranks.

    Cost: in shared memory two synchronizations; by messages one all-gather of all bytes and one of
        16 bytes per array.
    """
    with begin_call(group, "grouped_allgather", timeout) as call:
        arrays, tos = [], []
        for x, to in pairs(call.operation, xs, out):
            loan = host_arrays.host_view(x, operation=call.operation)
            # In C order, because a stream holds the raw bytes of rows.
            array = np.ascontiguousarray(np.atleast_1d(loan.host))
            row, dtype = array.shape[1:], array.dtype
            # With row counts unknown, `out` is checked now for all but its number of rows.
            tos.append(host_arrays.check_out_rows(to, row, dtype, loan, operation=call.operation))
            arrays.append(array)
        kinds = [(str(array.dtype), array.shape[1:]) for array in arrays]
        shapes = bucket_layout.summary(kinds)
        call.describe(count=len(arrays), arrays=shapes, algorithm=algorithm)
        # The rows of `out` travel with the counts, so that all ranks find an `out` that does not
        # fit.
        told = call.exchange_integers(*(len(array) for array in arrays), *(to.number for to in tos))
        told = told.reshape(group.size, 2, len(arrays))
        rows = told[:, 0].T.tolist()  # for each array, the number of rows of each rank
        for array, given, numbers in zip(arrays, told[:, 1].T.tolist(), rows, strict=True):
            expected = [sum(numbers)] * group.size
            # `output_mismatch` gives the same decision on all ranks.
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
    """Move all packed arrays, after the exchange of row counts."""
    size, rank = call.group.size, call.group.rank
    widths = [array.itemsize * math.prod(array.shape[1:]) for array in arrays]
    # Each rank computes the layout of every stream from the row counts; no offsets are sent.
    streams = [
        bucket_layout.offsets(
            [numbers[source] * width for numbers, width in zip(rows, widths, strict=True)],
            range(len(arrays)),
        )
        for source in range(size)
    ]
    bounds = [0, *itertools.accumulate(nbytes for _, nbytes in streams)]
    engine = call.engine_for(algorithm)
    # In the engine ranks copy parts directly; by messages all streams need a buffer.
    everything = np.empty(bounds[-1] if engine is None else 0, np.uint8)
    own = np.empty(streams[rank][1], np.uint8)
    if engine is None:
        # The own part is gathered in place.
        own = everything[bounds[rank] : bounds[rank + 1]]
    for at, array in zip(streams[rank][0], arrays, strict=True):
        own[at : at + array.nbytes] = host_arrays.raw_bytes(array)
    flats, results, wanted = [], [], []
    for i, (array, numbers, to) in enumerate(zip(arrays, rows, tos, strict=True)):
        shape = (sum(numbers), *array.shape[1:])
        result, flat = host_arrays.output(to.target, shape, array.dtype, None)
        results.append(result)
        flats.append(flat)
        # A result is in rank order, a stream in the order of the arrays.
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
        # The longest stream gives the number of rounds, which must be equal on all ranks.
        longest = max(nbytes for _, nbytes in streams)
        call.checked(engine.publish(own, wanted, call.digest, call.deadline, longest))
    return [host_arrays.copy_to(flat, result) for flat, result in zip(flats, results, strict=True)]


@overload
def grouped_reduce_scatter(
    group: Group, xs: Sequence[Numbers], *, out: None = None, **options: Unpack[ReduceOptions]
) -> list[Array]: ...
@overload
def grouped_reduce_scatter(
    group: Group, xs: Sequence[Tensor[A]], *, out: None = None, **options: Unpack[ReduceOptions]
) -> list[A]: ...
@overload
def grouped_reduce_scatter(
    group: Group, xs: Sequence[A], *, out: None = None, **options: Unpack[ReduceOptions]
) -> list[A]: ...
@overload
def grouped_reduce_scatter(
    group: Group, xs: Sequence[object], *, out: Sequence[A], **options: Unpack[ReduceOptions]
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
    """Reduce many arrays, and return this rank's rows of each, as if by `reduce_scatter` for each.

    Args:
        xs: arrays of any kinds and dtypes, shape (n, ...) each; the same shapes and dtypes on all
            ranks. The first `n % size` ranks receive one row more.
        op: reduction operation, defined for all dtypes.
        out: arrays for this rank's rows, with their shapes, one for each of `xs`. None returns new
            arrays.
        prescale: as for `allreduce`.
        postscale: as for `allreduce`.
        algorithm: as for `reduce_scatter`.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        The arrays of `out`; or a new array for each of `xs`, of its kind and dtype, with this
        rank's rows. New NumPy arrays and PyTorch tensors of one dtype are views of one memory
        block.

    Raises:
        TypeError: the op is not defined for a dtype.
        ValueError: an array is a scalar, or the arrays of `out` do not fit in number or shape.
        MismatchError: ranks differ in number, shapes, dtypes or options; on all ranks.

    Cost: one reduce-scatter for each dtype, and a copy of all arrays.
    """
    with begin_call(group, "grouped_reduce_scatter", timeout) as call:
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        loans, shares, kinds, by = [], [], [], op
        for x, to in pairs(call.operation, xs, out):
            loan = host_arrays.host_view(x, operation=call.operation)
            array = loan.host
            # Even shares, as documented: `counts` would have to hold for all arrays.
            rows = row_counts.split_counts(call, array, None)
            kinds.append((array.dtype.name, array.shape))
            target, give_back = None, loan.restore
            if to is not None:
                shape = (rows[group.rank], *array.shape[1:])
                target, give_back = host_arrays.check_out(
                    to, shape, array.dtype, operation=call.operation
                )
            loan = HostArgument(array, target, give_back)
            way = lowering.lower(
                op, array.dtype, group.size, scales, operation=call.operation, algorithm=algorithm
            )
            # A scale or lowered op needs its own memory, and `restore` then writes to `out`.
            if way is not None:
                # Equal for all arrays: `lower` decides by op and scales, not by the array.
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
        # Without arrays no reduction compares the call.
        if not hosts:
            # Then the ranks may still differ in the options.
            call.agree()
    return [result_view(part, loan, out) for part, loan in zip(results, loans, strict=True)]


def _fused_reduce_scatter(
    call: Call, arrays: Sequence[Array], shares: Sequence[Sequence[int]], how: ReduceSpec
) -> list[Array]:
    """Reduce arrays of one dtype, and return this rank's rows of each."""
    rank = call.group.rank
    # Rank 0's rows of all arrays first, then rank 1's: one chunk per rank.
    pieces, bounds = [], [0]
    for owner in range(call.group.size):
        for array, rows in zip(arrays, shares, strict=True):
            first = sum(rows[:owner])
            pieces.append(array[first : first + rows[owner]])
        own = pieces[-len(arrays) :]
        bounds.append(bounds[-1] + sum(piece.size for piece in own))
    # Flat and in C order, also for arrays with other strides.
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


def _part(stream: Array, at: int, like: Array) -> Array:
    """Return a part of a stream as an array with the dtype and shape of `like`."""
    return stream[at : at + like.nbytes].view(like.dtype).reshape(like.shape)
