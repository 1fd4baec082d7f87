"""Grouped calls on one CUDA device: pack, then one reduction per dtype.

    arrays on the device     | a |  | b |    | c |
    one kernel per dtype       `------`--------'
    one array                | a b c |  -->  the other ranks  -->  | a b c |    results: parts of it

One long array crosses to the host in slices, instead of many short arrays; with NCCL it stays on
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import adapters
from collectives.arrays.adapter import DeviceArray
from collectives.arrays.reduction import is_on_host
from collectives.calls.group import Group
from collectives.fusion.bucket_layout import FusedChunk
from collectives.fusion.layouts import FusionKey
from collectives.kernels.cuda import PackKernel

__all__ = ["FusedDeviceArray", "DevicePackers", "device_arguments"]


class FusedDeviceArray(NamedTuple):
    """A device array of a grouped call.

    Attributes:
        own: elements of the array.
        out: the caller's array for the result, None for a new array.
        there: memory of `out`.
    """

    own: DeviceArray
    out: Any
    there: DeviceArray | None


def device_arguments(
    group: Group, asked: FusionKey, xs: Sequence[Any], out: Sequence[Any] | None
) -> list[FusedDeviceArray] | None:
    """Return the arrays of a call on their device, or None if the host path must reduce them.

    The device path needs arrays of one library on one device, no scales, and an op that is
    computed there.
    """
    if not len(xs) or type(xs[0]) is np.ndarray or group.size == 1 or asked.scales:
        return None
    if is_on_host(asked.op) or (out is not None and len(out) != len(xs)):
        return None
    found: list[FusedDeviceArray] = []
    kinds = set()
    for i, x in enumerate(xs):
        try:
            seen = adapters.device_array(x, 0)
            to = None if out is None else out[i]
            # An in-place call must not create a second adapter, which takes several us.
            taken = seen if to is None or to is x else adapters.device_array(to, 0)
        except adapters.FOREIGN_ERRORS:
            return None  # the host path reports the error
        if seen is None or taken is None:
            return None
        (memory, own), (into, there) = seen, taken
        # One library, because the results are parts of one array of its kind.
        kinds.add((type(memory), own.buffer.device.context.id))
        # A result that needs a conversion takes the host path.
        if to is not None and (into.why_constant() is not None or _form(there) != _form(own)):
            return None
        found.append(FusedDeviceArray(own, to, None if to is None else there))
    return found if len(kinds) == 1 else None


def _form(array: DeviceArray) -> tuple[object, ...]:
    """Return the properties that a result shares with its array."""
    return array.shape, array.dtype, array.buffer.device.context.id


class DevicePackers:
    """Kernels that pack the arrays of a group's calls and unpack results, for each dtype."""

    def __init__(self, group: Group) -> None:
        # Two kernels each, because a kernel keeps the table of its last addresses.
        self._of: dict[np.dtype[Any], tuple[PackKernel, PackKernel]] = {}

    def reduce(
        self,
        arrays: Sequence[FusedDeviceArray],
        portions: Sequence[FusedChunk],
        reduce: Callable[[Any], None],
    ) -> list[Any]:
        """Reduce arrays over all ranks.

        Args:
            arrays: arrays on one device.
            portions: one portion per dtype, of all nonempty arrays.
            reduce: reduces an array of a portion in place.

        Returns:
            The results: `out` of each array, or a part of the reduced array.
        """
        results = [one.out for one in arrays]
        for portion in portions:
            members = [arrays[piece.array] for piece in portion.pieces]
            count = portion.nbytes // portion.dtype.itemsize
            # In the library of the first array: results are parts of it.
            whole, packed = members[0].own.new((count,))
            # The arrays are adjacent, without padding: first element of each, and the total.
            firsts = np.cumsum([0] + [one.own.buffer.size for one in members]).tolist()
            pack, unpack = self._of.setdefault(portion.dtype, (PackKernel(), PackKernel()))
            pack(
                packed,
                [
                    (one.own.buffer.address, first, one.own.buffer.size)
                    for one, first in zip(members, firsts, strict=False)
                ],
            )
            # The reduction reads the packed array on other streams, or through MPI, which knows no
            # streams.
            packed.synchronize()
            reduce(whole)
            places = []
            for piece, one, first in zip(portion.pieces, members, firsts, strict=False):
                last = first + one.own.buffer.size
                if one.there is None:
                    # A view: the result keeps the packed array alive.
                    results[piece.array] = whole[first:last].reshape(one.own.shape)
                elif one.there.is_own:
                    places.append((one.there.buffer.address, first, last - first))
                else:
                    # Strided `out`: the library copies, because the kernel writes contiguous
                    # memory.
                    one.there.write(packed[first:last])
            # One kernel for all arrays with contiguous `out`.
            if places:
                unpack.unpack(packed, places)
            packed.synchronize()
            for one in members:
                if one.there is not None and one.there.is_own:
                    # Already written: this only notifies the library.
                    one.there.write(one.there.buffer)
        for i, one in enumerate(arrays):
            if results[i] is None:  # an empty array is in no portion
                results[i], _ = one.own.new(one.own.shape)
        return results
