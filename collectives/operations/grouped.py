"""Many arrays by few calls: `grouped_allreduce`.

The arrays of one dtype are thought of as one, which is cut into stages. Where ranks meet in shared
memory, a stage fits in a core's cache: it is copied to memory that all ranks reach, reduced there,
and copied to where the results lie, before the next one. So every number comes from and goes to
main memory once, as if nothing were packed:

    arrays    | a | b |    c    |     results   | a | b |    c    |
    stages    |   1   |   2  | 3 |               |   1   |   2  | 3 |
                copy to shared memory -> reduce -> copy, one stage after the other

By messages each dtype is one stage, since few long messages are best, and is reduced where its
results lie.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, overload

import numpy as np

from collectives import bucket_layout
from collectives.arrays import detour, host
from collectives.arrays.detour import Detour
from collectives.arrays.host import Array, Borrowed, address
from collectives.arrays.reduction import MEAN, Op
from collectives.bucket_layout import Stage
from collectives.compression import NONE, Compression, chosen
from collectives.node.engine import Engine, Work
from collectives.operations.call import Call, enter
from collectives.operations.group import Group
from collectives.operations.reduce import allreduce
from collectives.operations.shared import shared_empty
from collectives.operations.signatures import A, Detachable, Numbers, Unpack

__all__ = ["Grouping", "Groupings", "grouped_allreduce", "handed", "pairs"]

# Bytes of a stage in shared memory; the second where ranks outnumber the cores, so that a meeting
# costs a change of process. `benchmarks/gradients.py --model resnet50`, 2 ranks on 2 cores, ms,
# smallest of 11: 128 KiB 19.2, 512 KiB 15.8, 2 MiB 17.4, 4 MiB 17.9 (where other programs run, too,
# medians 112, 49, 40, 35); 4 ranks on 2 cores: 1 MiB 130, 2 MiB 108, 8 MiB 64, 64 MiB 65.
STAGE_BYTES, STAGE_BYTES_CROWDED = 2 << 20, 8 << 20

# How many lists of shapes and dtypes are remembered.
_MOST = 16


_Kind = tuple[tuple[int, ...], "np.dtype[Any]"]

# The memory of a stage, and what reduces it there.
_Planned = tuple[Array, Work]


class _Grouping(NamedTuple):
    """How arrays of certain shapes and dtypes are reduced together.

    Attributes:
        facts: what must be equal on all ranks, also that they have planned the work.
        stages: what is reduced by one call each.
        starts: the first byte of each result.
        nbytes: of all results.
        work: for each stage, shared memory and what reduces it there; nothing by messages.
        op: by which stages are reduced.
        ways: of each array by way of that op; none if it is the caller's.
    """

    facts: dict[str, object]
    stages: list[Stage]
    starts: list[int]
    nbytes: int
    work: list[_Planned]
    op: Op
    ways: list[Detour]


class _Asked(NamedTuple):
    """What a caller asks for, scales by their words."""

    op: Op
    compression: Compression
    scales: dict[str, float]
    algorithm: str


class Groupings:
    """What `grouped_allreduce` keeps of its calls in one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._stage = np.empty(0, np.uint8)
        self.known: OrderedDict[tuple[object, ...], _Grouping] = OrderedDict()
        self._results = np.empty(0, np.uint8)
        self._holders = 0  # of the results, when nobody else knows them

    def made(self, key: tuple[object, ...], grouping: _Grouping) -> None:
        """Remember a call, once the ranks have agreed, and forget the one made longest ago.

        All ranks know the same calls: one that knows a call does not meet one that plans it.
        """
        self.known[key] = grouping
        self.known.move_to_end(key)
        if len(self.known) > _MOST:
            self.known.popitem(last=False)

    def plan(self, call: Call, engine: Engine, stages: Sequence[Stage], op: Op) -> list[_Planned]:
        """Make what reduces each stage in shared memory; *collective*."""
        nbytes = _stage_bytes(engine)
        if not self._stage.size:
            self._stage = shared_empty(self._group, nbytes, np.uint8)
        views = [self._stage[: stage.nbytes].view(stage.dtype) for stage in stages]
        return [(view, engine.plan_allreduce(view, view, op, call.digest)) for view in views]

    def results(self, nbytes: int) -> Array:
        """Return memory for results: that of earlier ones which the caller has dropped, or new.

        New memory of many megabytes costs more than the reduction, since the system clears it.
        """
        results = self._results
        if results.size != nbytes or sys.getrefcount(results) > self._holders:
            del results
            self._results = np.empty(0, np.uint8)  # before there is more
            results = self._results = np.empty(nbytes, np.uint8)
            self._holders = sys.getrefcount(results)
        return results


class Grouping(TypedDict, total=False):
    """Options of `grouped_allreduce`, for type checkers."""

    op: Op
    compression: Compression | None
    prescale: float
    postscale: float
    algorithm: str
    timeout: float | None


@overload
def grouped_allreduce(
    group: Group, xs: Sequence[Numbers], *, out: None = None, **options: Unpack[Grouping]
) -> list[Array]: ...
@overload
def grouped_allreduce(
    group: Group, xs: Sequence[Detachable[A]], *, out: None = None, **options: Unpack[Grouping]
) -> list[A]: ...
@overload
def grouped_allreduce(
    group: Group, xs: Sequence[A], *, out: None = None, **options: Unpack[Grouping]
) -> list[A]: ...
@overload
def grouped_allreduce(
    group: Group, xs: Sequence[object], *, out: Sequence[A], **options: Unpack[Grouping]
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
        them are gone.

    Raises:
        TypeError: the op is not defined for a dtype, or this is not a compression.
        ValueError: unknown algorithm; or there is not an `out` for each array, or one does not fit.
        MismatchError: ranks differ in number, shapes or dtypes; on all ranks.

    Cost: two copies of all arrays beside the reduction, in shared memory through the cache; memory
        for one list of results is kept.
    """
    with enter(group, "grouped_allreduce", timeout) as call:  # step 2 of docs/how-a-call-goes.md
        compression = chosen(compression, call.operation)
        loans = _borrowed(xs, out, call.operation)  # step 3
        hosts = [x if loan is None else loan.host for x, loan in zip(xs, loans, strict=True)]
        kinds = tuple([(array.shape, array.dtype) for array in hosts])
        scales = detour.scales(prescale, postscale, operation=call.operation)
        engine = call.engine_for(algorithm)
        key = op, str(compression), prescale, postscale, algorithm, kinds
        groupings = group.kept(Groupings)
        known = groupings.known.get(key)
        if known is None:
            known = _new(kinds, _Asked(op, compression, scales, algorithm), call)  # step 4
            call.agree()
            if engine is not None:
                known.facts["planned"] = True  # what is driven below is not what was agreed by
                call.describe(**known.facts)
                planned = groupings.plan(call, engine, known.stages, known.op)
                known.work.extend(planned)  # step 5
        else:
            call.describe(**known.facts)
            if engine is None or not known.stages:
                call.agree()
        if known.ways:
            loans = _by_ways(hosts, loans, known.ways)
            hosts = [loan.host for loan in loans if loan is not None]
        is_direct = engine is not None and (out is not None or bool(known.ways))
        direct = _apart(hosts, loans) if is_direct else None
        results = np.empty(0, np.uint8) if direct else groupings.results(known.nbytes)
        if engine is not None:
            for stage, (shared, work) in zip(known.stages, known.work, strict=True):
                _pack(stage, hosts, shared)
                call.drive(work)  # step 6
                if direct:
                    _unpack(stage, shared, direct)
                else:
                    _part(stage, results)[...] = shared
        groupings.made(key, known)  # step 7
    if engine is None:
        as_given = all(way.dtype == way.original for way in known.ways)
        packed = compression if as_given else NONE
        for stage in known.stages:
            part = _part(stage, results)
            _pack(stage, hosts, part)
            allreduce(
                group, part, op=known.op, out=part, compression=packed, algorithm=algorithm,
                timeout=timeout,
            )  # fmt: skip
    if direct:
        return [loan.give_back(loan.host) for loan in loans if loan is not None]
    places = zip(hosts, known.starts, strict=True)
    made = [np.ndarray(array.shape, array.dtype, results, start) for array, start in places]
    both = zip(made, loans, strict=True)
    return [array if loan is None else handed(array, loan, out) for array, loan in both]


def _borrowed(
    xs: Sequence[Any], out: Sequence[Any] | None, operation: str
) -> list[Borrowed | None]:
    """Borrow the arrays of a call; None for what is as NumPy has it, and whose result is new.

    Raises:
        TypeError, ValueError: as `host.borrow`; or there is not an `out` for each.
    """
    if out is None:
        return [
            None
            if type(x) is np.ndarray and x.dtype.isnative
            else host.borrow(x, operation=operation)
            for x in xs
        ]
    return [host.borrow(x, to, operation=operation) for x, to in pairs(operation, xs, out)]


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


def _by_ways(
    hosts: Sequence[Array], loans: Sequence[Borrowed | None], ways: Sequence[Detour]
) -> list[Borrowed | None]:
    """Lend what is reduced in place of each array."""
    plain = [Borrowed(x, None, lambda result: result) for x in hosts]
    lent = [given or own for given, own in zip(loans, plain, strict=True)]
    return [way.lend(loan) for way, loan in zip(ways, lent, strict=True)]


def _apart(hosts: Sequence[Array], loans: Sequence[Borrowed | None]) -> list[Array] | None:
    """Return the targets, flat, if each stage may go there before the next one is packed.

    So it may where no target shares memory with another array than its own.
    """
    spans, flats = [], []
    for array, loan in zip(hosts, loans, strict=True):
        target = None if loan is None else loan.target
        if target is None or not (target.flags.c_contiguous and array.flags.c_contiguous):
            return None
        flats.append(target.reshape(-1))
        begins = {address(array), address(target)} if array.nbytes else ()
        spans += [(begin, begin + array.nbytes) for begin in begins]
    spans.sort()
    apart = all(stop <= begin for (_, stop), (begin, _) in itertools.pairwise(spans))
    return flats if apart else None


def handed(array: Array, loan: Borrowed, out: object) -> Any:
    """Give a result back, which is a view of memory that holds others, too."""
    if out is None or loan.target is None:
        return loan.give_back(array)
    return loan.give_back(host.store(array, loan.target))


def _new(kinds: tuple[_Kind, ...], asked: _Asked, call: Call) -> _Grouping:
    """Check and describe a call with arrays of these shapes and dtypes."""
    op, compression, scales, algorithm = asked
    dtypes = [dtype for _, dtype in kinds]
    ways = []
    for dtype in dict.fromkeys(dtypes):
        host.borrow(np.empty(0, dtype), operation=call.operation)  # refuses what is no number
        compression.codec(dtype, op, network=True)
    for dtype in dtypes:
        way = detour.detour(op, dtype, call.group.size, scales, operation=call.operation)
        if way is not None:  # then there is one for every dtype
            ways.append(way)
    facts: dict[str, object] = {
        "op": op.value,
        "count": len(kinds),
        "arrays": bucket_layout.shortened([(dtype.name, shape) for shape, dtype in kinds]),
        "compression": compression,
        **scales,
        "algorithm": algorithm,
    }
    call.describe(**facts)
    counts = [math.prod(shape) for shape, _ in kinds]
    engine = call.engine_for(algorithm)
    limit = sys.maxsize if engine is None else _stage_bytes(engine)
    work = [way.dtype for way in ways] or dtypes
    by = ways[0].op if ways else op
    return _Grouping(facts, *bucket_layout.stages(counts, work, limit), [], by, ways)


def _stage_bytes(engine: Engine) -> int:
    return STAGE_BYTES_CROWDED if engine.size > (os.cpu_count() or 1) else STAGE_BYTES


def _pack(stage: Stage, hosts: Sequence[Array], into: Array) -> None:
    """Copy the pieces of a stage side by side: 0.1 us for each, beside the copy itself."""
    pieces = [hosts[piece.array] for piece in stage.pieces]
    for at in (0, -1):  # only the first and the last can be a part of an array
        array, start, stop = stage.pieces[at]
        if stop - start < hosts[array].size:
            pieces[at] = host.flat(hosts[array])[start:stop]
    np.concatenate(pieces, axis=None, out=into, casting="no")


def _unpack(stage: Stage, shared: Array, flats: Sequence[Array]) -> None:
    """Copy what a stage has reduced to where its arrays lie."""
    at = 0
    for array, start, stop in stage.pieces:
        flats[array][start:stop] = shared[at : at + stop - start]
        at += stop - start


def _part(stage: Stage, results: Array) -> Array:
    return results[stage.first : stage.first + stage.nbytes].view(stage.dtype)
