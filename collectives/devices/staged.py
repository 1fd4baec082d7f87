"""Operations on large CUDA arrays: CUDA-aware MPI, or slices staged through the host.

| MPI takes device memory (`collectives.calls.shared_settings`) | it does not |
| --- | --- |
| algorithms by messages, of device memory | the array passes through the host in slices |
| kernels combine what arrives | as arrays of the host, in shared memory on one node |

Small arrays, and operations that are not here, go the way of all foreign arrays: copied to the host
as a whole, and back; calls like earlier ones through pinned memory that is kept
(`operations.plan_cache`). Of longer ones (`small`, equal on all ranks) it is a part of what ranks
compare that they are on a device: all bring such an array, or none does.

An all-reduce of one slice on one node is planned, in the first window, and later ones run the plan.

Compressed arrays are packed on the device, and pass through the host as 16 bits, in either case;
in shared memory, too, where the host's arrays stay as they are: here the way to the host is narrow.
With feedback, between nodes only, or in blocks of 8 bits, they are packed where the host's are.

`algorithm="nccl"` leaves arrays of any size where they are (`devices.nccl`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from collectives.algorithms import compressed
from collectives.arrays import adapters, host_arrays, reduction, staging
from collectives.arrays.adapter import ArrayAdapter, DeviceArray
from collectives.arrays.device import DeviceBuffer, is_half
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MEAN, SUM, Op
from collectives.calls import shared_arrays
from collectives.calls.call import Call
from collectives.calls.group import Group
from collectives.devices import nccl
from collectives.kernels import cuda
from collectives.kernels.compression import Codec
from collectives.node.engine import Engine, KernelCall
from collectives.plans import by_messages as messages
from collectives.plans import planner as plans
from collectives.plans.by_messages import ReduceSpec
from collectives.plans.prepared_calls import NodeCall

__all__ = ["DeviceArgument", "DeviceOperations"]


class DeviceArgument(NamedTuple):
    """A device array for the time of one call.

    Attributes:
        shape, dtype: as of NumPy arrays.
        source: its elements.
        target: where the result goes, perhaps the source itself.
        result: what the caller gets once the target is complete.
        out: whose memory the target is not, although the result is wanted there; else None.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    source: DeviceBuffer
    target: DeviceBuffer
    result: Any
    out: DeviceArray | None

    def finish(self) -> Any:
        """Return the result, complete on the device."""
        if self.out is not None:
            self.out.write(self.target)
        self.target.synchronize()
        return self.result


class DeviceOperations:
    """How the calls of one group treat device arrays.

    Attributes:
        aware: whether MPI takes device memory.
        slice_bytes: of a window.
        small: for an operation the most bytes that are copied whole, as if they were the host's.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.aware = group.settings.cuda_aware == "on"
        by_messages = group.num_nodes > 1
        self.slice_bytes = staging.slice_bytes(group.size, by_messages=by_messages)
        self.small = {
            "allreduce": staging.small_bytes(self.slice_bytes, by_messages=by_messages),
            "broadcast": self.slice_bytes,
        }
        self._windows: staging.StagingBuffers | None = None
        self._streams: dict[int, staging.CopyStreams] = {}
        self._planned: dict[tuple[int, int, int], KernelCall] = {}  # by call, and part of a window
        self._nccl: nccl.Nccl | None = None
        self._pinned = np.empty(0, np.uint8)

    def borrow(self, operation: str, x: Any, out: Any, algorithm: str) -> DeviceArgument | None:
        """Borrow an array that these operations are for; None for every other one."""
        anything = algorithm == nccl.NAME
        if type(x) is np.ndarray or (self._group.size == 1 and not anything):
            return None
        least = 0 if anything else self.small[operation] + 1
        try:
            found = adapters.device_array(x, least)
            if found is None:
                return None
            memory, own = found
            if out is None:
                result, target = own.new(own.shape)
                return DeviceArgument(own.shape, own.dtype, own.buffer, target, result, None)
            other = found if out is x else adapters.device_array(out, least)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None  # the other way says what is wrong
        if other is None or other[0].why_constant() is not None:
            return None
        memory, there = other
        if (there.shape, there.dtype) != (own.shape, own.dtype):
            return None
        source, target = own.buffer, there.buffer
        if out is x:
            return DeviceArgument(own.shape, own.dtype, source, source, out, there)
        if source.view.device.id != target.view.device.id:
            return None
        if not there.is_own or _overlap(source, target):
            target = source.empty(source.size)
        return DeviceArgument(own.shape, own.dtype, source, target, out, there)

    def host_memory(self, operation: str, memory: ArrayAdapter) -> Array | None:
        """Return host memory for the elements of an array, the same in every call.

        Pinned memory for small arrays, else the first window. None for what is longer, for what
        has no elements, and before there are windows.
        """
        nbytes = math.prod(memory.shape) * memory.dtype.itemsize
        if not 0 < nbytes <= self.slice_bytes:
            return None
        if nbytes > self.small.get(operation, nbytes):
            if self._windows is None:
                return None
            whole = self._windows.parts[0]
        else:
            if not self._pinned.size:
                self._pinned = memory.pinned(self.slice_bytes)
            whole = self._pinned
        return whole[:nbytes].view(memory.dtype).reshape(memory.shape)

    def algorithm_for(
        self, algorithm: str, there: DeviceArgument, op: Op | None, codec: Codec | None, name: str
    ) -> str:
        """Return the algorithm of a call before it is described: NCCL where the user wants that.

        Args:
            algorithm: as the caller has it.
            there: the array.
            op: None where nothing is reduced.
            codec: None where nothing is compressed.
            name: of the operation.

        Raises:
            TypeError, ValueError: NCCL cannot do it, or not on this device.
        """
        wanted = algorithm == "auto" and self._group.settings.nccl == "on" and codec is None
        if wanted and (op is None or nccl.knows(op, there.dtype)):
            algorithm = nccl.NAME
        if algorithm == nccl.NAME:
            if op is not None:
                nccl.refuse(op, there.dtype, codec is not None, name)
            own = there.source.device.context.id
            if self._nccl is not None and self._nccl.device != own:
                raise ValueError(
                    f"{name}: algorithm 'nccl' knows this rank by one GPU, expected an array on "
                    f"GPU {self._nccl.device}, got one on GPU {own}"
                )
        return algorithm

    def goes_to_mpi(self, algorithm: str) -> bool:
        """Tell whether messages are made of device memory."""
        return self.aware and algorithm not in ("node", "native")

    def allreduce(
        self, call: Call, there: DeviceArgument, how: ReduceSpec
    ) -> tuple[Array, NodeCall] | None:
        """Reduce a lent array over all ranks; the call has been described.

        Returns:
            Of what was planned the host memory, in the shape of the array, and the plan.
        """
        plain = how.codec is None and how.algorithm != nccl.NAME
        if plain and not self.goes_to_mpi(how.algorithm):
            engine = call.engine_for(how.algorithm)
            if engine is not None and there.source.nbytes <= self.slice_bytes:
                return self._allreduce_planned(call, engine, there, how.op)
        call.agree()  # step 6 of docs/how-a-call-goes.md
        if how.algorithm == nccl.NAME:
            self._allreduce_at_once(call, there).allreduce(call, there.source, there.target, how.op)
        elif how.codec is not None and (packed := self._pack(call, there, how, how.codec)):
            op = SUM if how.op is MEAN else how.op  # what is packed has been divided
            self._allreduce_staged(call, packed, packed, how._replace(op=op))
            cuda.widen(packed, there.target)
        elif plain and self.goes_to_mpi(how.algorithm):
            self._allreduce_there(call, there, how)
        else:
            self._allreduce_staged(call, there.source, there.target, how)
        return None

    def broadcast(self, call: Call, there: DeviceArgument, root: int, algorithm: str) -> None:
        """Replace the target by the root's source; the call has been described."""
        call.agree()  # step 6
        if algorithm == nccl.NAME:
            self._allreduce_at_once(call, there).broadcast(call, there.source, there.target, root)
            return
        is_root = self._group.rank == root
        if is_root and there.target is not there.source:
            there.target.copy_from(there.source)
        if self.goes_to_mpi(algorithm):
            levels = self._group.levels_by_messages
            run = call.algorithm("broadcast", algorithm, there.target.nbytes, levels)
            run(there.target, root, call.deadline)
            return

        def work(part: Array, number: int) -> None:
            plans.broadcast_chunk(call, part, root, algorithm)

        source, target = (there.target, None) if is_root else (None, there.target)
        self._pass(call, source, target, work)

    def close(self) -> None:
        """Give back what is pinned, and leave NCCL."""
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None
        if self._windows is not None:
            self._windows.release()
            self._windows = None
            self._planned.clear()
        self._pinned = np.empty(0, np.uint8)

    def _allreduce_at_once(self, call: Call, there: DeviceArgument) -> nccl.Nccl:
        """Return the ranks as NCCL knows them; the first call lets all of them join."""
        if self._nccl is None:
            self._nccl = nccl.Nccl(call, there.source.device)
        return self._nccl

    def _allreduce_there(self, call: Call, there: DeviceArgument, how: ReduceSpec) -> None:
        """Reduce by messages of device memory."""
        work_dtype = reduction.work_dtype(there.dtype)
        buffer = there.target
        if work_dtype != there.dtype:
            buffer = there.source.empty(there.source.size, work_dtype)
            cuda.widen(there.source, buffer)
        elif there.target is not there.source:
            buffer.copy_from(there.source)
        if how.op is MEAN:
            buffer.divide(self._group.size)
        levels = self._group.levels_by_messages  # also inside a node
        run = call.algorithm("allreduce", how.algorithm, buffer.nbytes, levels)
        run(buffer, how.op, call.deadline)
        if buffer is not there.target:
            there.target.copy_from(cuda.narrow(buffer, there.dtype))

    def _allreduce_planned(
        self, call: Call, engine: Engine, there: DeviceArgument, op: Op
    ) -> tuple[Array, NodeCall]:
        """Reduce an array of one slice in the first window, where later calls find the plan.

        They compare as they meet, and do not agree before. So does this one, if there are windows.
        """
        if self._windows is None:
            call.agree()
        windows = self._shared_windows(call, there.source)
        part = windows.parts[0][: there.source.nbytes].view(there.dtype)
        plan = NodeCall(call, engine.plan_allreduce(part, part, op, call.digest))

        def work(part: Array, number: int) -> None:
            plan.first(call, part, part)

        self._pass(call, there.source, there.target, work)
        return part.reshape(there.shape), plan

    def _allreduce_staged(
        self, call: Call, source: DeviceBuffer, target: DeviceBuffer, how: ReduceSpec
    ) -> None:
        """Reduce slice by slice on the host."""
        is_packed = how.codec is not None and source.dtype == how.codec.dtype

        def work(part: Array, number: int) -> None:
            codec = how.codec and replace(how.codec, name=f"{how.codec.name}, slice {number}")
            if engine := call.engine_for(how.algorithm):
                call.drive(self._plan(call, engine, part, how.op))
            elif is_packed:
                ranks = self._group.transport
                compressed.allreduce_packed(ranks, part, how.op, call.deadline, codec=codec)
            else:
                messages.allreduce_compared(call, part, part, how._replace(codec=codec))

        self._pass(call, source, target, work)

    def _plan(self, call: Call, engine: Engine, part: Array, op: Op) -> KernelCall:
        """Return what reduces a part of a window; the first call of its kind has made it."""
        key = call.digest, host_arrays.address(part), part.size
        if (work := self._planned.get(key)) is None:
            if len(self._planned) >= plans.MOST:
                self._planned.clear()
            work = self._planned[key] = engine.plan_allreduce(part, part, op, call.digest)
        return work

    def _pack(
        self, call: Call, there: DeviceArgument, how: ReduceSpec, codec: Codec
    ) -> DeviceBuffer | None:
        """Round a contribution to 16 bits on the device, where these go all the way."""
        engine = call.engine_for(how.algorithm)
        if not is_half(codec.dtype):
            return None
        if engine is not None and codec.residuals is not None:
            return None  # nothing would keep the errors of the results
        in_levels = how.algorithm in ("auto", "hierarchical")
        if engine is None and in_levels and self._group.layout.is_hierarchical:
            return None  # only the network carries 16 bits
        residual = None
        if codec.residuals is not None:
            residual = codec.residuals.array(
                codec.name, "contribution on a device", there.source.size, there.dtype,
                make=lambda count, dtype: _zeros(there.source, count),
            )  # fmt: skip
        divisor = self._group.size if how.op is MEAN else 1
        return cuda.narrow(there.source, codec.dtype, divisor=divisor, residual=residual)

    def _pass(
        self, call: Call, source: DeviceBuffer | None, target: DeviceBuffer | None, work: Any
    ) -> None:
        """Pass an array through this communicator's windows."""
        like = source or target
        assert like is not None
        cupy, context = like.device.cupy, like.device.context
        windows = self._shared_windows(call, like)
        copies = self._streams.get(context.id)
        if copies is None:
            copies = self._streams[context.id] = staging.CopyStreams(cupy, context)
        copies.stream_through(windows, source, target, work, like)

    def _shared_windows(self, call: Call, like: DeviceBuffer) -> staging.StagingBuffers:
        """Return the windows; made on all ranks at the same call, since all agree on it."""
        if self._windows is None:
            cupy = like.device.cupy
            memory = shared_arrays.allocate(call, staging.WINDOWS * self.slice_bytes)
            self._windows = (
                staging.pinned(cupy, self.slice_bytes)
                if memory is None
                else staging.pin_existing(cupy, memory)
            )
        return self._windows


def _zeros(like: DeviceBuffer, count: int) -> DeviceBuffer:
    zeros = like.empty(count)
    with like.device.context:
        zeros.view[...] = like.dtype.type(0)
    like.device.put()
    return zeros


def _overlap(a: DeviceBuffer, b: DeviceBuffer) -> bool:
    """Tell whether two arrays share memory without being the same."""
    return a.address != b.address and -a.nbytes < b.address - a.address < b.nbytes
