"""Operations on large CUDA arrays: CUDA-aware MPI, or slices staged through the host.

| MPI takes device memory (`collectives.calls.shared_settings`) | it does not |
| --- | --- |
| message algorithms on device memory | the array is staged through the host in slices |
| kernels combine received data | as host arrays, on one node in shared memory |

Small arrays, and operations without a device path, use the path of all foreign arrays: one copy to
the host, and one back. Repeated calls use pinned memory that is kept (`operations.plan_cache`).
For arrays longer than `small` (equal on all ranks) the ranks compare also the memory kind: all pass
a device array, or no rank does.

An all-reduce of one slice on one node runs in the first window, and later calls reuse its plan.

Compressed arrays are packed on the device and staged through the host as 16 bits in both cases.
That includes shared memory, where host arrays stay uncompressed, because the link to the host is
slow. The host packs them with feedback in shared memory, with compression only between
nodes, and with 8-bit blocks.

`algorithm="nccl"` leaves arrays of any size on the device (`devices.nccl`).
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
from collectives.node.engine import Engine
from collectives.plans import by_messages as messages
from collectives.plans import planner as plans
from collectives.plans.by_messages import ReduceSpec
from collectives.plans.prepared_calls import NodeCall

__all__ = ["DeviceArgument", "DeviceOperations"]


class DeviceArgument(NamedTuple):
    """A device array during one call.

    Attributes:
        shape, dtype: as of NumPy arrays.
        source: elements of the array.
        target: memory of the result, may be the source.
        result: return value of the call, once the target is complete.
        out: the caller's `out`, if `target` must be copied into it; else None.
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
        # Complete before the return, because the caller may use any stream.
        self.target.synchronize()
        return self.result


class DeviceOperations:
    """Device-array operations of one group.

    Attributes:
        aware: whether MPI takes device memory.
        slice_bytes: bytes of a window.
        small: for each operation, the most bytes that are copied to the host as a whole.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.aware = group.settings.cuda_aware == "on"
        # By the nodes: the engine does not exist before the first call.
        by_messages = group.num_nodes > 1
        self.slice_bytes = staging.slice_bytes(group.size, by_messages=by_messages)
        self.small = {
            "allreduce": staging.small_bytes(self.slice_bytes, by_messages=by_messages),
            "broadcast": self.slice_bytes,
        }
        self._windows: staging.StagingBuffers | None = None
        # By device, because an array of another device needs other streams.
        self._streams: dict[int, staging.CopyStreams] = {}
        self._planned: dict[tuple[int, int, int], NodeCall] = {}  # by digest, and part of a window
        self._nccl: nccl.Nccl | None = None
        self._pinned = np.empty(0, np.uint8)

    def borrow(self, operation: str, x: Any, out: Any, algorithm: str) -> DeviceArgument | None:
        """Return the array of a device operation; None if the host path handles the call."""
        anything = algorithm == nccl.NAME
        # One rank has nothing to exchange, except with NCCL, which the caller may test.
        if type(x) is np.ndarray or (self._group.size == 1 and not anything):
            return None
        # Shorter arrays take the host path, which copies them as a whole.
        least = 0 if anything else self.small[operation] + 1
        try:
            found = adapters.device_array(x, least)
            if found is None:
                return None
            memory, own = found
            if out is None:
                result, target = own.new(own.shape)
                return DeviceArgument(own.shape, own.dtype, own.buffer, target, result, None)
            # One lookup for an in-place call.
            other = found if out is x else adapters.device_array(out, least)
        except adapters.FOREIGN_ERRORS:
            return None  # the host path reports the error
        # The host path reports an `out` that cannot be written.
        if other is None or other[0].why_constant() is not None:
            return None
        memory, there = other
        # The host path raises the error about shape or dtype.
        if (there.shape, there.dtype) != (own.shape, own.dtype):
            return None
        source, target = own.buffer, there.buffer
        if out is x:
            return DeviceArgument(own.shape, own.dtype, source, source, out, there)
        # Arrays on two devices take the host path.
        if source.view.device.id != target.view.device.id:
            return None
        # `finish` then copies the result to `out`.
        if not there.is_own or _overlap(source, target):
            target = source.empty(source.size)
        return DeviceArgument(own.shape, own.dtype, source, target, out, there)

    def host_memory(self, operation: str, memory: ArrayAdapter) -> Array | None:
        """Return host memory for the elements of an array, the same in every call.

        Pinned memory for small arrays, else the first window. None for longer or empty arrays,
        before the windows exist, and if memory cannot be pinned.
        """
        nbytes = math.prod(memory.shape) * memory.dtype.itemsize
        # Empty arrays need no memory, and longer ones the windows.
        if not 0 < nbytes <= self.slice_bytes:
            return None
        if nbytes > self.small.get(operation, nbytes):
            # Windows are shared, so only a call of all ranks may create them.
            if self._windows is None:
                return None
            whole = self._windows.parts[0]
        else:
            if not self._pinned.size:
                try:
                    # Of one slice, so that later arrays of other sizes fit.
                    self._pinned = memory.pinned(self.slice_bytes)
                except adapters.FOREIGN_ERRORS:  # the full call reports them
                    return None
            whole = self._pinned
        return whole[:nbytes].view(memory.dtype).reshape(memory.shape)

    def algorithm_for(
        self, algorithm: str, there: DeviceArgument, op: Op | None, codec: Codec | None, name: str
    ) -> str:
        """Return the algorithm of a call before its description: NCCL if requested or preferred.

        Args:
            algorithm: the caller's argument.
            there: the array.
            op: reduction operation; None without a reduction.
            codec: codec of the compression; None without compression.
            name: name of the operation.

        Raises:
            TypeError, ValueError: NCCL does not support the reduction, or uses another device.
        """
        # Compression asks for rounding, which NCCL does not do.
        wanted = algorithm == "auto" and self._group.settings.nccl == "on" and codec is None
        if wanted and (op is None or nccl.knows(op, there.dtype)):
            algorithm = nccl.NAME
        if algorithm == nccl.NAME:
            if op is not None:
                nccl.refuse(op, there.dtype, codec is not None, name)
            own = there.source.device.context.id
            # Before the comparison, so that the error is a refusal.
            if self._nccl is not None and self._nccl.device != own:
                raise ValueError(
                    f"{name}: algorithm 'nccl' knows this rank by one GPU, expected an array on "
                    f"GPU {self._nccl.device}, got one on GPU {own}"
                )
        return algorithm

    def goes_to_mpi(self, algorithm: str) -> bool:
        """Return whether MPI sends device memory directly."""
        # "node" means the shared memory of the host, and MPI's collectives take host arrays here.
        return self.aware and algorithm not in ("node", "native")

    def allreduce(
        self, call: Call, there: DeviceArgument, how: ReduceSpec
    ) -> tuple[Array, NodeCall] | None:
        """Reduce a device array over all ranks, in a described call.

        Returns:
            For a new plan, its host memory in the shape of the array, and the plan; else None.
        """
        plain = how.codec is None and how.algorithm != nccl.NAME
        if plain and not self.goes_to_mpi(how.algorithm):
            engine = call.engine_for(how.algorithm)
            if engine is not None and there.source.nbytes <= self.slice_bytes:
                # Compares in the engine's round, unlike the paths below.
                return self._allreduce_planned(call, engine, there, how.op)
        call.agree()  # step 6 of docs/how-a-call-goes.md
        if how.algorithm == nccl.NAME:
            self._allreduce_at_once(call, there).allreduce(call, there.source, there.target, how.op)
        elif how.codec is not None and (packed := self._pack(call, there, how, how.codec)):
            op = SUM if how.op is MEAN else how.op  # `_pack` has divided the contributions
            self._allreduce_staged(call, packed, packed, how._replace(op=op))
            cuda.widen(packed, there.target)
        elif plain and self.goes_to_mpi(how.algorithm):
            self._allreduce_there(call, there, how)
        else:
            self._allreduce_staged(call, there.source, there.target, how)
        return None

    def broadcast(self, call: Call, there: DeviceArgument, root: int, algorithm: str) -> None:
        """Copy the root's source to every rank's target, in a described call."""
        # All paths below move data at once.
        call.agree()  # step 6
        if algorithm == nccl.NAME:
            self._allreduce_at_once(call, there).broadcast(call, there.source, there.target, root)
            return
        is_root = self._group.rank == root
        if is_root and there.target is not there.source:
            # The root's target also receives its own elements.
            there.target.copy_from(there.source)
        if self.goes_to_mpi(algorithm):
            # The engine works on host memory, so also ranks of one node exchange messages.
            levels = self._group.levels_by_messages
            run = call.algorithm("broadcast", algorithm, there.target.nbytes, levels)
            run(there.target, root, call.deadline)
            return

        def work(part: Array, number: int) -> None:
            plans.broadcast_chunk(call, part, root, algorithm)

        # The root copies to the host only, other ranks only from it.
        source, target = (there.target, None) if is_root else (None, there.target)
        self._pass(call, source, target, work)

    def close(self) -> None:
        """Release pinned memory, and destroy the NCCL communicator."""
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None
        if self._windows is not None:
            self._windows.release()
            self._windows = None
            # The plans hold addresses of the windows.
            self._planned.clear()
        self._pinned = np.empty(0, np.uint8)

    def _allreduce_at_once(self, call: Call, there: DeviceArgument) -> nccl.Nccl:
        """Return the NCCL communicator; the first call lets all ranks join."""
        if self._nccl is None:
            self._nccl = nccl.Nccl(call, there.source.device)
        return self._nccl

    def _allreduce_there(self, call: Call, there: DeviceArgument, how: ReduceSpec) -> None:
        """Reduce by messages of device memory."""
        work_dtype = reduction.work_dtype(there.dtype)
        buffer = there.target
        if work_dtype != there.dtype:
            # 16-bit floats are widened on the device: sums are float32.
            buffer = there.source.empty(there.source.size, work_dtype)
            cuda.widen(there.source, buffer)
        elif there.target is not there.source:
            buffer.copy_from(there.source)
        # Before the sum, as `reduction.prescale` does for host arrays.
        if how.op is MEAN:
            buffer.divide(self._group.size)
        levels = self._group.levels_by_messages  # by messages also inside a node
        run = call.algorithm("allreduce", how.algorithm, buffer.nbytes, levels)
        run(buffer, how.op, call.deadline)
        if buffer is not there.target:
            # Rounded once, at the end.
            there.target.copy_from(cuda.narrow(buffer, there.dtype))

    def _allreduce_planned(
        self, call: Call, engine: Engine, there: DeviceArgument, op: Op
    ) -> tuple[Array, NodeCall]:
        """Reduce an array of one slice in the first window, for which later calls find the plan.

        Later calls compare in the engine's round without `agree`. This call does the same if the
        windows exist.
        """
        if self._windows is None:
            # The windows are allocated together, only after the ranks have agreed.
            call.agree()
        windows = self._shared_windows(call, there.source)
        # In place in the window: all ranks have the same part, so nothing is copied.
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
        # On the device, where packing halves the bytes that cross the link to the host.
        is_packed = how.codec is not None and source.dtype == how.codec.dtype

        def work(part: Array, number: int) -> None:
            # A residual per slice: a codec is bound to one array.
            codec = how.codec and replace(how.codec, name=f"{how.codec.name}, slice {number}")
            if engine := call.engine_for(how.algorithm):
                self._plan(call, engine, part, how.op).first(call, part, part)
            elif is_packed:
                ranks = self._group.transport
                compressed.allreduce_packed(ranks, part, how.op, call.deadline, codec=codec)
            else:
                messages.allreduce_compared(call, part, part, how._replace(codec=codec))

        self._pass(call, source, target, work)

    def _plan(self, call: Call, engine: Engine, part: Array, op: Op) -> NodeCall:
        """Return the call that reduces a part of a window; create it at first use."""
        key = call.digest, host_arrays.address(part), part.size
        # Windows rotate, so a call uses the same parts again.
        if (plan := self._planned.get(key)) is None:
            if len(self._planned) >= plans.MOST:
                self._planned.clear()
            work = engine.plan_allreduce(part, part, op, call.digest)
            plan = self._planned[key] = NodeCall(call, work)
        return plan

    def _pack(
        self, call: Call, there: DeviceArgument, how: ReduceSpec, codec: Codec
    ) -> DeviceBuffer | None:
        """Round a contribution to 16 bits on the device; None unless all messages carry 16 bits."""
        engine = call.engine_for(how.algorithm)
        if not is_half(codec.dtype):
            return None
        if engine is not None and codec.residuals is not None:
            return None  # the errors of the results would have no residual
        in_levels = how.algorithm in ("auto", "hierarchical")
        # Between nodes the sums of the nodes are rounded, not the contributions.
        if engine is None and in_levels and self._group.layout.is_hierarchical:
            return None  # only messages between nodes carry 16 bits
        residual = None
        if codec.residuals is not None:
            residual = codec.residuals.array(
                codec.name, "contribution on a device", there.source.size, there.dtype,
                # Device memory, because the residual is added by the kernel.
                make=lambda count, dtype: _zeros(there.source, count),
            )  # fmt: skip
        divisor = self._group.size if how.op is MEAN else 1
        return cuda.narrow(there.source, codec.dtype, divisor=divisor, residual=residual)

    def _pass(
        self, call: Call, source: DeviceBuffer | None, target: DeviceBuffer | None, work: Any
    ) -> None:
        """Stage an array through the windows of this group."""
        # One of them is missing in a broadcast.
        like = source or target
        assert like is not None
        cupy, context = like.device.cupy, like.device.context
        windows = self._shared_windows(call, like)
        copies = self._streams.get(context.id)
        if copies is None:
            copies = self._streams[context.id] = staging.CopyStreams(cupy, context)
        copies.stream_through(windows, source, target, work, like)

    def _shared_windows(self, call: Call, like: DeviceBuffer) -> staging.StagingBuffers:
        """Return the windows; all ranks create them in the same call."""
        if self._windows is None:
            cupy = like.device.cupy
            # Without shared memory each rank has private windows.
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
    return a.address != b.address and -a.nbytes < b.address - a.address < b.nbytes
