"""Pipelined copies of device arrays through host memory, slice by slice.

Three windows of host memory hold one slice each. While slice k is processed in one window, slice
k + 1 is copied from the device to the next, and slice k - 1 is copied back from the third:

    from the device   | 0 | 1 | 2 | 3 |   |
    work              |   | 0 | 1 | 2 | 3 |
    back                  |   | 0 | 1 | 2 | 3 |

Each direction has its own stream. Both streams start after the work on the stream that was current
at the start of the call. A window is refilled only after its previous slice has been copied back.
When `CopyStreams.stream_through` returns or fails, all copies have ended and all results are
complete.

The windows are pinned so that copies are asynchronous: allocated by CUDA, or shared memory that
CUDA has pinned. If pinning fails, copies are correct but do not overlap.
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

# Bytes of a slice. Two ranks on one NVIDIA H200, with pinned copies at 54 GB/s, at 45 GB/s for
# 2 MiB. All-reduce in slices of 1, 2, 4 and 8 MiB, in ms: 16 MiB 2.2, 1.9, 1.8, 2.2; 64 MiB 7.3,
# 5.2, 4.9, 5.1; 256 MiB 28, 19, 17, 16. The first and the last slice do not overlap.
# By messages a slice is cut into one chunk per rank, and chunks below 256 KiB are slow
# (`ring.SLICE_BYTES`). So slices grow with the number of ranks, up to 8 MiB: 24 MiB per rank.
SLICE_BYTES = 2 << 20
_CHUNK_BYTES = 1 << 18
_MOST_SLICE_BYTES = 8 << 20

# Largest array, in bytes, that ranks of one node reduce through a private host copy. Longer arrays
# are reduced in shared windows.
SMALL_BYTES = 1 << 16

# cudaHostRegisterPortable: pinned for all devices of the process.
_PORTABLE = 1


def slice_bytes(size: int, *, by_messages: bool) -> int:
    """Return the bytes of a slice for a group of `size` ranks; the same on all ranks."""
    # By messages each rank's chunk of a slice must be long enough.
    wanted = size * _CHUNK_BYTES if by_messages else 0
    return min(_MOST_SLICE_BYTES, max(SLICE_BYTES, wanted))


def small_bytes(slice_bytes: int, *, by_messages: bool) -> int:
    """Return the largest number of bytes that is reduced like a host array."""
    return slice_bytes if by_messages else min(SMALL_BYTES, slice_bytes)


class StagingBuffers(NamedTuple):
    """Host memory for slices.

    Attributes:
        parts: the windows, each of shape (bytes of a slice,), uint8.
        release: unpins the memory, if it was pinned here.
    """

    parts: list[Array]
    release: Callable[[], None]


def pinned(cupy: Any, nbytes: int) -> StagingBuffers:
    """Allocate pinned windows of `nbytes` each."""
    # One allocation, because each pinning takes milliseconds.
    memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(WINDOWS * nbytes), np.uint8)
    return StagingBuffers(_parts(memory[: WINDOWS * nbytes]), lambda: None)


def pin_existing(cupy: Any, memory: Array) -> StagingBuffers:
    """Split existing memory, shape (nbytes,), uint8, into windows, and pin it if possible."""
    start = address(memory)
    try:
        # The memory belongs to the ranks of the node, so CUDA can only pin what exists.
        cupy.cuda.runtime.hostRegister(start, memory.nbytes, _PORTABLE)
    except RuntimeError as error:  # the base class of CuPy's CUDA errors
        log.info("shared memory cannot be pinned, so copies do not overlap: %s", error)
        return StagingBuffers(_parts(memory), lambda: None)
    # Unpinned before the memory is unmapped.
    return StagingBuffers(_parts(memory), lambda: cupy.cuda.runtime.hostUnregister(start))


def _parts(memory: Array) -> list[Array]:
    length = memory.size // WINDOWS
    return [memory[length * i : length * (i + 1)] for i in range(WINDOWS)]


class CopyStreams:
    """Two streams of a device, one for each direction."""

    def __init__(self, cupy: Any, context: Any) -> None:
        self._context = context
        with context:
            # Non-blocking: the default stream of the program must not wait for these copies.
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
        """Copy an array to the host, process it, and copy it back, slice by slice.

        Args:
            windows: the host memory.
            source: array that is copied to the host; None copies nothing.
            target: destination of the copies back, may be the source; None copies nothing back.
            work: called with each slice in host memory, of the array's dtype, and its number.
            like: an array of the same length; copies start after the work on its device's stream.
        """
        length = windows.parts[0].size // like.itemsize
        count = math.ceil(like.size / length)
        # Events of copies from the device, and of copies back, by slice.
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
            # The window is free once its previous slice has been copied back.
            if number >= WINDOWS and returned[number - WINDOWS] is not None:
                self._out.wait_event(returned[number - WINDOWS])
            fetched[number] = _start(source[cut(number)], window(number), self._out, out=True)

        with self._context:
            # All earlier work of the caller on the array's stream.
            begin = like.device.stream.record()
            self._out.wait_event(begin)
            self._back.wait_event(begin)
            try:
                # One slice ahead of the work.
                fetch(0)
                for number in range(count):
                    fetch(number + 1)
                    # In host time: `work` may call MPI, which knows no streams.
                    self._make_ready(fetched[number], returned, number)
                    work(window(number), number)
                    if target is not None:
                        part = target[cut(number)]
                        returned[number] = _start(part, window(number), self._back, out=False)
            finally:
                # Also after an error, so that no copy uses the caller's memory later.
                self._out.synchronize()
                self._back.synchronize()

    def _make_ready(self, fetched: Any, returned: list[Any], number: int) -> None:
        """Wait for the data of a slice; without a source, wait until its window is free."""
        if fetched is not None:
            fetched.synchronize()
        elif number >= WINDOWS and returned[number - WINDOWS] is not None:
            returned[number - WINDOWS].synchronize()


def _start(part: DeviceBuffer, window: Array, stream: Any, *, out: bool) -> Any:
    """Start a copy from or to a device; return the event after it."""
    pointer = part.view.data
    # Asynchronous only with pinned windows.
    copy = pointer.copy_to_host_async if out else pointer.copy_from_host_async
    copy(address(window), window.nbytes, stream)
    return stream.record()
