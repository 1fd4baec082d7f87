"""Grouped calls on one CUDA device: pack, then one reduction per dtype.

    arrays on the device     | a |  | b |    | c |
    one kernel for a dtype     `------`--------'
    one array                | a b c |  -->  the other ranks  -->  | a b c |    results: parts of it

So every number crosses to the host as one of a long array, in slices, or by NCCL, not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import adapters
from collectives.arrays.adapter import DeviceArray
from collectives.arrays.reduction import LOWERED
from collectives.calls.group import Group
from collectives.fusion.bucket_layout import FusedChunk
from collectives.fusion.layouts import FusionKey
from collectives.kernels.cuda import PackKernel

__all__ = ["FusedDeviceArray", "DevicePackers", "device_arguments"]


class FusedDeviceArray(NamedTuple):
    """An array of a call.

    Attributes:
        own: where its elements are.
        out: the caller's array for the result, None if a new one is wanted.
        there: the memory of `out`.
    """

    own: DeviceArray
    out: Any
    there: DeviceArray | None


def device_arguments(
    group: Group, asked: FusionKey, xs: Sequence[Any], out: Sequence[Any] | None
) -> list[FusedDeviceArray] | None:
    """See the arrays of a call where they are, if this is for them; else None.

    It is for arrays of one library on one device, and for what is reduced as it is.
    """
    if not len(xs) or type(xs[0]) is np.ndarray or group.size == 1 or asked.scales:
        return None
    if asked.op in LOWERED or (out is not None and len(out) != len(xs)):
        return None
    found: list[FusedDeviceArray] = []
    kinds = set()
    for i, x in enumerate(xs):
        try:
            seen = adapters.device_array(x, 0)
            to = None if out is None else out[i]
            taken = seen if to is None or to is x else adapters.device_array(to, 0)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None  # the other way says what is wrong
        if seen is None or taken is None:
            return None
        (memory, own), (into, there) = seen, taken
        kinds.add((type(memory), own.buffer.device.context.id))
        if to is not None and (into.why_constant() is not None or _form(there) != _form(own)):
            return None
        found.append(FusedDeviceArray(own, to, None if to is None else there))
    return found if len(kinds) == 1 else None


def _form(array: DeviceArray) -> tuple[object, ...]:
    """Return what a result has in common with its array."""
    return array.shape, array.dtype, array.buffer.device.context.id


class DevicePackers:
    """What packs the arrays of a group's calls, and unpacks results, for each dtype."""

    def __init__(self, group: Group) -> None:
        self._of: dict[np.dtype[Any], tuple[PackKernel, PackKernel]] = {}

    def reduce(
        self,
        arrays: Sequence[FusedDeviceArray],
        portions: Sequence[FusedChunk],
        reduce: Callable[[Any], None],
    ) -> list[Any]:
        """Reduce arrays over all ranks.

        Args:
            arrays: of one device.
            portions: one for each dtype, of all arrays that have elements.
            reduce: called with an array of each portion, to reduce it in place.

        Returns:
            A result for each: what takes it, or a part of what was reduced.
        """
        results = [one.out for one in arrays]
        for portion in portions:
            members = [arrays[piece.array] for piece in portion.pieces]
            count = portion.nbytes // portion.dtype.itemsize
            whole, packed = members[0].own.new((count,))
            firsts = np.cumsum([0] + [one.own.buffer.size for one in members]).tolist()
            pack, unpack = self._of.setdefault(portion.dtype, (PackKernel(), PackKernel()))
            pack(
                packed,
                [
                    (one.own.buffer.address, first, one.own.buffer.size)
                    for one, first in zip(members, firsts, strict=False)
                ],
            )
            packed.synchronize()
            reduce(whole)
            places = []
            for piece, one, first in zip(portion.pieces, members, firsts, strict=False):
                last = first + one.own.buffer.size
                if one.there is None:
                    results[piece.array] = whole[first:last].reshape(one.own.shape)
                elif one.there.is_own:
                    places.append((one.there.buffer.address, first, last - first))
                else:
                    one.there.write(packed[first:last])
            if places:
                unpack.unpack(packed, places)
            packed.synchronize()
            for one in members:
                if one.there is not None and one.there.is_own:
                    one.there.write(one.there.buffer)  # it is there, and is told so
        for i, one in enumerate(arrays):
            if results[i] is None:  # it has no elements
                results[i], _ = one.own.new(one.own.shape)
        return results
