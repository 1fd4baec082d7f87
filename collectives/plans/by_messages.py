"""Plans that use messages: eager, compressed, or by an algorithm.

Each function compares the call, copies the array into the algorithm's buffer, and picks the
algorithm by name and size. A small array travels with the comparison. Arrays are flat and
contiguous here, and the call has a description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from collectives.algorithms import compressed, selection
from collectives.arrays import host_arrays, reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MEAN, RULES, Op
from collectives.calls import signature_check
from collectives.calls.call import Call
from collectives.kernels.compression import Codec

__all__ = [
    "ReduceSpec",
    "allreduce",
    "allreduce_compared",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
]


class ReduceSpec(NamedTuple):
    """Options of a reduction.

    Attributes:
        op: reduction operation.
        algorithm: the caller's argument.
        codec: compresses the messages; None sends them uncompressed.
    """

    op: Op
    algorithm: str = "auto"
    codec: Codec | None = None


def allreduce(call: Call, send: Array, out: Array, how: ReduceSpec) -> None:
    """Reduce `send` over all ranks into `out`, which may be `send`."""
    if how.codec is not None:
        # Packing changes the residuals of a codec, so the ranks first compare the calls.
        call.agree()
    elif (buffer := _reduce_eager(call, send, how)) is not None:
        host_arrays.copy_to(buffer, out)
        return
    allreduce_compared(call, send, out, how)


def allreduce_compared(call: Call, send: Array, out: Array, how: ReduceSpec) -> None:
    """Reduce as `allreduce` does, after the comparison; the arrays may be slices."""
    group, levels = call.group, None
    op, algorithm, codec = how
    divisor = group.size if op is MEAN else 1
    if codec is not None and group.layout.is_hierarchical and algorithm in ("auto", "hierarchical"):
        # Inside the nodes elements stay uncompressed.
        algorithm, levels = "hierarchical", compressed.between_nodes(group.levels, codec)
    elif codec is not None:
        compressed.allreduce(
            group.transport, out, op, call.deadline,
            codec=codec, contribution=send, divisor=divisor,
        )  # fmt: skip
        return
    own = RULES[op].own
    # The packed ring has the loops of predefined ops only.
    narrow = own is None and algorithm == "auto" and reduction.work_dtype(send.dtype) != send.dtype
    if narrow and selection.pick("allreduce", send.nbytes, group.layout) == "ring":
        # Send 16-bit elements, half the bytes of a float32 ring, and add them in float32.
        buffer = host_arrays.flat_copy(send, out, send.dtype)
        compressed.allreduce_packed(group.transport, buffer, op, call.deadline, divisor=divisor)
    else:
        buffer = _contribution(call, send, out, op)
        if not _in_rank_order(call, buffer, op):
            run = call.algorithm("allreduce", algorithm, send.nbytes, levels)
            run(buffer, op, call.deadline)
    host_arrays.copy_to(buffer, out)


def reduce(call: Call, send: Array, out: Array | None, how: ReduceSpec, root: int) -> None:
    """Reduce `send` over all ranks into the root's `out`; other ranks ignore `out`."""
    # On other ranks `out` may be a placeholder of the caller, which must stay unchanged.
    out = out if call.group.rank == root else None
    if (buffer := _reduce_eager(call, send, how)) is None:
        buffer = _contribution(call, send, out, how.op)
        if not _in_rank_order(call, buffer, how.op):
            run = call.algorithm("reduce", how.algorithm, send.nbytes)
            run(buffer, how.op, root, call.deadline)
    if out is not None:
        host_arrays.copy_to(buffer, out)


def reduce_scatter(
    call: Call, send: Array, out: Array, how: ReduceSpec, bounds: Sequence[int]
) -> None:
    """Reduce `send` over all ranks, and copy chunk `rank` into `out`."""
    if (buffer := _reduce_eager(call, send, how)) is None:
        # Without `out`: this buffer holds all chunks, and `out` only the chunk of this rank.
        buffer = _contribution(call, send, None, how.op)
        if not _in_rank_order(call, buffer, how.op):
            run = call.algorithm("reduce_scatter", how.algorithm, send.nbytes)
            run(buffer, bounds, how.op, call.deadline)
    host_arrays.copy_to(buffer[bounds[call.group.rank] : bounds[call.group.rank + 1]], out)


def broadcast(
    call: Call, send: Array | None, out: Array | None, *, root: int, algorithm: str
) -> None:
    """Copy the root's `send` to `out`."""
    own = call.group.rank == root
    buffer = send if own else out
    assert buffer is not None
    if call.fits_eager(algorithm, buffer.nbytes):
        bits = buffer.view(np.uint8)
        # The maximum of the root's bytes and of zeros is the root's bytes.
        joined = call.reduce_eager(bits if own else np.zeros(bits.size, np.uint8))
        if not own:
            bits[:] = joined
    else:
        call.agree()
        call.algorithm("broadcast", algorithm, buffer.nbytes)(buffer, root, call.deadline)
    if own and out is not None:
        host_arrays.copy_to(buffer, out)


def barrier(call: Call, send: None = None, out: None = None, *, algorithm: str) -> None:
    """Wait until all ranks have called."""
    # The exchange that compares the calls returns only after every rank has entered it.
    if call.fits_eager(algorithm, 0):
        call.reduce_eager(*signature_check.NOTHING)
        return
    call.agree()
    call.algorithm("barrier", algorithm, 0)(call.deadline)


def _reduce_eager(call: Call, send: Array, how: ReduceSpec) -> Array | None:
    """Compare the call; return the reduction of a small `send` in the dtype of sums, else None."""
    # The size in the dtype of sums, because the messages carry widened elements.
    if call.fits_eager(how.algorithm, send.size * reduction.work_dtype(send.dtype).itemsize):
        return call.reduce_eager(_contribution(call, send, None, how.op), how.op)
    call.agree()
    return None


def _in_rank_order(call: Call, buffer: Array, op: Op) -> bool:
    """Reduce over all ranks by a tree from rank 0, if the order of operands matters; whether so."""
    own = RULES[op].own
    if own is None or own.commutative:
        return False
    # Other algorithms, and trees of another root, combine from the middle of the ranks on.
    call.algorithm("allreduce", "tree", buffer.nbytes)(buffer, op, call.deadline)
    return True


def _contribution(call: Call, send: Array, out: Array | None, op: Op) -> Array:
    """Return a rank's prescaled contribution in the dtype of sums, in `out` if possible."""
    buffer = host_arrays.flat_copy(send, out, reduction.work_dtype(send.dtype))
    reduction.prescale(buffer, op, call.group.size)
    return buffer
