"""All-reduce and broadcast among GPUs through CuPy's NCCL bindings.

::

    first call   all ranks   compare the call as any other, and tell whether NCCL is there, and
                             which GPU they have: one for each rank
                 rank 0      an identifier -> all ranks, which join by it
    every call   all ranks   compare; put it on the array's stream; look whether it is over

NCCL's kernels wait for those of the other ranks on the device, for ever. So ranks that differ find
out before any kernel starts, and the host looks for the end until the limit of the call, as for any
message; what is not over then, or has failed, is aborted, and the group cannot be used any more.

Order of summation, and whether all ranks get the same bits, is up to NCCL. It rounds 16-bit floats
wherever two numbers are added.

Source: NCCL's manual, "Communicators" and "Using NCCL with multi-rank programs".
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from collectives.algorithms import recursive_doubling
from collectives.arrays import cuda_adapter
from collectives.arrays.device import Device, DeviceBuffer
from collectives.arrays.reduction import MAX, MEAN, MIN, PRODUCT, SUM, Op
from collectives.calls.call import Call
from collectives.core.errors import CollectiveError, some

__all__ = ["NAME", "Nccl", "knows", "refuse"]

NAME = "nccl"

# The numbers of `ncclRedOp_t` and `ncclDataType_t`, some of which CuPy has no names for.
_OPS = {SUM: 0, PRODUCT: 1, MAX: 2, MIN: 3, MEAN: 4}
_DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_BYTES = _DTYPES["uint8"]

# What ranks tell each other: the kind of the identifier, and it; then a line for each rank.
_ID_BYTES, _LINE_BYTES = 128, 96
_AS_BYTES, _AS_NUMBERS = 1, 2  # CuPy takes it as bytes from 14 on, before as a tuple of int8
_HAS, _LACKS = 1, 2


def knows(op: Op, dtype: np.dtype[Any]) -> bool:
    """Tell whether NCCL has this reduction."""
    return op in _OPS and dtype.name in _DTYPES


def refuse(op: Op, dtype: np.dtype[Any], compressed: bool, operation: str) -> None:
    """Refuse a reduction that NCCL does not have.

    Raises:
        TypeError: the op or the dtype.
        ValueError: it is to be compressed.
    """
    if not knows(op, dtype):
        raise TypeError(
            f"{operation}: NCCL has no {op.value} of {dtype}, expected one of "
            f"{' '.join(each.value for each in _OPS)} of {' '.join(_DTYPES)}"
        )
    if compressed:
        raise ValueError(
            f"{operation}: algorithm 'nccl' moves arrays as they are, expected no compression"
        )


class Nccl:
    """The ranks of a group, each on a GPU of its own, as NCCL knows them.

    Args:
        call: the first one, which has been compared; *collective*.
        device: of this rank.

    Raises:
        ValueError: NCCL is not there on a rank, or ranks share a GPU; on all ranks.
        CollectiveError: this rank could not join.
        CollectiveTimeout: another one did not.
    """

    def __init__(self, call: Call, device: Device) -> None:
        self.device = device.context.id
        self._group = call.group
        nccl = cuda_adapter.nccl()
        identifier, problem = _exchange_identifier(call, device, nccl)
        if problem:
            raise call.announce(ValueError(f"{call.operation}: algorithm 'nccl' {problem}"))
        joined: Future[Any] = Future()

        def join() -> None:
            try:
                with device.context:
                    joined.set_result(
                        nccl.NcclCommunicator(call.group.size, identifier, call.group.rank)
                    )
            except BaseException as error:
                joined.set_exception(error)

        # In a thread of its own, since it waits for all ranks without a limit.
        threading.Thread(target=join, name="nccl", daemon=True).start()
        self._wait(call, joined.done, "to join NCCL")
        if error := joined.exception():
            raise CollectiveError(
                f"{call.operation}: NCCL could not be joined: {type(error).__name__}: {error} "
                f"({self._group.transport.where})"
            ) from error
        self._comm: Any = joined.result()

    def allreduce(self, call: Call, source: DeviceBuffer, target: DeviceBuffer, op: Op) -> None:
        """Reduce the source over all ranks into the target, perhaps the same memory."""
        self._run(
            call,
            target,
            lambda stream: self._comm.allReduce(
                source.address, target.address, source.size, _DTYPES[source.dtype.name], _OPS[op],
                stream,
            ),
        )  # fmt: skip

    def broadcast(self, call: Call, source: DeviceBuffer, target: DeviceBuffer, root: int) -> None:
        """Let every rank's target be the root's source."""
        self._run(
            call,
            target,
            lambda stream: self._comm.broadcast(
                source.address, target.address, source.nbytes, _BYTES, root, stream
            ),
        )

    def close(self) -> None:
        """Leave, all ranks together; nothing is under way."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.destroy()

    def _run(self, call: Call, target: DeviceBuffer, start: Callable[[int], None]) -> None:
        """Put something on the device's stream, and wait until it is over there."""
        if not target.size:
            return
        device = target.device
        try:
            with device.context:
                start(device.stream.ptr)
                over = device.stream.record()

            def done() -> bool:
                if over.done:
                    return True
                self._comm.check_async_error()
                return False

            self._wait(call, done, "in NCCL")
        except BaseException as error:  # also of a signal handler: the kernel would wait for ever
            self._abort()
            if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
                raise CollectiveError(  # NCCL's own, and those of CUDA
                    f"{call.operation}: NCCL failed: {error} ({self._group.transport.where})"
                ) from error
            raise
        device.put()

    def _abort(self) -> None:
        comm, self._comm = self._comm, None
        comm.abort()

    def _wait(self, call: Call, done: Callable[[], bool], what: str) -> None:
        ranks = self._group.transport
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        ranks.wait([_OnDevice(done, f"other ranks {what}", others)], call.deadline)


class _OnDevice:
    """What comes to an end on a device, as a message that is waited for."""

    def __init__(self, done: Callable[[], bool], text: str, peers: Sequence[int]) -> None:
        self.done = done
        self.peers = peers
        self._text = text

    def describe(self) -> str:
        """Say whom this waits for."""
        return self._text


def _exchange_identifier(call: Call, device: Device, nccl: Any) -> tuple[Any, str]:
    """Exchange what ranks need to know; return the identifier, and what is wrong."""
    group = call.group
    page = np.zeros(1 + _ID_BYTES + group.size * _LINE_BYTES, np.uint8)
    lines = page[1 + _ID_BYTES :].reshape(group.size, _LINE_BYTES)
    state, text = _HAS, ""
    try:
        if nccl is None or not nccl.available:
            raise RuntimeError("CuPy finds no NCCL")
        text = str(device.context.pci_bus_id)
        if group.rank == 0:
            identifier = nccl.get_unique_id()
            page[0] = _AS_BYTES if isinstance(identifier, bytes) else _AS_NUMBERS
            given = identifier if isinstance(identifier, bytes) else np.array(identifier, np.int8)
            page[1 : 1 + _ID_BYTES] = np.frombuffer(given, np.uint8)
    except Exception as error:
        state, text = _LACKS, str(error)
    line = text.encode()[: _LINE_BYTES - 1]
    lines[group.rank, 0] = state
    lines[group.rank, 1 : 1 + len(line)] = np.frombuffer(line, np.uint8)
    recursive_doubling.allreduce(group.transport, page, MAX, call.deadline)
    texts = [each[1:].tobytes().rstrip(b"\0").decode(errors="replace") for each in lines]
    raw = page[1 : 1 + _ID_BYTES]
    known = raw.tobytes() if page[0] == _AS_BYTES else tuple(raw.view(np.int8).tolist())
    return known, _problem(group.leaders, lines[:, 0].tolist(), texts)


def _problem(nodes: Sequence[int], states: Sequence[int], texts: Sequence[str]) -> str:
    """Say which rank cannot join, and why; "" if all can."""
    for rank, (state, text) in enumerate(zip(states, texts, strict=True)):
        if state == _LACKS:
            return f"needs NCCL on all ranks, got on rank {rank}: {text}"
    sharing: dict[tuple[int, str], list[str]] = defaultdict(list)
    for rank, place in enumerate(zip(nodes, texts, strict=True)):
        sharing[place].append(str(rank))
    for (_, gpu), ranks in sharing.items():
        if len(ranks) > 1:
            return f"needs a GPU for each rank, got one for ranks {some(ranks)} (GPU {gpu})"
    return ""
