"""Plans that use messages: eager, compressed, or by an algorithm.

The call is compared first, the array copied to where the algorithm works, and the algorithm chosen
by name and size; a small array travels with the comparison. Arrays are flat and contiguous here,
and the call has been described.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from collectives.algorithms import compressed, selection
from collectives.arrays import host_arrays, reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MEAN, Op
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
    """How arrays are reduced.

    Attributes:
        op: how to combine.
        algorithm: which is asked for.
        codec: packs what travels; None if it travels as it is.
    """

    op: Op
    algorithm: str = "auto"
    codec: Codec | None = None


def allreduce(call: Call, send: Array, out: Array, how: ReduceSpec) -> None:
    """Reduce `send` over all ranks into `out`, which may be `send`."""
    if how.codec is not None:
        call.agree()
    elif (buffer := _reduce_eager(call, send, how)) is not None:
        host_arrays.copy_to(buffer, out)
        return
    allreduce_compared(call, send, out, how)


def allreduce_compared(call: Call, send: Array, out: Array, how: ReduceSpec) -> None:
    """As `allreduce`, of what the ranks have agreed on, or of a slice of it."""
    group, levels = call.group, None
    op, algorithm, codec = how
    divisor = group.size if op is MEAN else 1
    if codec is not None and group.layout.is_hierarchical and algorithm in ("auto", "hierarchical"):
        algorithm, levels = "hierarchical", compressed.between_nodes(group.levels, codec)
    elif codec is not None:
        compressed.allreduce(
            group.transport, out, op, call.deadline,
            codec=codec, contribution=send, divisor=divisor,
        )  # fmt: skip
        return
    narrow = algorithm == "auto" and reduction.work_dtype(send.dtype) != send.dtype
    if narrow and selection.pick("allreduce", send.nbytes, group.layout) == "ring":
        # 16 bits travel as they are, half of what a ring of float32 would send, and add up wider.
        buffer = host_arrays.flat_copy(send, out, send.dtype)
        compressed.allreduce_packed(group.transport, buffer, op, call.deadline, divisor=divisor)
    else:
        buffer = _contribution(call, send, out, op)
        run = call.algorithm("allreduce", algorithm, send.nbytes, levels)
        run(buffer, op, call.deadline)
    host_arrays.copy_to(buffer, out)


def reduce(call: Call, send: Array, out: Array | None, how: ReduceSpec, root: int) -> None:
    """Reduce `send` over all ranks into the root's `out`, which is not used elsewhere."""
    out = out if call.group.rank == root else None
    if (buffer := _reduce_eager(call, send, how)) is None:
        buffer = _contribution(call, send, out, how.op)
        run = call.algorithm("reduce", how.algorithm, send.nbytes)
        run(buffer, how.op, root, call.deadline)
    if out is not None:
        host_arrays.copy_to(buffer, out)


def reduce_scatter(
    call: Call, send: Array, out: Array, how: ReduceSpec, bounds: Sequence[int]
) -> None:
    """Reduce `send` over all ranks, of which this one takes chunk `rank` into `out`."""
    if (buffer := _reduce_eager(call, send, how)) is None:
        buffer = _contribution(call, send, None, how.op)
        run = call.algorithm("reduce_scatter", how.algorithm, send.nbytes)
        run(buffer, bounds, how.op, call.deadline)
    host_arrays.copy_to(buffer[bounds[call.group.rank] : bounds[call.group.rank + 1]], out)


def broadcast(
    call: Call, send: Array | None, out: Array | None, *, root: int, algorithm: str
) -> None:
    """Replace `out` by the root's `send`; each is used on one side only."""
    own = call.group.rank == root
    buffer = send if own else out
    assert buffer is not None
    if call.fits_eager(algorithm, buffer.nbytes):
        bits = buffer.view(np.uint8)
        joined = call.reduce_eager(bits if own else np.zeros(bits.size, np.uint8))
        if not own:
            bits[:] = joined
        return
    call.agree()
    call.algorithm("broadcast", algorithm, buffer.nbytes)(buffer, root, call.deadline)


def barrier(call: Call, send: None = None, out: None = None, *, algorithm: str) -> None:
    """Wait for all ranks."""
    if call.fits_eager(algorithm, 0):
        call.reduce_eager(*signature_check.NOTHING)
        return
    call.agree()
    call.algorithm("barrier", algorithm, 0)(call.deadline)


def _reduce_eager(call: Call, send: Array, how: ReduceSpec) -> Array | None:
    """Compare the call, and reduce `send` on the way, in the dtype of sums, if it is so small."""
    if call.fits_eager(how.algorithm, send.size * reduction.work_dtype(send.dtype).itemsize):
        return call.reduce_eager(_contribution(call, send, None, how.op), how.op)
    call.agree()
    return None


def _contribution(call: Call, send: Array, out: Array | None, op: Op) -> Array:
    """Copy a rank's array to where messages are made of it."""
    buffer = host_arrays.flat_copy(send, out, reduction.work_dtype(send.dtype))
    reduction.prescale(buffer, op, call.group.size)
    return buffer
