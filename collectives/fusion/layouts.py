"""Cached layouts of grouped calls, by the shapes and dtypes of their arrays.

A *portion* is what is reduced by one call: an array that is long enough to be reduced from where it
is to where its result goes; or pieces of arrays of one dtype, packed side by side.
"""

from __future__ import annotations

import math
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import host_arrays, lowering
from collectives.arrays.host_arrays import Array, address
from collectives.arrays.lowering import Lowering
from collectives.arrays.reduction import Op
from collectives.calls.call import Call
from collectives.calls.group import Group
from collectives.calls.shared_arrays import shared_empty
from collectives.fusion import bucket_layout
from collectives.fusion.bucket_layout import FusedChunk
from collectives.kernels import buffer_address
from collectives.kernels.compression import Compression
from collectives.node.engine import Engine, KernelCall

__all__ = [
    "FusionKey",
    "FusionCache",
    "FusionPlan",
    "pack",
    "part",
    "put",
    "reduce_whole",
    "unpack",
]

# Bytes of a portion in shared memory; the second where ranks outnumber the cores, so that a meeting
# costs a change of process. `benchmarks/gradients.py --model resnet50`, 2 ranks on 2 cores, ms,
# smallest of 11: 128 KiB 19.2, 512 KiB 15.8, 2 MiB 17.4, 4 MiB 17.9 (where other programs run, too,
# medians 112, 49, 40, 35); 4 ranks on 2 cores: 1 MiB 130, 2 MiB 108, 8 MiB 64, 64 MiB 65.
PORTION_BYTES, PORTION_BYTES_CROWDED = 2 << 20, 8 << 20

# Bytes of an array from which on it is a portion by itself. The gradients of ResNet-50, 97.5 MiB,
# without that / with it from 128 KiB, 256 KiB, 512 KiB and 1 MiB on, ms: 2 ranks on 2 cores, new
# results 13.9 / 12.7 12.9 12.7 13.0, in place 13.2 / 11.8 12.0 11.9 11.6; 4 ranks on 2 cores, new
# results 52 / 32 33 33 35; 8 ranks 102 / 73 at 128 KiB, 70 at 512 KiB, 66 at 1 MiB.
WHOLE_BYTES = 1 << 18

# Bytes of new results from which on they are stored past the caches, of which they would take more
# than there are. New arrays lie in new pages, so that no earlier call says which way is faster, as
# `collectives.node.result_stores` would ask.
STREAMED_BYTES = 1 << 24

# How many lists of shapes and dtypes are remembered.
_MOST = 16


Kind = tuple[tuple[int, ...], "np.dtype[Any]"]
Key = tuple[object, ...]

# The shared memory of a portion, None for a whole array, and what reduces it.
_InMemory = tuple[Array | None, KernelCall]


class FusionPlan(NamedTuple):
    """How arrays of certain shapes and dtypes are reduced together.

    Attributes:
        facts: what must be equal on all ranks, also that they have planned the work.
        portions: what is reduced by one call each.
        starts: the first byte of each result.
        nbytes: of all results.
        work: for each portion, its shared memory and what reduces it; nothing by messages.
        op: by which portions are reduced.
        ways: of each array by way of that op; none if it is the caller's.
    """

    facts: dict[str, object]
    portions: list[FusedChunk]
    starts: list[int]
    nbytes: int
    work: list[_InMemory]
    op: Op
    ways: list[Lowering]


class FusionKey(NamedTuple):
    """What a caller asks for, scales by their words."""

    op: Op
    compression: Compression
    scales: dict[str, float]
    algorithm: str

    def key(self, kinds: tuple[Kind, ...], *, on_device: bool = False) -> Key:
        """By what a call with arrays of these shapes and dtypes is known."""
        scales = self.scales.items()
        return self.op, str(self.compression), *scales, self.algorithm, kinds, on_device


class FusionCache:
    """What `grouped_allreduce` keeps of its calls in one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._portion = np.empty(0, np.uint8)
        self.known: OrderedDict[Key, FusionPlan] = OrderedDict()
        self._results = np.empty(0, np.uint8)
        self._holders = 0  # of the results, when nobody else knows them

    def find(
        self, kinds: tuple[Kind, ...], asked: FusionKey, call: Call, *, on_device: bool = False
    ) -> FusionPlan:
        """Return how such arrays are reduced, compared among the ranks; planned if it is new."""
        engine = None if on_device else call.engine_for(asked.algorithm)
        known = self.known.get(asked.key(kinds, on_device=on_device))
        if known is not None:
            call.describe(**known.facts)
            if engine is None or not known.portions:
                call.agree()
            return known
        new = _describe(kinds, asked, call, engine, {"memory": "device"} if on_device else {})
        call.agree()
        if engine is not None:
            new.facts["planned"] = True  # what is driven later is not what was agreed by
            call.describe(**new.facts)
            new.work.extend(self._plan(call, engine, new))
        return new

    def store(self, key: Key, grouping: FusionPlan) -> None:
        """Remember a call, once the ranks have agreed, and forget the one made longest ago.

        All ranks know the same calls: one that knows a call does not meet one that plans it.
        """
        self.known[key] = grouping
        self.known.move_to_end(key)
        if len(self.known) > _MOST:
            self.known.popitem(last=False)

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

    def _plan(self, call: Call, engine: Engine, new: FusionPlan) -> list[_InMemory]:
        """Make what reduces each portion; *collective*."""
        if not self._portion.size and not all(portion.whole for portion in new.portions):
            self._portion = shared_empty(self._group, _portion_bytes(engine), np.uint8)
        made: dict[tuple[object, ...], _InMemory] = {}
        for kind in dict.fromkeys(map(_alike, new.portions)):
            dtype, nbytes, whole = kind
            if whole:  # whose addresses are told later
                memory, view = None, np.empty(nbytes // dtype.itemsize, dtype)
            else:
                memory = view = self._portion[:nbytes].view(dtype)
            among = new.nbytes if whole else 0
            made[kind] = memory, engine.plan_allreduce(view, view, new.op, call.digest, among)
        return [made[_alike(portion)] for portion in new.portions]


def _alike(portion: FusedChunk) -> tuple[Any, int, bool]:
    """Return by what portions are reduced by the same work, one after the other."""
    return portion.dtype, portion.nbytes, portion.whole


def _describe(
    kinds: Sequence[Kind],
    asked: FusionKey,
    call: Call,
    engine: Engine | None,
    memory: dict[str, object],
) -> FusionPlan:
    """Check and describe a call with arrays of these shapes and dtypes."""
    op, compression, scales, algorithm = asked
    dtypes = [dtype for _, dtype in kinds]
    ways = []
    for dtype in dtypes:
        way = lowering.lower(op, dtype, call.group.size, scales, operation=call.operation)
        if way is not None:  # then there is one for every dtype
            ways.append(way)
    for dtype in dict.fromkeys(dtypes):
        compression.codec(dtype, op, network=True)
    facts: dict[str, object] = {
        "op": op.value,
        "count": len(kinds),
        "arrays": bucket_layout.summary([(dtype.name, shape) for shape, dtype in kinds]),
        **memory,
        "compression": compression,
        **scales,
        "algorithm": algorithm,
    }
    call.describe(**facts)
    counts = [math.prod(shape) for shape, _ in kinds]
    limit = whole = sys.maxsize
    if engine is not None:
        limit, whole = _portion_bytes(engine), WHOLE_BYTES
    work = [way.dtype for way in ways] or dtypes
    by = ways[0].op if ways else op
    return FusionPlan(
        facts, *bucket_layout.split_by_bytes(counts, work, limit, whole), [], by, ways
    )


def _portion_bytes(engine: Engine) -> int:
    return PORTION_BYTES_CROWDED if engine.size > (os.cpu_count() or 1) else PORTION_BYTES


def reduce_whole(call: Call, work: KernelCall, x: Array, out: Array) -> None:
    """Reduce an array, of any strides, into flat memory for its result."""
    send = host_arrays.flat(x)
    work.block.send, work.block.out = address(send), address(out)
    call.drive(work)


def pack(portion: FusedChunk, hosts: Sequence[Array], into: Array) -> None:
    """Copy the pieces of a portion side by side: 0.1 us for each, beside the copy itself."""
    pieces = [hosts[piece.array] for piece in portion.pieces]
    for at in (0, -1):  # only the first and the last can be a part of an array
        array, start, stop = portion.pieces[at]
        if stop - start < hosts[array].size:
            pieces[at] = host_arrays.flat(hosts[array])[start:stop]
    np.concatenate(pieces, axis=None, out=into, casting="no")


def unpack(portion: FusedChunk, shared: Array, flats: Sequence[Array]) -> None:
    """Copy what a portion has reduced to where its arrays lie."""
    at = 0
    for array, start, stop in portion.pieces:
        flats[array][start:stop] = shared[at : at + stop - start]
        at += stop - start


def put(portion: FusedChunk, shared: Array, results: Array) -> None:
    """Copy what a portion has reduced to its place in the memory of all results."""
    target = part(portion, results)
    if results.nbytes < STREAMED_BYTES:
        target[...] = shared
    else:
        buffer_address.streaming()(address(target), address(shared), portion.nbytes)


def part(portion: FusedChunk, results: Array) -> Array:
    """Return the results of a portion in the memory of all."""
    return results[portion.first : portion.first + portion.nbytes].view(portion.dtype)
