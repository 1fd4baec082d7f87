"""Pipelined copies of device arrays through host memory, slice by slice.

Three windows of host memory, each as long as a slice. While slice k is worked on in one of them,
slice k + 1 comes from the device into the next, and slice k - 1 goes back from the third:

    from the device   | 0 | 1 | 2 | 3 |   |
    work              |   | 0 | 1 | 2 | 3 |
    back                  |   | 0 | 1 | 2 | 3 |

Both directions have a stream of their own. They begin after everything on the stream that was
current when the call began; a window is filled again only after what it held has gone back. When
`CopyStreams.stream_through` returns, or fails, nothing is on its way any more, and all results are
complete.

The windows are pinned, so that the device copies by itself: memory that CUDA has allocated so, or
shared memory that it has pinned. Where it cannot, copies are correct, but nothing overlaps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.device import DeviceBuffer
from collectives.arrays.host_arrays import Array, address

__all__ = [
    "WINDOWS",
    "CopyStreams",
    "StagingBuffers",
    "pinned",
    "pin_existing",
    "slice_bytes",
    "small_bytes",
]

log = logging.getLogger(__name__)

WINDOWS = 3

# Bytes of a slice. Two ranks on one NVIDIA H200, where pinned copies run at 54 GB/s, those of 2 MiB
# at 45; an all-reduce by slices of 1, 2, 4 and 8 MiB took, in ms, of 16 MiB 2.2, 1.9, 1.8, 2.2; of
# 64 MiB 7.3, 5.2, 4.9, 5.1; of 256 MiB 28, 19, 17, 16. Filling and draining costs two slices.
# By messages a slice is cut into a chunk for each rank, and a chunk of less than 256 KiB is slow
# (`ring.SLICE_BYTES`), so that it grows with the ranks, up to 8 MiB: 24 MiB for each rank.
SLICE_BYTES = 2 << 20
_CHUNK_BYTES = 1 << 18
_MOST_SLICE_BYTES = 8 << 20

# Bytes up to which an array that ranks of one node reduce is copied to memory of its rank alone, as
# one of the host would be. Longer ones are reduced where all ranks see them.
SMALL_BYTES = 1 << 16

# cudaHostRegisterPortable: pinned for all devices of the process.
_PORTABLE = 1


def slice_bytes(size: int, *, by_messages: bool) -> int:
    """Return the bytes of a slice for a group of `size` ranks; the same on all of them."""
    wanted = size * _CHUNK_BYTES if by_messages else 0
    return min(_MOST_SLICE_BYTES, max(SLICE_BYTES, wanted))


def small_bytes(slice_bytes: int, *, by_messages: bool) -> int:
    """Return up to how many bytes arrays are reduced as if they were the host's."""
    return slice_bytes if by_messages else min(SMALL_BYTES, slice_bytes)


class StagingBuffers(NamedTuple):
    """Host memory for slices.

    Attributes:
        parts: shape (bytes of a slice,), uint8, each.
        release: gives the memory back to the system, as far as it was pinned.
    """

    parts: list[Array]
    release: Callable[[], None]


def pinned(cupy: Any, nbytes: int) -> StagingBuffers:
    """Allocate pinned windows of `nbytes` each."""
    memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(WINDOWS * nbytes), np.uint8)
    return StagingBuffers(_parts(memory[: WINDOWS * nbytes]), lambda: None)


def pin_existing(cupy: Any, memory: Array) -> StagingBuffers:
    """Make windows of memory that exists, shape (nbytes,), uint8, and pin it where possible."""
    start = address(memory)
    try:
        cupy.cuda.runtime.hostRegister(start, memory.nbytes, _PORTABLE)
    except RuntimeError as error:  # CUDA's errors are of this kind
        log.info("shared memory cannot be pinned, so copies do not overlap: %s", error)
        return StagingBuffers(_parts(memory), lambda: None)
    return StagingBuffers(_parts(memory), lambda: cupy.cuda.runtime.hostUnregister(start))


def _parts(memory: Array) -> list[Array]:
    length = memory.size // WINDOWS
    return [memory[length * i : length * (i + 1)] for i in range(WINDOWS)]


class CopyStreams:
    """Two streams of a device, one for each direction."""

    def __init__(self, cupy: Any, context: Any) -> None:
        self._context = context
        with context:
            self._out = cupy.cuda.Stream(non_blocking=True)
            self._back = cupy.cuda.Stream(non_blocking=True)

    def stream_through(
        self,
        windows: StagingBuffers,
        source: DeviceBuffer | None,
        target: DeviceBuffer | None,
        work: Callable[[Array, int], None],
        like: DeviceBuffer,
    ) -> None:
        """Bring every slice of an array to the host, work on it there, and take it back.

        Args:
            windows: the host memory.
            source: what comes to the host; None if nothing does.
            target: where it goes back to, perhaps the source itself; None if nothing does.
            work: called with each slice in host memory, of the array's dtype, and its number.
            like: an array of the same length; its device's stream comes first.
        """
        length = windows.parts[0].size // like.itemsize
        count = math.ceil(like.size / length)
        fetched: list[Any] = [None] * count
        returned: list[Any] = [None] * count

        def cut(number: int) -> slice:
            return slice(number * length, min((number + 1) * length, like.size))

        def window(number: int) -> Array:
            part = cut(number)
            memory = windows.parts[number % WINDOWS]
            return memory[: (part.stop - part.start) * like.itemsize].view(like.dtype)

        def fetch(number: int) -> None:
            if source is None or number >= count:
                return
            if number >= WINDOWS and returned[number - WINDOWS] is not None:
                self._out.wait_event(returned[number - WINDOWS])
            fetched[number] = _start(source[cut(number)], window(number), self._out, out=True)

        with self._context:
            begin = like.device.stream.record()
            self._out.wait_event(begin)
            self._back.wait_event(begin)
            try:
                fetch(0)
                for number in range(count):
                    fetch(number + 1)
                    self._make_ready(fetched[number], returned, number)
                    work(window(number), number)
                    if target is not None:
                        part = target[cut(number)]
                        returned[number] = _start(part, window(number), self._back, out=False)
            finally:
                self._out.synchronize()
                self._back.synchronize()

    def _make_ready(self, fetched: Any, returned: list[Any], number: int) -> None:
        """Wait until a slice has come; where none comes, until its window is free."""
        if fetched is not None:
            fetched.synchronize()
        elif number >= WINDOWS and returned[number - WINDOWS] is not None:
            returned[number - WINDOWS].synchronize()


def _start(part: DeviceBuffer, window: Array, stream: Any, *, out: bool) -> Any:
    """Start a copy from or to a device; return the event after it."""
    pointer = part.view.data
    copy = pointer.copy_to_host_async if out else pointer.copy_from_host_async
    copy(address(window), window.nbytes, stream)
    return stream.record()
