"""A stand-in for CuPy whose device memory is host memory, and as late as a real device's.

What is put on a stream happens when somebody waits for that stream, or for an event behind it, and
not before; a copy from or to pinned memory then reads and writes whatever is there. Streams know
nothing of each other unless one waits for an event of the other. Pinned memory is overwritten as
soon as nobody holds it. Code that forgets to wait, or lets memory go too early, gets wrong numbers
here, too. The `log` has every copy and every wait of the host in order.
"""

import ctypes
import math
import threading
import time
import weakref
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np


class Stream:
    def __init__(self, ptr=None, *, non_blocking=False):
        self.ptr = id(self) if ptr is None else ptr
        self.queue = []
        self.waits = 0
        self.lock = threading.RLock()

    def synchronize(self):
        self.waits += 1
        self.run_until(None)

    def run_until(self, event, *, wait=True):
        """Do what is due, up to an event or to the end; without `wait`, what needs nobody else."""
        give_up = time.monotonic() + 20
        with self.lock:
            while self.queue and not (event is not None and event.happened):
                if not getattr(self.queue[0], "is_due", lambda: True)():
                    if not wait:
                        return
                    assert time.monotonic() < give_up, "a kernel waits for other devices"
                    time.sleep(1e-3)
                    continue
                self.queue.pop(0)()

    def record(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.queue.append(event.synchronize)


class Event:
    """A place in the queue of a stream."""

    def __init__(self, stream=None):
        self.stream = stream
        self.happened = stream is None

    def record(self, stream):
        self.stream, self.happened = stream, False
        stream.queue.append(self.happen)

    def happen(self):
        self.happened = True

    def synchronize(self):
        self.stream.run_until(self)

    @property
    def done(self):
        if not self.happened:
            self.stream.run_until(self, wait=False)
        return self.happened


class Device:
    """Counts how often it was made the current one."""

    fake = None

    def __init__(self, number):
        self.id = number
        self.entered = 0
        self.pci_bus_id = f"0000:0{number}:00.0"

    def __enter__(self):
        self.entered += 1
        if self.fake is not None:
            self.fake.selected.append(self)
        return self

    def __exit__(self, *error):
        if self.fake is not None:
            self.fake.selected.pop()


def memory_at(address, shape, dtype, strides=None):
    """View host memory by its address, as a device does: nothing is kept alive."""
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if strides else None
    count = math.prod(shape) * dtype.itemsize if reach is None else reach + dtype.itemsize
    raw = (ctypes.c_ubyte * max(count, 1)).from_address(address)
    return np.ndarray(shape, dtype, raw, strides=strides)


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801  (CuPy's name)
    """Device memory: its elements are in `memory`, to be looked at when the streams are idle."""

    def __init__(self, fake, memory, keep=None):
        self.fake = fake
        self.memory = memory
        self.keep = keep
        self.device = fake.selected[-1]
        self.shape, self.strides, self.dtype = memory.shape, memory.strides, memory.dtype
        self.size, self.nbytes, self.flags = memory.size, memory.nbytes, memory.flags
        self.ndim, self.itemsize = memory.ndim, memory.itemsize
        self.data = Pointer(fake, memory.ctypes.data)

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape, "typestr": self.dtype.str, "strides": self.strides,
            "data": (self.memory.ctypes.data, False), "version": 3,
            "stream": self.fake.current.ptr,
        }  # fmt: skip

    def __array__(self, *args, **keywords):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __len__(self):
        return len(self.memory)

    def __dlpack_device__(self):
        return 2, self.device.id  # kDLCUDA

    def __dlpack__(self, **keywords):
        raise AssertionError("nothing here takes device memory by DLPack")

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **named):
        """Compute at once; where the result is wanted in place, as all the others."""
        raw = [np.asarray(x.used()) if isinstance(x, ndarray) else x for x in inputs]
        assert not any(isinstance(x, np.ndarray) and x.ndim for x in inputs)
        result = np.asarray(getattr(ufunc, method)(*raw, **named))
        if not out:
            return ndarray(self.fake, result)
        out[0].memory[...] = result
        return out[0]

    def used(self):
        """Return the elements, for work that the current device does."""
        selected = self.fake.selected[-1]
        assert self.device is selected, f"an array of GPU {self.device.id} on GPU {selected.id}"
        self.fake.current.synchronize()
        return self.memory

    def sum(self):
        return ndarray(self.fake, np.asarray(self.used().sum()))

    @property
    def T(self):  # noqa: N802
        return ndarray(self.fake, self.used().T, keep=self)

    def get(self, out=None):
        if out is None:
            out = np.empty(self.shape, self.dtype)
        assert out.flags.c_contiguous
        assert (out.shape, out.dtype) == (self.shape, self.dtype)
        self.fake.current.synchronize()
        out[...] = self.memory
        return out

    def set(self, host):
        assert self.flags.c_contiguous
        assert (host.shape, host.dtype) == (self.shape, self.dtype)
        self.fake.copy_later(self.memory, host)

    def __setitem__(self, where, other):
        assert isinstance(other, ndarray) or np.isscalar(other)
        value = getattr(other, "memory", other)
        self.fake.later(lambda: self.memory.__setitem__(where, value))

    def __getitem__(self, where):
        return ndarray(self.fake, self.memory[where], keep=self)

    def view(self, dtype):
        return ndarray(self.fake, self.memory.view(dtype), keep=self)

    def reshape(self, *shape):
        assert self.memory.flags.c_contiguous
        return ndarray(self.fake, self.memory.reshape(*shape), keep=self)


class Pointer:
    """An address on the device, and copies from there to the host and back."""

    def __init__(self, fake, ptr):
        self.fake = fake
        self.ptr = ptr

    def copy_to_host_async(self, address, nbytes, stream):
        self._copy(address, self.ptr, nbytes, stream, "to host", address)

    def copy_from_host_async(self, address, nbytes, stream):
        self._copy(self.ptr, address, nbytes, stream, "from host", address)

    def _copy(self, into, source, nbytes, stream, name, host):
        self.fake.log.append((name, nbytes))
        if not self.fake.is_pinned(host, nbytes):
            # The driver takes part: with memory of its own, which costs the overlap.
            stream.synchronize()
            ctypes.memmove(into, source, nbytes)
            return

        def copy():
            # What CUDA would do with memory that is not pinned any more is not for tests.
            assert self.fake.is_pinned(host, nbytes)
            ctypes.memmove(into, source, nbytes)

        stream.queue.append(copy)


class OutOfMemoryError(MemoryError):
    pass


class Gpu:
    """The memory of a device, which several processes may share; sizes in bytes."""

    def __init__(self, total):
        self.total = total
        self.free = total


class Pool:
    """A process's memory on each of its devices; keeps what it has, and rounds up to 512 bytes."""

    def __init__(self, gpus):
        self.gpus = gpus
        self.now = 0
        self.limits, self.taken, self.used = ([0] * len(gpus) for _ in range(3))

    def set_limit(self, size):
        self.limits[self.now] = size

    def get_limit(self):
        return self.limits[self.now]

    def total_bytes(self):
        return self.taken[self.now]

    def used_bytes(self):
        return self.used[self.now]

    def malloc(self, size):
        size = -(-size // 512) * 512
        more = max(0, self.used[self.now] + size - self.taken[self.now])
        limit, gpu = self.limits[self.now], self.gpus[self.now]
        if (limit and self.taken[self.now] + more > limit) or more > gpu.free:
            raise OutOfMemoryError(size)
        gpu.free -= more
        self.taken[self.now] += more
        return Block(self, self.now, size)


class Block:
    """Memory of a pool, until nobody holds it."""

    def __init__(self, pool, device, size):
        pool.used[device] += size
        self.give_back = weakref.finalize(
            self, lambda: pool.used.__setitem__(device, pool.used[device] - size)
        )


class PoolDevice(Device):
    """A device that a pool is asked about inside of the block."""

    def __init__(self, pool, number):
        super().__init__(number)
        self.pool = pool

    def __enter__(self):
        self.before, self.pool.now = self.pool.now, self.id
        return super().__enter__()

    def __exit__(self, *error):
        self.pool.now = self.before


class NcclError(RuntimeError):
    pass


class Clique:
    """The communicators that one identifier has brought together."""

    def __init__(self, size):
        self.size = size
        self.here = {}  # rank -> communicator
        self.steps = []  # of each operation: rank -> what it brings
        self.failed = None
        self.changed = threading.Condition()


class FakeNccl:
    """NCCL among the threads of a process, as `cupy.cuda.nccl` shows it: one for all their CuPys.

    A kernel of one rank waits, without a limit, for those of all the others.
    """

    available = True
    NcclError = NcclError
    dtypes = {  # noqa: RUF012
        0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64,
        6: np.float16, 7: np.float32, 8: np.float64, 9: ml_dtypes.bfloat16,
    }  # fmt: skip
    ops = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum, 4: np.add}  # noqa: RUF012

    def __init__(self, fake, *, as_bytes=True):
        self.fake = fake
        self.as_bytes = as_bytes
        self.cliques = {}  # identifier -> clique
        self.lock = threading.Lock()

    def get_unique_id(self):
        with self.lock:
            raw = np.full(128, 0x80 + len(self.cliques), np.uint8)
            self.cliques[raw.tobytes()] = None
        return raw.tobytes() if self.as_bytes else tuple(raw.view(np.int8).tolist())

    def NcclCommunicator(self, size, identifier, rank):  # noqa: N802
        assert isinstance(identifier, bytes if self.as_bytes else tuple)
        raw = identifier if self.as_bytes else np.array(identifier, np.int8).tobytes()
        with self.lock:
            clique = self.cliques[raw] = self.cliques[raw] or Clique(size)
        assert clique.size == size
        comm = NcclCommunicator(self, clique, rank, self.fake.selected[-1])
        with clique.changed:
            assert rank not in clique.here
            clique.here[rank] = comm
            clique.changed.notify_all()
            if not clique.changed.wait_for(lambda: len(clique.here) == size, timeout=20):
                raise NcclError("NCCL_ERROR_INTERNAL_ERROR: internal error")
        return comm


class NcclCommunicator:
    def __init__(self, library, clique, rank, device):
        self.library, self.clique, self.rank, self.device = library, clique, rank, device
        self.number = 0
        self.ended = None

    def allReduce(self, send, receive, count, dtype, op, stream):  # noqa: N802
        kind = np.dtype(FakeNccl.dtypes[dtype])

        def combine(parts):
            wide = [part.astype(np.float32) if kind.itemsize == 2 else part for part in parts]
            total = FakeNccl.ops[op].reduce(wide)
            return (total / len(parts) if op == 4 else total).astype(kind)

        self._enqueue(send, receive, count, kind, combine, stream, ("allReduce", count, dtype, op))

    def broadcast(self, send, receive, count, dtype, root, stream):
        kind = np.dtype(FakeNccl.dtypes[dtype])
        facts = ("broadcast", count, dtype, root)
        self._enqueue(send, receive, count, kind, lambda parts: parts[root], stream, facts)

    def check_async_error(self):
        if self.clique.failed:
            raise NcclError(self.clique.failed)

    def abort(self):
        self.ended = "aborted"

    def destroy(self):
        self.ended = "destroyed"

    def _enqueue(self, send, receive, count, kind, combine, stream, facts):
        fake, clique = self.library.fake, self.clique
        assert self.ended is None
        assert fake.selected[-1] is self.device
        assert fake.current.ptr == stream
        with clique.changed:
            while len(clique.steps) <= self.number:
                clique.steps.append({})
            step = clique.steps[self.number]
        self.number += 1

        def bring():
            step[self.rank] = facts, memory_at(send, (count,), kind).copy()

        def take():
            if self.ended is not None:
                return
            assert len({facts for facts, _ in step.values()}) == 1, "NCCL would read past the end"
            parts = [step[rank][1] for rank in range(clique.size)]
            memory_at(receive, (count,), kind)[...] = combine(parts)

        take.is_due = lambda: len(step) == clique.size or self.ended is not None
        fake.log.append(("nccl", count * kind.itemsize))
        fake.later(bring)
        fake.later(take)


class FakeCupy:
    """What of the module `cupy` the package uses; `available` is whether there is a device."""

    ndarray = ndarray
    generic = np.generic

    def __init__(self, available=True, gpus=(), can_register=True, devices=1):
        self.threads = threading.local()
        self.devices = [Device(i) for i in range(devices)]
        self.device = self.devices[0]
        if devices > 1:
            for device in self.devices:
                device.fake = self
        self.can_register = can_register
        self.registered = {}  # address -> bytes
        self.log = []
        self.streams = {ptr: Stream(ptr) for ptr in (2, 4096)}
        self.pinned = {}  # address -> memory; a pool, which gives nothing back to the system
        self.lock = threading.Lock()
        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            get_current_stream=lambda: self.current,
            alloc_pinned_memory=self.alloc_pinned_memory,
            Stream=Stream,
            Event=Event,
            set_allocator=lambda allocator: setattr(self, "allocator", allocator),
            alloc=lambda size: self.allocator(size),
            Device=lambda number: PoolDevice(self.pool, number) if gpus else self.devices[number],
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                hostRegister=self.host_register,
                hostUnregister=lambda address: self.registered.pop(address),
                getDeviceCount=lambda: len(gpus or self.devices),
                memGetInfo=lambda: (gpus[self.pool.now].free, gpus[self.pool.now].total),
            ),
        )
        self.cuda.nccl = FakeNccl(self)
        self.pool = Pool(gpus)
        self.allocator = self.pool.malloc
        self.get_default_memory_pool = lambda: self.pool

    @property
    def selected(self):
        """The current devices, the innermost last; each thread's own."""
        if not hasattr(self.threads, "selected"):
            self.threads.selected = [self.devices[0]]
        return self.threads.selected

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

    def host_register(self, address, nbytes, flags):
        assert address not in self.registered
        if not self.can_register:
            raise RuntimeError("cudaErrorNotSupported: operation not supported")
        self.registered[address] = nbytes

    def is_pinned(self, address, nbytes):
        known = [*self.registered.items(), *((a, len(block)) for a, block in self.pinned.items())]
        return any(start <= address and address + nbytes <= start + n for start, n in known)

    def later(self, action):
        self.current.queue.append(action)

    def late(self, values):
        """An array whose numbers are computed when its stream is waited for, not before."""
        array = self.array(np.zeros_like(values))
        self.later(lambda: array.memory.__setitem__(..., values))
        return array

    def empty(self, shape, dtype=float):
        return ndarray(self, np.full(shape, -1).astype(dtype))

    def ascontiguousarray(self, x):
        if x.flags.c_contiguous:
            return x
        copy = self.empty(x.shape, x.dtype)
        copy[...] = x
        return copy

    def __getattr__(self, name):
        if name not in ("add", "minimum", "maximum", "multiply", "true_divide"):
            raise AttributeError(name)

        def apply(a, b, out):
            operands = [getattr(x, "memory", x) for x in (a, b)]
            self.later(lambda: getattr(np, name)(*operands, out=out.memory))

        return apply

    def ElementwiseKernel(self, reads, writes, operation, name, preamble):  # noqa: N802
        """Make what the kernel is meant to do; `test_device_kernels.py` looks at its text."""
        _, kind, half = name.split("_")
        if kind in ("pack", "scale", "scale16"):
            return self.pack_kernel(half if kind == "scale16" else None)
        if kind == "unpack":
            return self.unpack_kernel()
        act = {"widen": widen, "narrow": narrow, "carry": carry}[kind]
        half = np.dtype(half) if half == "float16" else np.dtype(ml_dtypes.bfloat16)

        def launch(*arguments):
            assert len(arguments) == len(f"{reads}, {writes}".split(","))
            plain = [getattr(x, "memory", x) for x in arguments]
            self.later(lambda: act(half, *plain))

        return launch

    def pack_kernel(self, half):
        """Make the kernel that a table drives; `log` has each launch."""

        def launch(table, rows, *scale_and_out):
            *scale, out = scale_and_out
            self.log.append(("pack", out.nbytes))
            self.later(lambda: pack(half, table.memory.reshape(rows, 3), *scale, out=out.memory))

        return launch

    def unpack_kernel(self):
        """Make the kernel that writes what is packed to where its table says."""

        def launch(table, rows, packed):
            self.log.append(("unpack", packed.nbytes))
            self.later(lambda: unpack(table.memory.reshape(rows, 3), packed.memory))

        return launch

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
            if x.device is self.selected[-1] or x.device.fake is None:
                return x
            with x.device:
                elements = x.used().copy()
            return ndarray(self, elements)
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


def widen(half, x, y):
    y[...] = x.view(half)


def narrow(half, x, divisor, y):
    with np.errstate(over="ignore"):
        y.view(half)[...] = (x / divisor).astype(half)


def pack(half, table, scale=None, *, out):
    packed = np.zeros_like(out)
    for address, first, count in table.tolist():
        if not address:
            continue
        source = memory_at(address, (count,), out.dtype)
        if half is not None:
            dtype = np.dtype(half) if half == "float16" else np.dtype(ml_dtypes.bfloat16)
            source = (source.view(dtype).astype(np.float32) * scale).astype(dtype).view(np.uint16)
        elif scale is not None:
            source = source * scale
        packed[first : first + count] = source
    out[...] = packed


def unpack(table, packed):
    for address, first, count in table.tolist():
        if address:
            memory_at(address, (count,), packed.dtype)[...] = packed[first : first + count]


def carry(half, x, divisor, y, residual):
    total = x / divisor + residual
    with np.errstate(over="ignore", invalid="ignore"):
        y.view(half)[...] = total.astype(half)
        error = total - y.view(half).astype(x.dtype)
    residual[...] = np.where(np.isfinite(error), error, residual)


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


def _new(like, elements):
    return ndarray(like.fake, np.asarray(elements))


def _on_device(x, device=None, copy=None):
    assert isinstance(x, ndarray) or device is not None
    with device or x.device:
        if isinstance(x, ndarray):
            there = x.fake.asarray(x)
            return _new(x, there.used().copy()) if copy and there is x else there
        return device.fake.asarray(x)


def _full(shape, number, *, dtype, device):
    with device:
        return ndarray(device.fake, np.full(shape, number, dtype))


# Stands for that module in `sys.modules` where strategies use the double.
ARRAY_API = ModuleType("array_api_compat.cupy")
ARRAY_API.__dict__.update(
    float16=np.float16, float32=np.float32, float64=np.float64, int64=np.int64,
    astype=lambda x, dtype: _new(x, x.used().astype(dtype)),
    asarray=_on_device, full=_full, ascontiguousarray=lambda x: x.fake.ascontiguousarray(x),
    sum=lambda x, axis=None, dtype=None: _new(x, x.used().sum(axis=axis, dtype=dtype)),
    concat=lambda xs, axis=0: _new(xs[0], np.concatenate([x.used() for x in xs], axis=axis)),
    permute_dims=lambda x, axes: _new(x, x.used().transpose(axes)),
    sqrt=np.sqrt, maximum=np.maximum,
)  # fmt: skip
