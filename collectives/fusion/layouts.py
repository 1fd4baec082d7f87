"""Cached layouts of grouped calls, by the shapes and dtypes of their arrays.

One call reduces a *portion*: either a long array, directly from its memory to its result, or
pieces of arrays of one dtype, packed side by side.
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
from collectives.core.references import is_referenced_elsewhere
from collectives.fusion import bucket_layout
from collectives.fusion.bucket_layout import FusedChunk
from collectives.kernels import buffer_address
from collectives.kernels.compression import Compression
from collectives.node.engine import Engine
from collectives.plans.prepared_calls import NodeCall

__all__ = [
    "FusionKey",
    "FusionCache",
    "FusionPlan",
    "pack",
    "part",
    "put",
    "unpack",
]

# Bytes of a portion in shared memory; the second number applies if ranks outnumber the cores, where
# each synchronization costs a context switch. `benchmarks/gradients.py --model resnet50`, 2 ranks
# on 2 cores, ms, minimum of 11: 128 KiB 19.2, 512 KiB 15.8, 2 MiB 17.4, 4 MiB 17.9 (on a busy
# machine, medians 112, 49, 40, 35); 4 ranks on 2 cores: 1 MiB 130, 2 MiB 108, 8 MiB 64, 64 MiB 65.
PORTION_BYTES, PORTION_BYTES_CROWDED = 2 << 20, 8 << 20

# Smallest array, in bytes, that forms its own portion. The gradients of ResNet-50, 97.5 MiB,
# without own portions / with them from 128 KiB, 256 KiB, 512 KiB and 1 MiB on, ms: 2 ranks on 2
# cores, new results 13.9 / 12.7 12.9 12.7 13.0, in place 13.2 / 11.8 12.0 11.9 11.6; 4 ranks on 2
# cores, new results 52 / 32 33 33 35; 8 ranks 102 / 73 at 128 KiB, 70 at 512 KiB, 66 at 1 MiB.
WHOLE_BYTES = 1 << 18

# Bytes of new results above which stores bypass the caches, which the results would overflow. New
# arrays have new pages, so `collectives.node.result_stores` has no earlier call to learn from.
STREAMED_BYTES = 1 << 24

# Most lists of shapes and dtypes in the cache.
_MOST = 16


Kind = tuple[tuple[int, ...], "np.dtype[Any]"]
Key = tuple[object, ...]

# The shared memory of a portion, None for a whole array, and the call that reduces the portion.
_InMemory = tuple[Array | None, NodeCall]


class FusionPlan(NamedTuple):
    """Plan to reduce arrays of given shapes and dtypes together.

    Attributes:
        facts: fields that must be equal on all ranks, including whether the ranks have a plan.
        portions: the portions, each reduced by one call.
        starts: first byte of each result.
        nbytes: bytes of all results.
        work: for each portion, its shared memory and its call; empty by messages.
        op: reduction operation of the portions.
        ways: for each array, its lowering to that op; empty if `op` is the caller's op.
    """

    facts: dict[str, object]
    portions: list[FusedChunk]
    starts: list[int]
    nbytes: int
    work: list[_InMemory]
    op: Op
    ways: list[Lowering]


class FusionKey(NamedTuple):
    """Arguments of the caller, with scales by name."""

    op: Op
    compression: Compression
    scales: dict[str, float]
    algorithm: str

    def key(self, kinds: tuple[Kind, ...], *, on_device: bool = False) -> Key:
        """Return the cache key of a call with arrays of these shapes and dtypes."""
        scales = self.scales.items()
        return self.op, str(self.compression), *scales, self.algorithm, kinds, on_device


class FusionCache:
    """Cached plans and result memory of `grouped_allreduce` in one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        # Shared memory of one portion, which all plans of the group use one after the other.
        self._portion = np.empty(0, np.uint8)
        self.known: OrderedDict[Key, FusionPlan] = OrderedDict()
        self._results = np.empty(0, np.uint8)

    def find(
        self, kinds: tuple[Kind, ...], asked: FusionKey, call: Call, *, on_device: bool = False
    ) -> FusionPlan:
        """Return the plan for these arrays, compared on all ranks; create it if it is new."""
        engine = None if on_device else call.engine_for(asked.algorithm)
        known = self.known.get(asked.key(kinds, on_device=on_device))
        # Different on purpose from the first call: `planned` below is part of its facts.
        if known is not None:
            call.describe(**known.facts)
            # In the engine the first portion compares the call.
            if engine is None or not known.portions:
                call.agree()
            return known
        # Checks and describes before the agreement, so that a wrong array is still a refusal.
        new = _describe(kinds, asked, call, engine, {"memory": "device"} if on_device else {})
        # Before `_plan`, which allocates shared memory and must run on all ranks or none.
        call.agree()
        if engine is not None:
            new.facts["planned"] = True  # later calls differ from this one, which made an agreement
            call.describe(**new.facts)
            new.work.extend(self._plan(call, engine, new))
        return new

    def store(self, key: Key, grouping: FusionPlan) -> None:
        """Cache a plan once the ranks have agreed, and drop the least recently used one.

        All ranks cache the same plans, so a rank with a plan never synchronizes with one without.
        """
        self.known[key] = grouping
        self.known.move_to_end(key)
        # All ranks make the same grouped calls in the same order, so they drop the same plan.
        if len(self.known) > _MOST:
            self.known.popitem(last=False)

    def results(self, nbytes: int) -> Array:
        """Return memory for results: the memory of dropped earlier results, or new memory.

        New memory of many megabytes costs more than the reduction, because the kernel clears it.
        """
        # A caller that holds a result holds a reference to this array as its base.
        if self._results.size != nbytes or is_referenced_elsewhere(self._results):
            self._results = np.empty(0, np.uint8)  # free the old memory before the new allocation
            self._results = np.empty(nbytes, np.uint8)
        return self._results

    def _plan(self, call: Call, engine: Engine, new: FusionPlan) -> list[_InMemory]:
        """Create the call that reduces each portion; *collective*."""
        # Allocated once, with the first plan that packs arrays.
        if not self._portion.size and not all(portion.whole for portion in new.portions):
            self._portion = shared_empty(self._group, _portion_bytes(engine), np.uint8)
        # Portions of one kind share a call, because they run one after the other.
        made: dict[tuple[object, ...], _InMemory] = {}
        for kind in dict.fromkeys(map(_alike, new.portions)):
            dtype, nbytes, whole = kind
            if whole:  # the addresses are bound in every call
                memory, view = None, np.empty(nbytes // dtype.itemsize, dtype)
            else:
                memory = view = self._portion[:nbytes].view(dtype)
            # The result stores of long arrays count together (`control_block.BLOCK`).
            among = new.nbytes if whole else 0
            work = engine.plan_allreduce(view, view, new.op, call.digest, among)
            made[kind] = memory, NodeCall(call, work)
        return [made[_alike(portion)] for portion in new.portions]


def _alike(portion: FusedChunk) -> tuple[Any, int, bool]:
    """Return the properties of portions that can share one prepared call."""
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
        # Also checks the op for the dtype.
        way = lowering.lower(
            op, dtype, call.group.size, scales, operation=call.operation, algorithm=algorithm
        )
        if way is not None:  # one lowering for each array, or none at all
            ways.append(way)
    # Only the check: feedback needs names, which a list of arrays does not have.
    for dtype in dict.fromkeys(dtypes):
        compression.codec(dtype, op, network=True)
    facts: dict[str, object] = {
        "op": op.value,
        "count": len(kinds),
        "arrays": bucket_layout.summary([(dtype.name, shape) for shape, dtype in kinds]),
        # A checksum of all shapes; the whole list may be longer than a description.
        **memory,
        "compression": compression,
        **scales,
        "algorithm": algorithm,
    }
    call.describe(**facts)
    counts = [math.prod(shape) for shape, _ in kinds]
    # By messages one portion for each dtype: `sys.maxsize` means no limit.
    limit = whole = sys.maxsize
    if engine is not None:
        limit, whole = _portion_bytes(engine), WHOLE_BYTES
    work = [way.dtype for way in ways] or dtypes
    # Equal for all arrays, because `lower` derives it from the op alone.
    by = ways[0].op if ways else op
    return FusionPlan(
        facts, *bucket_layout.split_by_bytes(counts, work, limit, whole), [], by, ways
    )


def _portion_bytes(engine: Engine) -> int:
    return PORTION_BYTES_CROWDED if engine.size > (os.cpu_count() or 1) else PORTION_BYTES


def pack(portion: FusedChunk, hosts: Sequence[Array], into: Array) -> None:
    """Copy the pieces of a portion side by side into `into`; 0.1 us per piece besides the copy."""
    pieces = [hosts[piece.array] for piece in portion.pieces]
    for at in (0, -1):  # the other pieces are whole arrays
        array, start, stop = portion.pieces[at]
        if stop - start < hosts[array].size:
            pieces[at] = host_arrays.flat(hosts[array])[start:stop]
    # "no": a portion has one dtype, so a cast would be a mistake.
    np.concatenate(pieces, axis=None, out=into, casting="no")


def unpack(portion: FusedChunk, shared: Array, flats: Sequence[Array]) -> None:
    """Copy a reduced portion into its flat result arrays."""
    # A portion has no padding between its pieces.
    at = 0
    for array, start, stop in portion.pieces:
        flats[array][start:stop] = shared[at : at + stop - start]
        at += stop - start


def put(portion: FusedChunk, shared: Array, results: Array) -> None:
    """Copy a reduced portion to its place in the memory of all results."""
    target = part(portion, results)
    # Below, the results stay in the caches for their next use.
    if results.nbytes < STREAMED_BYTES:
        target[...] = shared
    else:
        buffer_address.streaming()(address(target), address(shared), portion.nbytes)


def part(portion: FusedChunk, results: Array) -> Array:
    """Return the place of a portion in the memory of all results."""
    return results[portion.first : portion.first + portion.nbytes].view(portion.dtype)
