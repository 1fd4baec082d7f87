"""`grouped_allreduce`: one reduction of many arrays.

In shared memory, a long array is reduced directly from its memory to its result, as in a call of
its own. The short arrays of a dtype form one sequence, cut into portions that fit into a core's
cache. Each portion is copied to shared memory, reduced there, and copied to the results, before the
next portion. So each element crosses main memory once in each direction, as without packing:

    arrays    | a | b |   c   |     results   | a | b |   c   |
    portions  |   1   |  2 | 3 |              |   1   |  2 | 3 |
                copy to shared memory -> reduce -> copy, one portion after the other

By messages each dtype is one portion, because a few long messages are fastest, and is reduced in
the memory of its results. The same holds if all arrays are on one device (`on_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import numpy as np

from collectives.arrays import host_arrays, lowering
from collectives.arrays.host_arrays import Array, HostArgument, address
from collectives.arrays.lowering import Lowering
from collectives.arrays.reduction import MEAN, Op
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, Numbers, ReduceOptions, Tensor, Unpack
from collectives.fusion import on_device as grouped_on_device
from collectives.fusion.layouts import (
    FusionCache,
    FusionKey,
    FusionPlan,
    pack,
    part,
    put,
    unpack,
)
from collectives.fusion.on_device import DevicePackers, FusedDeviceArray
from collectives.kernels.buffer_address import AddressReader
from collectives.kernels.compression import NONE, Compression, resolve
from collectives.operations.reduce import allreduce

__all__ = ["FusedOptions", "grouped_allreduce", "result_view", "pairs"]


class FusedOptions(ReduceOptions, total=False):
    """Options of `grouped_allreduce`, for type checkers."""

    compression: Compression | None


@overload
def grouped_allreduce(
    group: Group, xs: Sequence[Numbers], *, out: None = None, **options: Unpack[FusedOptions]
) -> list[Array]: ...
@overload
def grouped_allreduce(
    group: Group, xs: Sequence[Tensor[A]], *, out: None = None, **options: Unpack[FusedOptions]
) -> list[A]: ...
@overload
def grouped_allreduce(
    group: Group, xs: Sequence[A], *, out: None = None, **options: Unpack[FusedOptions]
) -> list[A]: ...
@overload
def grouped_allreduce(
    group: Group, xs: Sequence[object], *, out: Sequence[A], **options: Unpack[FusedOptions]
) -> list[A]: ...
def grouped_allreduce(
    group: Group,
    xs: Sequence[Any],
    *,
    op: Op = MEAN,
    out: Sequence[Any] | None = None,
    compression: Compression | None = NONE,
    prescale: float = 1,
    postscale: float = 1,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> list[Any]:
    """Reduce many arrays at once, as if you called `allreduce` for each array.

    The plans for the last 16 lists of shapes and dtypes are cached. `plan_buckets` saves a copy,
    and overlaps reductions with the computation of later arrays.

    Args:
        xs: arrays of any kinds, shapes and dtypes; the same shapes and dtypes on all ranks.
        op: reduction operation, defined for all dtypes.
        out: arrays for the results, one for each of `xs`, as for `allreduce`; may be the arrays of
            `xs`. Two of them must not share memory. None returns new arrays.
        compression: as for `allreduce`, without feedback.
        prescale: as for `allreduce`.
        postscale: as for `allreduce`.
        algorithm: as for `allreduce`, for each dtype; not "nccl".
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        The arrays of `out`; or a new array for each of `xs`, of its kind, shape and dtype. New
        NumPy arrays and PyTorch tensors are views of one memory block, reused by later calls once
        all of them are gone. On a device, new arrays are parts of one array per dtype.

    Raises:
        TypeError: the op is not defined for a dtype, or `compression` has another type.
        ValueError: the algorithm is unknown, or the arrays of `out` do not fit in number or kind.
        MismatchError: ranks differ in number, shapes or dtypes; on all ranks.

    Cost: two copies of short arrays beside the reduction, in shared memory through the cache;
        memory for one list of results is kept.
    """
    with begin_call(
        group, "grouped_allreduce", timeout
    ) as call:  # step 2 of docs/how-a-call-goes.md
        compression = resolve(compression, call.operation)
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        asked = FusionKey(op, compression, scales, algorithm)
        # None for a host array, a lowered op or a scale, and for arguments whose error the host
        # path reports.
        there = grouped_on_device.device_arguments(group, asked, xs, out)
        if there is None:
            finish = _on_host(call, xs, out, asked, timeout)
        else:
            finish = _on_device(call, there, asked, timeout)
    return finish()


def _on_host(
    call: Call,
    xs: Sequence[Any],
    out: Sequence[Any] | None,
    asked: FusionKey,
    timeout: float | None,
) -> Callable[[], list[Any]]:
    """Reduce arrays on the host; return the function that ends the call."""
    # NumPy arrays with `out=`, the usual case of a training loop, need no loans.
    plain = None if out is None else _numpy_targets(call.group.address_reader, xs, out)  # step 3
    loans = _borrow_all(xs, out, call.operation) if plain is None else [None] * len(xs)
    hosts = [x if loan is None else loan.host for x, loan in zip(xs, loans, strict=True)]
    kinds = tuple([(array.shape, array.dtype) for array in hosts])
    groupings = call.group.state_of(FusionCache)
    known = groupings.find(kinds, asked, call)  # steps 4 and 5
    # The ranks have agreed on arrays and options, so all of them take the same branches below.
    engine = call.engine_for(asked.algorithm)
    # Messages and lowered ops work on host views.
    if plain is not None and (engine is None or known.ways):
        plain, loans = None, _borrow_all(xs, out, call.operation)
    if known.ways:
        loans = _lower_all(hosts, loans, known.ways)
        hosts = [loan.host for loan in loans if loan is not None]
    direct = plain
    if plain is None and engine is not None and (out is not None or known.ways):
        direct = _direct_targets(hosts, loans)
    # Without `direct`, all results share one block, which a later call may reuse.
    results = np.empty(0, np.uint8) if direct else groupings.results(known.nbytes)
    if engine is not None:
        for portion, (shared, plan) in zip(known.portions, known.work, strict=True):
            # Portions of one kind share their memory and plan, so each is unpacked before the next
            # is packed.
            if shared is None:
                own = portion.pieces[0].array
                target = direct[own] if direct else part(portion, results)
                plan.first(call, host_arrays.flat(hosts[own]), target)  # step 6
                continue
            pack(portion, hosts, shared)
            plan.first(call, shared, shared)  # step 6
            if direct:
                unpack(portion, shared, direct)
            else:
                put(portion, shared, results)
    # Last, so that only a plan that has run on all ranks is found again.
    groupings.store(asked.key(kinds), known)  # step 7

    def finish() -> list[Any]:
        # After the call has ended, because each reduction is a call of its own.
        if engine is None:
            _by_messages(call.group, hosts, results, known, asked, timeout)
        if plain is not None and out is not None:
            return list(out)
        if direct:
            # `restore` writes to an array of another library, or reports the change to PyTorch.
            return [loan.restore(loan.host) for loan in loans if loan is not None]
        places = zip(hosts, known.starts, strict=True)
        made = [
            host_arrays.in_order_of(array, np.ndarray(array.shape, array.dtype, results, start))
            for array, start in places
        ]
        both = zip(made, loans, strict=True)
        return [array if loan is None else result_view(array, loan, out) for array, loan in both]

    return finish


def _on_device(
    call: Call, there: list[FusedDeviceArray], asked: FusionKey, timeout: float | None
) -> Callable[[], list[Any]]:
    """Compare a call of device arrays; return the function that reduces them."""
    kinds = tuple([(one.own.shape, one.own.dtype) for one in there])
    groupings = call.group.state_of(FusionCache)
    # The later `allreduce` is a call of its own; this one compares the list of arrays.
    known = groupings.find(kinds, asked, call, on_device=True)  # steps 4 and 5
    groupings.store(asked.key(kinds, on_device=True), known)  # step 7

    def reduce(whole: Any) -> None:
        # In place: `whole` is packed memory of this package.
        allreduce(
            call.group, whole, op=asked.op, out=whole, compression=asked.compression,
            algorithm=asked.algorithm, timeout=timeout,
        )  # fmt: skip

    return partial(call.group.state_of(DevicePackers).reduce, there, known.portions, reduce)


def _by_messages(
    group: Group,
    hosts: Sequence[Array],
    results: Array,
    known: FusionPlan,
    asked: FusionKey,
    timeout: float | None,
) -> None:
    """Reduce each portion by messages, in the memory of its results."""
    # The compression of the caller applies to floats that the op adds directly, as in `allreduce`.
    as_given = all(way.dtype == way.original for way in known.ways)
    for portion in known.portions:
        target = part(portion, results)
        pack(portion, hosts, target)
        allreduce(
            group, target, op=known.op, out=target, timeout=timeout, algorithm=asked.algorithm,
            compression=asked.compression if as_given else NONE,
        )  # fmt: skip


def _borrow_all(
    xs: Sequence[Any], out: Sequence[Any] | None, operation: str
) -> list[HostArgument | None]:
    """Return host views of the arrays; None for native NumPy arrays with new results.

    Raises:
        TypeError, ValueError: as `host_arrays.host_view`; or `out` has another length than `xs`.
    """
    # A loan takes several us, and a native NumPy array is its own host view.
    if out is None:
        return [
            None
            if type(x) is np.ndarray and x.dtype.isnative
            else host_arrays.host_view(x, operation=operation)
            for x in xs
        ]
    return [
        host_arrays.host_view(x, to, operation=operation) for x, to in pairs(operation, xs, out)
    ]


def pairs(operation: str, xs: Sequence[Any], out: Sequence[Any] | None) -> list[tuple[Any, Any]]:
    """Return each array with its `out`, or with None.

    Raises:
        ValueError: `out` has another length than `xs`.
    """
    if out is None:
        return [(x, None) for x in xs]
    if len(out) != len(xs):
        raise ValueError(
            f"{operation}: out must have an array for each, expected {len(xs)}, got {len(out)}"
        )
    return list(zip(xs, out, strict=True))


def _lower_all(
    hosts: Sequence[Array], loans: Sequence[HostArgument | None], ways: Sequence[Lowering]
) -> list[HostArgument | None]:
    plain = [HostArgument(x, None, host_arrays.identity) for x in hosts]
    lent = [given or own for given, own in zip(loans, plain, strict=True)]
    return [way.lend(loan) for way, loan in zip(ways, lent, strict=True)]


def _numpy_targets(
    look: AddressReader, xs: Sequence[Any], out: Sequence[Any]
) -> list[Array] | None:
    """Return the flat `out` arrays of a call with NumPy arrays, as `_direct_targets`.

    None if an array needs the full checks.
    """
    if len(xs) != len(out) or any(type(x) is not np.ndarray or not x.dtype.isnative for x in xs):
        return None
    readable, writable, _ = look
    sends = [readable(x) for x in xs]
    targets = [writable(x, to) for x, to in zip(xs, out, strict=True)]
    # 0 is an array without C order, or an `out` that is read-only or of another shape or dtype.
    if not (all(sends) and all(targets) and _are_apart(sends, targets, [x.nbytes for x in xs])):
        return None
    return [to.reshape(-1) for to in out]


def _direct_targets(
    hosts: Sequence[Array], loans: Sequence[HostArgument | None]
) -> list[Array] | None:
    """Return the flat targets if portions may be written before later ones are packed, else None.

    That requires that no target shares memory with another array than its own.
    """
    wanted = [None if loan is None else loan.target for loan in loans]
    there = [
        # A strided array would be copied to or from its flat form in one piece, not in portions.
        target
        for array, target in zip(hosts, wanted, strict=True)
        if target is not None and target.flags.c_contiguous and array.flags.c_contiguous
    ]
    if len(there) < len(hosts):
        return None
    sends, targets = ([address(array) for array in arrays] for arrays in (hosts, there))
    if not _are_apart(sends, targets, [array.nbytes for array in hosts]):
        return None
    return [target.reshape(-1) for target in there]


def _are_apart(sends: list[int], targets: list[int], sizes: list[int]) -> bool:
    """Return whether no array shares memory with another, except with its own target.

    Args:
        sends: addresses of the arrays.
        targets: addresses of their targets; may be equal to the arrays.
        sizes: bytes of each array.
    """
    begins, nbytes = np.array([sends, targets], np.int64), np.array([sizes, sizes], np.int64)
    # An empty array has an address, but overlaps nothing.
    kept = nbytes > 0
    # A target that is its own array counts once.
    kept[1] &= begins[0] != begins[1]
    first, length = begins[kept], nbytes[kept]
    # Sorted by address, only neighbors can overlap: n log n steps instead of n^2.
    order = np.argsort(first)
    ends = (first + length)[order]
    return bool((ends[:-1] <= first[order][1:]).all())


def result_view(array: Array, loan: HostArgument, out: object) -> Any:
    """Return a result, a view of shared result memory, in the form that the caller expects."""
    if out is None or loan.target is None:
        return loan.restore(array)
    return loan.restore(host_arrays.copy_to(array, loan.target))
