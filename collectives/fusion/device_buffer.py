"""Fusion buffer on a CUDA device, and reductions of its parts.

One kernel packs each bucket. The bucket is then reduced as any device array: by messages of device
memory, in slices through pinned memory, or by NCCL. The results are views of the bucket:

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
    """Return the device memory of arrays if all arrays of each rank are on one device; else [].

    *Collective*.
    """
    try:
        found = _residents(like)
    except adapters.FOREIGN_ERRORS as error:
        log.info("buckets are on the host, since an array cannot be seen on its device: %s", error)
        found = []
    mine = np.array([bool(found)])
    # All ranks or none: the reductions of host and device buckets do not fit together.
    return found if allreduce(group, mine, op=MIN, timeout=timeout)[0] else []


def _residents(like: Sequence[Any]) -> list[DeviceArray]:
    """Return the device memory of arrays if all are on one device; else []."""
    found: list[DeviceArray] = []
    for x in like:
        one = adapters.device_array(x, 0)
        # One stream orders the work on one device only.
        if one is None or (found and _device_id(one[1]) != _device_id(found[0])):
            return []
        found.append(one[1])
    return found


def _device_id(array: DeviceArray) -> int:
    return int(array.buffer.device.context.id)


class DeviceBucketBuffer:
    """Device memory of a `BucketBuffer`, laid out as in `HostBucketBuffer`.

    Attributes:
        shown: views of the arrays, of the planned kinds.
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
        # One pool serves all streams of the process, and these views may be written on any of them.
        device.synchronize()  # the pool may return memory that earlier work still uses
        self.shown = [
            each.show(self._part(start, start + kind.nbytes, kind.dtype), kind.shape)
            for each, start, kind in zip(like, self._layout.starts, kinds, strict=True)
        ]
        self._stretches: dict[tuple[int, ...], list[_Segment]] = {}
        self._written: dict[int, Callable[[], None]] = {}  # by array: waits for the caller's writes

    def results(self) -> list[Any]:
        """Return the results for the caller: the views."""
        return list(self.shown)

    def buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Group the arrays by their order of readiness; *collective*."""
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
        """Check an array and convert it to device memory; errors as `check_fits`."""
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
        device.synchronize()  # the caller may change the array after the return
        return DeviceBuffer(device, view, kind.dtype)

    def pack(self, bucket: Bucket, arrays: Sequence[DeviceBuffer | None], scale: float) -> None:
        """Pack the arrays of one bucket, out of all arrays, into its memory; None writes zeros."""
        # All copies first: a fill may overwrite an array that is a view of this memory.
        given = {i: self._apart(i, arrays[i]) for i in bucket.members}
        for stretch in self._stretches[bucket.members]:
            stretch.fill({i: given[i] for i in stretch.members}, scale)
        Device(self._cupy, self._context).synchronize()  # the caller may reuse its memory now

    def write(self, index: int, array: DeviceBuffer | None) -> None:
        """Copy one array to its memory; None if the caller has written to the view."""
        # The thread of the reduction waits later, so that the caller need not.
        if array is None:
            self._written[index] = streams.capture_streams([self.shown[index]])
            return
        start, size = self._layout.starts[index], self._layout.sizes[index]
        place = self._part(start, start + size, array.dtype)
        # Complete at the return, because the caller may then change its array.
        place.copy_from(array)
        place.synchronize()

    def _reduce(self, members: tuple[int, ...], stretches: Sequence[_Segment], name: str) -> None:
        for i in members:
            # The caller's stream may still write the view.
            if (wait := self._written.pop(i, None)) is not None:
                wait()
        options = self.options
        # The op of one rank is the identity, also MEAN.
        if self._group.size == 1:
            return
        for number, stretch in enumerate(stretches):
            allreduce(
                self._group, stretch.array, out=stretch.array, op=options.op,
                compression=options.compression, algorithm=options.algorithm,
                timeout=options.timeout,
                # Each span is reduced by a call of its own, so it has a residual of its own.
                name=f"{name}, {number}" if number else name,
            )  # fmt: skip

    def _part(self, start: int, stop: int, dtype: np.dtype[Any]) -> DeviceBuffer:
        """Return a part of the memory, for work on the current stream."""
        device = Device(self._cupy, self._context)
        with self._context:
            view = self._memory[start:stop].view(stored_as(dtype))
        return DeviceBuffer(device, view, dtype)

    def _stretch(self, members: Sequence[int], start: int, stop: int) -> _Segment:
        starts, sizes = self._layout.starts, self._layout.sizes
        inside = [i for i in members if sizes[i] and start <= starts[i] < stop]
        # In memory order, which the table of the kernel requires.
        inside.sort(key=lambda i: starts[i])
        dtype = self.kinds[members[0]].dtype
        firsts = [(starts[i] - start) // dtype.itemsize for i in inside]
        show = self._like[inside[0]].show
        return _Segment(
            tuple(inside), firsts, functools.partial(self._part, start, stop, dtype), show
        )

    def _apart(self, index: int, array: DeviceBuffer | None) -> DeviceBuffer | None:
        """Return the array, or a copy if it overlaps the memory of another array."""
        if array is None or not array.size:
            return array
        first = int(self._memory.data.ptr)
        elsewhere = not first <= array.address < first + self._memory.size
        # A view at its own place: each element is copied onto itself.
        if elsewhere or array.address == first + self._layout.starts[index]:
            return array
        # The kernel writes elements in any order, so it must not read memory of the same bucket.
        copy = array.empty(array.size)
        copy.copy_from(array)
        return copy


class _Segment:
    """Adjacent arrays of one bucket.

    Attributes:
        members: indices of the arrays, in memory order.
        array: all members as one array, of the kind of the first.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        firsts: Sequence[int],
        memory: Callable[[], DeviceBuffer],
        show: Callable[[DeviceBuffer, tuple[int, ...]], Any],
    ) -> None:
        self.members = members
        # Of the kind of the first array, so that `allreduce` finds the memory on the device.
        self.array = show(memory(), (memory().size,))
        self._firsts = firsts
        self._memory = memory
        self._pack = PackKernel()

    def fill(self, given: dict[int, DeviceBuffer | None], scale: float) -> None:
        """Pack the members' arrays with one kernel."""
        # A new one in each step, because a `DeviceBuffer` holds the stream that is current.
        memory = self._memory()
        places = [memory.address + n * memory.itemsize for n in self._firsts]
        arrays = [given[i] for i in self.members]
        if scale == 1 and all(
            array is not None and array.address == place
            for array, place in zip(arrays, places, strict=True)
        ):
            return  # the views already contain all values
        self._pack(
            memory,
            [
                # An address of 0 fills the place with zeros.
                (0, first, 1) if array is None else (array.address, first, array.size)
                for array, first in zip(arrays, self._firsts, strict=True)
            ],
            scale,
        )
