"""A stand-in for CuPy whose device memory is host memory, and as late as a real device's.

What is put on a stream happens when somebody waits for that stream, and not before; a copy from
pinned memory then reads whatever is there. Pinned memory is overwritten as soon as nobody holds it.
Code that forgets to wait, or lets memory go too early, gets wrong numbers here, too.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from types import SimpleNamespace

import numpy as np


class Stream:
    def __init__(self, ptr):
        self.ptr = ptr
        self.queue = []
        self.waits = 0

    def synchronize(self):
        self.waits += 1
        while self.queue:
            self.queue.pop(0)()


class Device:
    """Counts how often it was made the current one."""

    def __init__(self, number):
        self.id = number
        self.entered = 0

    def __enter__(self):
        self.entered += 1
        return self

    def __exit__(self, *error):
        pass


def memory_at(address, shape, dtype, strides=None):
    """View host memory by its address, as a device does: nothing is kept alive."""
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if strides else None
    count = math.prod(shape) * dtype.itemsize if reach is None else reach + dtype.itemsize
    raw = (ctypes.c_ubyte * max(count, 1)).from_address(address)
    return np.ndarray(shape, dtype, raw, strides=strides)


class ndarray:  # noqa: N801  (CuPy's name)
    """Device memory: its elements are in `memory`, to be looked at when the streams are idle."""

    def __init__(self, fake, memory, keep=None):
        self.fake = fake
        self.memory = memory
        self.keep = keep
        self.device = fake.device
        self.shape, self.strides, self.dtype = memory.shape, memory.strides, memory.dtype
        self.nbytes, self.flags = memory.nbytes, memory.flags

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape, "typestr": self.dtype.str, "strides": self.strides,
            "data": (self.memory.ctypes.data, False), "version": 3,
            "stream": self.fake.current.ptr,
        }  # fmt: skip

    def __array__(self, *args, **keywords):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def get(self, out):
        assert out.flags.c_contiguous
        assert (out.shape, out.dtype) == (self.shape, self.dtype)
        self.fake.current.synchronize()
        out[...] = self.memory

    def set(self, host):
        assert self.flags.c_contiguous
        assert (host.shape, host.dtype) == (self.shape, self.dtype)
        self.fake.copy_later(self.memory, host)

    def __setitem__(self, where, other):
        assert isinstance(other, ndarray)
        self.fake.later(lambda: self.memory.__setitem__(where, other.memory))


class FakeCupy:
    """What of the module `cupy` the package uses; `available` is whether there is a device."""

    ndarray = ndarray

    def __init__(self, available=True):
        self.device = Device(0)
        self.streams = {ptr: Stream(ptr) for ptr in (2, 4096)}
        self.threads = threading.local()
        self.pinned = {}  # address -> memory; a pool, which gives nothing back to the system
        self.lock = threading.Lock()
        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            get_current_stream=lambda: self.current,
            alloc_pinned_memory=self.alloc_pinned_memory,
        )

    @property
    def current(self):
        """The current stream, each thread's own."""
        if not hasattr(self.threads, "stream"):
            self.threads.stream = Stream(1)
        return self.threads.stream

    @current.setter
    def current(self, stream):
        self.threads.stream = stream

    def alloc_pinned_memory(self, nbytes):
        block = bytearray(nbytes)
        handle = (ctypes.c_ubyte * nbytes).from_buffer(block)
        with self.lock:
            self.pinned[ctypes.addressof(handle)] = block
        weakref.finalize(handle, lambda: block.__setitem__(slice(None), b"\xff" * nbytes))
        return handle

    def later(self, action):
        self.current.queue.append(action)

    def copy_later(self, memory, host):
        """Copy like the device's copy engine: from an address, at the time it comes to it."""
        if host.ctypes.data not in self.pinned:
            host = host.copy()  # the driver takes pageable memory along at once
            self.later(lambda: np.copyto(memory, host))
            return
        address, shape, dtype = host.ctypes.data, host.shape, host.dtype
        assert host.flags.c_contiguous
        self.later(lambda: np.copyto(memory, memory_at(address, shape, dtype)))

    def array(self, values, dtype=None):
        """Make a device array at once."""
        return ndarray(self, np.array(values, dtype))

    def asarray(self, x):
        if isinstance(x, ndarray):
            return x
        if isinstance(x, np.ndarray):
            array = ndarray(self, np.empty(x.shape, x.dtype))
            self.copy_later(array.memory, x)
            return array
        interface = x.__cuda_array_interface__
        if interface.get("stream") is not None:
            self.streams[interface["stream"]].synchronize()
        memory = memory_at(
            interface["data"][0],
            interface["shape"],
            np.dtype(interface["typestr"]),
            interface.get("strides"),
        )
        return ndarray(self, memory, keep=x)

    def from_dlpack(self, x):
        return ndarray(self, np.from_dlpack(x.memory), keep=x)


class Buffer:
    """Somebody else's device memory: shows the CUDA array interface and nothing more."""

    def __init__(self, fake, values, stream=None, read_only=False):
        self.fake = fake
        self.memory = np.array(values)
        self.stream = stream
        self.read_only = read_only

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.memory.shape, "typestr": self.memory.dtype.str, "version": 3,
            "data": (self.memory.ctypes.data, self.read_only), "stream": self.stream,
        }  # fmt: skip
