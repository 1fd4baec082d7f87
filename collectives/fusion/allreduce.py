"""`grouped_allreduce`: one reduction of many arrays.

Where ranks meet in shared memory, a long array is reduced from where it is to where its result
goes, as by a call of its own. The short ones of a dtype are thought of as one, which is cut into
portions that fit in a core's cache: each is copied to memory that all ranks reach, reduced there,
and copied to where the results lie, before the next one. So every number comes from and goes to
main memory once, as if nothing were packed:

    arrays    | a | b |   c   |     results   | a | b |   c   |
    portions  |   1   |  2 | 3 |              |   1   |  2 | 3 |
                copy to shared memory -> reduce -> copy, one portion after the other

By messages each dtype is one portion, since few long messages are best, and is reduced where its
results lie. So it is, too, where all arrays are on one device (`on_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict, overload

import numpy as np

from collectives.arrays import host_arrays, lowering
from collectives.arrays.host_arrays import Array, HostArgument, address
from collectives.arrays.lowering import Lowering
from collectives.arrays.reduction import MEAN, Op
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, Detachable, Numbers, Unpack
from collectives.fusion import on_device as grouped_on_device
from collectives.fusion.layouts import (
    FusionCache,
    FusionKey,
    FusionPlan,
    pack,
    part,
    put,
    reduce_whole,
    unpack,
)
from collectives.fusion.on_device import DevicePackers, FusedDeviceArray
from collectives.kernels.buffer_address import AddressReader
from collectives.kernels.compression import NONE, Compression, resolve
from collectives.operations.reduce import allreduce

__all__ = ["FusedOptions", "grouped_allreduce", "result_view", "pairs"]


class FusedOptions(TypedDict, total=False):
    """Options of `grouped_allreduce`, for type checkers."""

    op: Op
    compression: Compression | None
    prescale: float
    postscale: float
    algorithm: str
    timeout: float | None


@overload
def grouped_allreduce(
    group: Group, xs: Sequence[Numbers], *, out: None = None, **options: Unpack[FusedOptions]
) -> list[Array]: ...
@overload
def grouped_allreduce(
    group: Group, xs: Sequence[Detachable[A]], *, out: None = None, **options: Unpack[FusedOptions]
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
    """Reduce many arrays at once, as if `allreduce` were called for each.

    What is the same for all calls with arrays of the same shapes and dtypes is kept, for the last
    16 such lists. `plan_buckets` saves a copy, and lets reductions begin before all arrays exist.

    Args:
        xs: arrays of any kinds, shapes and dtypes; the same shapes and dtypes on all ranks.
        op: how to combine, defined for all of the dtypes.
        out: where to put the results, an array for each of `xs`, perhaps that one itself; as for
            `allreduce`. Two of them must not share memory.
        compression: as for `allreduce`, without feedback.
        prescale: as for `allreduce`.
        postscale: likewise.
        algorithm: as for `allreduce`, for each dtype; not "nccl".
        timeout: seconds.

    Returns:
        The arrays of `out`; or one new array for each of `xs`, of its kind, shape and dtype. Those
        of NumPy and PyTorch are views of one piece of memory, which serves later calls when all of
        them are gone; on a device they are parts of one array for each dtype.

    Raises:
        TypeError: the op is not defined for a dtype, or this is not a compression.
        ValueError: unknown algorithm; or there is not an `out` for each array, or one does not fit.
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
    """Reduce arrays in shared memory, if that is possible; returns what ends the call."""
    plain = None if out is None else _numpy_targets(call.group.address_reader, xs, out)  # step 3
    loans = _borrow_all(xs, out, call.operation) if plain is None else [None] * len(xs)
    hosts = [x if loan is None else loan.host for x, loan in zip(xs, loans, strict=True)]
    kinds = tuple([(array.shape, array.dtype) for array in hosts])
    groupings = call.group.state_of(FusionCache)
    known = groupings.find(kinds, asked, call)  # steps 4 and 5
    engine = call.engine_for(asked.algorithm)
    if plain is not None and (engine is None or known.ways):
        plain, loans = None, _borrow_all(xs, out, call.operation)
    if known.ways:
        loans = _lower_all(hosts, loans, known.ways)
        hosts = [loan.host for loan in loans if loan is not None]
    direct = plain
    if plain is None and engine is not None and (out is not None or known.ways):
        direct = _direct_targets(hosts, loans)
    results = np.empty(0, np.uint8) if direct else groupings.results(known.nbytes)
    if engine is not None:
        for portion, (shared, work) in zip(known.portions, known.work, strict=True):
            if shared is None:
                own = portion.pieces[0].array
                target = direct[own] if direct else part(portion, results)
                reduce_whole(call, work, hosts[own], target)  # step 6
                continue
            pack(portion, hosts, shared)
            call.drive(work)  # step 6
            if direct:
                unpack(portion, shared, direct)
            else:
                put(portion, shared, results)
    groupings.store(asked.key(kinds), known)  # step 7

    def finish() -> list[Any]:
        if engine is None:
            _by_messages(call.group, hosts, results, known, asked, timeout)
        if plain is not None and out is not None:
            return list(out)
        if direct:
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
    """Compare arrays that are on a device; returns what reduces them."""
    kinds = tuple([(one.own.shape, one.own.dtype) for one in there])
    groupings = call.group.state_of(FusionCache)
    known = groupings.find(kinds, asked, call, on_device=True)  # steps 4 and 5
    groupings.store(asked.key(kinds, on_device=True), known)  # step 7

    def reduce(whole: Any) -> None:
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
    """Reduce each portion where its results lie."""
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
    """Borrow the arrays of a call; None for what is as NumPy has it, and whose result is new.

    Raises:
        TypeError, ValueError: as `host_arrays.host_view`; or there is not an `out` for each.
    """
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
    """Return each array with its `out`, None where there is none.

    Raises:
        ValueError: there is not an `out` for each.
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
    """Lend what is reduced in place of each array."""
    plain = [HostArgument(x, None, host_arrays.identity) for x in hosts]
    lent = [given or own for given, own in zip(loans, plain, strict=True)]
    return [way.lend(loan) for way, loan in zip(ways, lent, strict=True)]


def _numpy_targets(
    look: AddressReader, xs: Sequence[Any], out: Sequence[Any]
) -> list[Array] | None:
    """Return the targets of a call with arrays of NumPy in order, flat, as `_direct_targets`.

    None where one of them needs a closer look.
    """
    if len(xs) != len(out) or any(type(x) is not np.ndarray or not x.dtype.isnative for x in xs):
        return None
    readable, writable, _ = look
    sends = [readable(x) for x in xs]
    targets = [writable(x, to) for x, to in zip(xs, out, strict=True)]
    if not (all(sends) and all(targets) and _are_apart(sends, targets, [x.nbytes for x in xs])):
        return None
    return [to.reshape(-1) for to in out]


def _direct_targets(
    hosts: Sequence[Array], loans: Sequence[HostArgument | None]
) -> list[Array] | None:
    """Return the targets, flat, if each portion may go there before the next one is packed.

    So it may where no target shares memory with another array than its own.
    """
    wanted = [None if loan is None else loan.target for loan in loans]
    there = [
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
    """Tell whether arrays, which begin at these addresses, share no memory but with their target.

    Args:
        sends: of the arrays.
        targets: of the target of each, perhaps the same.
        sizes: bytes of each.
    """
    begins, nbytes = np.array([sends, targets], np.int64), np.array([sizes, sizes], np.int64)
    kept = nbytes > 0
    kept[1] &= begins[0] != begins[1]
    first, length = begins[kept], nbytes[kept]
    order = np.argsort(first)
    ends = (first + length)[order]
    return bool((ends[:-1] <= first[order][1:]).all())


def result_view(array: Array, loan: HostArgument, out: object) -> Any:
    """Give a result back, which is a view of memory that holds others, too."""
    if out is None or loan.target is None:
        return loan.restore(array)
    return loan.restore(host_arrays.copy_to(array, loan.target))
