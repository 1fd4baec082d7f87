"""Fusion buffer on a CUDA device, and reductions of its parts.

Each bucket is packed by one kernel, travels once (as any array on a device: as messages of device
memory, in slices through pinned memory, or by NCCL), and its arrays come back as views of it:

    gradients on the device   |g0|   |g1|      |g2|
    one kernel                  `-----`---------'
    bucket on the device      |g0 g1 g2 ..|  -->  the other ranks  -->  |g0 g1 g2 ..|
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays import adapters, host_arrays, streams
from collectives.arrays.adapter import DeviceArray
from collectives.arrays.device import Device, DeviceBuffer, stored_as
from collectives.arrays.reduction import MIN
from collectives.arrays.specs import ArraySpec
from collectives.calls.group import Group
from collectives.fusion.host_buffer import Bucket, BucketOptions, check_fits, layout_of
from collectives.kernels.cuda import PackKernel
from collectives.operations.reduce import allreduce

__all__ = ["DeviceBucketBuffer", "if_all_on_device"]

log = logging.getLogger(__name__)


def if_all_on_device(group: Group, like: Sequence[Any], timeout: float | None) -> list[DeviceArray]:
    """See arrays where they are, if all of a rank are on one device, on all ranks; else none.

    *Collective*.
    """
    try:
        found = _residents(like)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.info("buckets are on the host, since an array cannot be seen on its device: %s", error)
        found = []
    mine = np.array([bool(found)])
    return found if allreduce(group, mine, op=MIN, timeout=timeout)[0] else []


def _residents(like: Sequence[Any]) -> list[DeviceArray]:
    """See arrays where they are, if that is one device; else none."""
    found: list[DeviceArray] = []
    for x in like:
        one = adapters.device_array(x, 0)
        if one is None or (found and _device_id(one[1]) != _device_id(found[0])):
            return []
        found.append(one[1])
    return found


def _device_id(array: DeviceArray) -> int:
    return int(array.buffer.device.context.id)


class DeviceBucketBuffer:
    """Memory on one device, laid out as `HostBucketBuffer` on the host; a `BucketBuffer`.

    Attributes:
        shown: the places, as arrays of the kinds that were asked for.
    """

    def __init__(
        self,
        group: Group,
        kinds: Sequence[ArraySpec],
        options: BucketOptions,
        like: Sequence[DeviceArray],
    ) -> None:
        self.kinds = kinds
        self.options = options
        self._group = group
        self._like = like
        self._layout = layout_of(kinds, options)
        device = like[0].buffer.device
        self._cupy, self._context = device.cupy, device.context
        with self._context:
            self._memory = self._cupy.empty(self._layout.total, np.dtype(np.uint8))
        device.put()
        device.synchronize()  # the pool may give memory that earlier work still uses
        self.shown = [
            each.show(self._part(start, start + kind.nbytes, kind.dtype), kind.shape)
            for each, start, kind in zip(like, self._layout.starts, kinds, strict=True)
        ]
        self._stretches: dict[tuple[int, ...], list[_Segment]] = {}
        self._written: dict[int, Callable[[], None]] = {}  # waits for who has written there

    def results(self) -> list[Any]:
        """Return what callers get of the places: themselves."""
        return list(self.shown)

    def buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Group the arrays as they become ready; *collective*."""
        made = []
        self._stretches = {}
        for number, members in enumerate(self._layout.groups(order)):
            name = f"{self.options.name}, {number}"
            stretches = [self._stretch(members, *span) for span in self._layout.spans(members)]
            self._stretches[members] = stretches
            reduce = functools.partial(self._reduce, members, stretches, name)
            made.append(Bucket(members, bool(stretches), name, reduce))
        return made

    def checked(self, operation: str, index: int, value: Any, name: str) -> DeviceBuffer:
        """See an array of any kind on the device; errors as `check_fits`."""
        kind = self.kinds[index]
        found = adapters.device_array(value, 0)
        if found is not None and found[1].buffer.device.context.id == self._context.id:
            check_fits(kind, found[1], operation, name)
            return found[1].buffer
        array = host_arrays.host_view(value, operation=operation).host
        check_fits(kind, array, operation, name)
        flat = np.ascontiguousarray(array).reshape(-1).view(stored_as(kind.dtype))
        device = Device(self._cupy, self._context)
        with self._context:
            view = self._cupy.asarray(flat)
        device.synchronize()  # the copy may read memory that the caller changes next
        return DeviceBuffer(device, view, kind.dtype)

    def pack(self, bucket: Bucket, arrays: Sequence[DeviceBuffer | None], scale: float) -> None:
        """Pack the arrays of a bucket, of all arrays, into their places; None for zeros."""
        given = {i: self._apart(i, arrays[i]) for i in bucket.members}
        for stretch in self._stretches[bucket.members]:
            stretch.fill({i: given[i] for i in stretch.members}, scale)
        Device(self._cupy, self._context).synchronize()  # before the caller's memory is used again

    def write(self, index: int, array: DeviceBuffer | None) -> None:
        """Write one array to its place; None if it stands there."""
        if array is None:
            self._written[index] = streams.capture_streams([self.shown[index]])
            return
        start, size = self._layout.starts[index], self._layout.sizes[index]
        place = self._part(start, start + size, array.dtype)
        place.copy_from(array)
        place.synchronize()

    def _reduce(self, members: tuple[int, ...], stretches: Sequence[_Segment], name: str) -> None:
        for i in members:
            if (wait := self._written.pop(i, None)) is not None:
                wait()
        options = self.options
        if self._group.size == 1:
            return
        for number, stretch in enumerate(stretches):
            allreduce(
                self._group, stretch.array, out=stretch.array, op=options.op,
                compression=options.compression, algorithm=options.algorithm,
                timeout=options.timeout,
                name=f"{name}, {number}" if number else name,
            )  # fmt: skip

    def _part(self, start: int, stop: int, dtype: np.dtype[Any]) -> DeviceBuffer:
        """Show some bytes of the memory, for work on the stream that is current now."""
        device = Device(self._cupy, self._context)
        with self._context:
            view = self._memory[start:stop].view(stored_as(dtype))
        return DeviceBuffer(device, view, dtype)

    def _stretch(self, members: Sequence[int], start: int, stop: int) -> _Segment:
        starts, sizes = self._layout.starts, self._layout.sizes
        inside = [i for i in members if sizes[i] and start <= starts[i] < stop]
        inside.sort(key=lambda i: starts[i])
        dtype = self.kinds[members[0]].dtype
        firsts = [(starts[i] - start) // dtype.itemsize for i in inside]
        show = self._like[inside[0]].show
        return _Segment(
            tuple(inside), firsts, functools.partial(self._part, start, stop, dtype), show
        )

    def _apart(self, index: int, array: DeviceBuffer | None) -> DeviceBuffer | None:
        """Return an array that does not lie in the place of another one; else a copy of it."""
        if array is None or not array.size:
            return array
        first = int(self._memory.data.ptr)
        elsewhere = not first <= array.address < first + self._memory.size
        if elsewhere or array.address == first + self._layout.starts[index]:
            return array
        copy = array.empty(array.size)
        copy.copy_from(array)
        return copy


class _Segment:
    """Neighbours of one bucket.

    Attributes:
        members: indices of the arrays, in the order of their places.
        array: all of them as one array, of the kind of the first.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        firsts: Sequence[int],
        memory: Callable[[], DeviceBuffer],
        show: Callable[[DeviceBuffer, tuple[int, ...]], Any],
    ) -> None:
        self.members = members
        self.array = show(memory(), (memory().size,))
        self._firsts = firsts
        self._memory = memory
        self._pack = PackKernel()

    def fill(self, given: dict[int, DeviceBuffer | None], scale: float) -> None:
        """Pack the arrays of its members into their places, by one kernel."""
        memory = self._memory()
        places = [memory.address + n * memory.itemsize for n in self._firsts]
        arrays = [given[i] for i in self.members]
        if scale == 1 and all(
            array is not None and array.address == place
            for array, place in zip(arrays, places, strict=True)
        ):
            return  # they were computed where they are reduced
        self._pack(
            memory,
            [
                (0, first, 1) if array is None else (array.address, first, array.size)
                for array, first in zip(arrays, self._firsts, strict=True)
            ],
            scale,
        )
