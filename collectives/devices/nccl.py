"""All-reduce and broadcast among GPUs through CuPy's NCCL bindings.

::

    first call   all ranks   compare the call as usual; check that NCCL is available and that each
                             rank has its own GPU
                 rank 0      sends an identifier -> all ranks join with it
    every call   all ranks   compare; enqueue on the array's stream; poll until complete

NCCL's kernels wait for the kernels of the other ranks without a limit. So the ranks compare the
call before any kernel starts, and the host polls until the deadline of the call, as for a message.
After a timeout or an error the communicator is aborted, and the group becomes unusable.

NCCL determines the order of summation and whether all ranks get the same bits. It rounds 16-bit
floats after every addition.

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

# Values of `ncclRedOp_t` and `ncclDataType_t`; CuPy has no names for some of them.
_OPS = {SUM: 0, PRODUCT: 1, MAX: 2, MIN: 3, MEAN: 4}
_DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_BYTES = _DTYPES["uint8"]

# Page of the exchange: the kind of the identifier, the identifier, and one line for each rank.
_ID_BYTES, _LINE_BYTES = 128, 96
_AS_BYTES, _AS_NUMBERS = 1, 2  # CuPy takes it as bytes from 14 on, before as a tuple of int8
_HAS, _LACKS = 1, 2


def knows(op: Op, dtype: np.dtype[Any]) -> bool:
    """Return whether NCCL supports this reduction."""
    return op in _OPS and dtype.name in _DTYPES


def refuse(op: Op, dtype: np.dtype[Any], compressed: bool, operation: str) -> None:
    """Raise an error for a reduction that NCCL does not support.

    Raises:
        TypeError: the op or the dtype is not supported.
        ValueError: the call asks for compression.
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
    """NCCL communicator of a group, with one GPU per rank.

    Args:
        call: the first call, already compared; *collective*.
        device: device of this rank.

    Raises:
        ValueError: NCCL is missing on a rank, or ranks share a GPU; on all ranks.
        CollectiveError: this rank could not join.
        CollectiveTimeout: another rank did not join before the deadline.
    """

    def __init__(self, call: Call, device: Device) -> None:
        # The number of the GPU, because a later call may have an array of another one.
        self.device = device.context.id
        self._group = call.group
        nccl = cuda_adapter.nccl()
        identifier, problem = _exchange_identifier(call, device, nccl)
        if problem:
            # All ranks have the same page, so all raise, and the group stays usable.
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

        # In a separate thread, because joining waits for all ranks without a limit.
        # A daemon, because a thread that never joins must not keep the process alive.
        threading.Thread(target=join, name="nccl", daemon=True).start()
        # Also detects dead ranks, and ends at the deadline of the call.
        self._wait(call, joined.done, "to join NCCL")
        if error := joined.exception():
            raise CollectiveError(
                f"{call.operation}: NCCL could not be joined: {type(error).__name__}: {error} "
                f"({self._group.transport.where})"
            ) from error
        self._comm: Any = joined.result()

    def allreduce(self, call: Call, source: DeviceBuffer, target: DeviceBuffer, op: Op) -> None:
        """Reduce `source` over all ranks into `target`, which may be the same memory."""
        self._run(
            call,
            target,
            lambda stream: self._comm.allReduce(
                source.address, target.address, source.size, _DTYPES[source.dtype.name], _OPS[op],
                stream,
            ),
        )  # fmt: skip

    def broadcast(self, call: Call, source: DeviceBuffer, target: DeviceBuffer, root: int) -> None:
        """Copy the root's `source` to every rank's `target`."""
        self._run(
            call,
            target,
            lambda stream: self._comm.broadcast(
                source.address, target.address, source.nbytes, _BYTES, root, stream
            ),
        )

    def close(self) -> None:
        """Destroy the communicator, on all ranks together, with no operation in progress."""
        # Taken first, so that a second `close` does nothing.
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.destroy()

    def _run(self, call: Call, target: DeviceBuffer, start: Callable[[int], None]) -> None:
        """Enqueue an operation on the device's stream, and wait until it is complete."""
        if not target.size:
            return
        device = target.device
        try:
            # On the stream of the array, so that earlier work on it is complete.
            with device.context:
                start(device.stream.ptr)
                over = device.stream.record()

            def done() -> bool:
                if over.done:
                    return True
                # An error of another rank or of the network would leave the event open for ever.
                self._comm.check_async_error()
                return False

            self._wait(call, done, "in NCCL")
        except BaseException as error:  # also of a signal handler: the kernel would never end
            self._abort()
            if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
                raise CollectiveError(  # errors of NCCL and of CUDA
                    f"{call.operation}: NCCL failed: {error} ({self._group.transport.where})"
                ) from error
            raise
        # Later work must wait for the stream.
        device.put()

    def _abort(self) -> None:
        comm, self._comm = self._comm, None
        # `abort` ends the kernels, which wait without a limit.
        comm.abort()

    def _wait(self, call: Call, done: Callable[[], bool], what: str) -> None:
        ranks = self._group.transport
        # All of them, because NCCL does not report a missing rank.
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        ranks.wait([_OnDevice(done, f"other ranks {what}", others)], call.deadline)


class _OnDevice:
    """Wait condition of work on a device, in the form of a pending message."""

    def __init__(self, done: Callable[[], bool], text: str, peers: Sequence[int]) -> None:
        self.done = done
        self.peers = peers
        self._text = text

    def describe(self) -> str:
        return self._text


def _exchange_identifier(call: Call, device: Device, nccl: Any) -> tuple[Any, str]:
    """Exchange the identifier and GPUs of all ranks; return the identifier, and any problem."""
    group = call.group
    # Zeros where another rank writes: the maximum joins the parts of all ranks.
    page = np.zeros(1 + _ID_BYTES + group.size * _LINE_BYTES, np.uint8)
    lines = page[1 + _ID_BYTES :].reshape(group.size, _LINE_BYTES)
    state, text = _HAS, ""
    try:
        if nccl is None or not nccl.available:
            raise RuntimeError("CuPy finds no NCCL")
        # Identifies the GPU within its node, whatever CUDA_VISIBLE_DEVICES shows.
        text = str(device.context.pci_bus_id)
        if group.rank == 0:
            identifier = nccl.get_unique_id()
            page[0] = _AS_BYTES if isinstance(identifier, bytes) else _AS_NUMBERS
            given = identifier if isinstance(identifier, bytes) else np.array(identifier, np.int8)
            page[1 : 1 + _ID_BYTES] = np.frombuffer(given, np.uint8)
    except Exception as error:
        # Any error, because the other ranks wait for this page.
        state, text = _LACKS, str(error)
    # Cut to the line, whose first byte is the state.
    line = text.encode()[: _LINE_BYTES - 1]
    lines[group.rank, 0] = state
    lines[group.rank, 1 : 1 + len(line)] = np.frombuffer(line, np.uint8)
    recursive_doubling.allreduce(group.transport, page, MAX, call.deadline)
    texts = [each[1:].tobytes().rstrip(b"\0").decode(errors="replace") for each in lines]
    # After the exchange, all ranks have the identifier of rank 0.
    raw = page[1 : 1 + _ID_BYTES]
    known = raw.tobytes() if page[0] == _AS_BYTES else tuple(raw.view(np.int8).tolist())
    return known, _problem(group.leaders, lines[:, 0].tolist(), texts)


def _problem(nodes: Sequence[int], states: Sequence[int], texts: Sequence[str]) -> str:
    """Describe the first rank that cannot join; "" if all ranks can."""
    for rank, (state, text) in enumerate(zip(states, texts, strict=True)):
        if state == _LACKS:
            return f"needs NCCL on all ranks, got on rank {rank}: {text}"
    sharing: dict[tuple[int, str], list[str]] = defaultdict(list)
    # One GPU per rank: NCCL would hang or fail with two ranks on one.
    for rank, place in enumerate(zip(nodes, texts, strict=True)):
        sharing[place].append(str(rank))
    for (_, gpu), ranks in sharing.items():
        if len(ranks) > 1:
            return f"needs a GPU for each rank, got one for ranks {some(ranks)} (GPU {gpu})"
    return ""
