"""Every operation in its two ways: in the node engine, or by messages.

All ranks of a group on one node meet in the engine; it compares their calls, takes arrays as they
are, divides for MEAN and keeps 16-bit types in 32-bit sums by itself. By messages the call is
compared first, the array copied to where the algorithm works, and the algorithm chosen by name; a
small array travels with the comparison. Arrays are flat and contiguous here, and arguments have
been checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.algorithms import compressed, hierarchical, rotation, selection
from collectives.arrays import host, reduction
from collectives.arrays.host import Array
from collectives.arrays.reduction import MEAN, Op
from collectives.compression import Codec
from collectives.operations import compare
from collectives.operations.call import Call
from collectives.transport.transport import Transport

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_agreed",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_agreed",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def allreduce(
    transport: Transport, call: Call, send: Array, out: Array, op: Op, algorithm: str,
    codec: Codec | None = None,
) -> None:  # fmt: skip
    """Reduce `send` over all ranks into `out`, which may be `send`.

    A codec says how the array travels by messages; shared memory moves it as it is. Between nodes
    of several ranks, one level with a codec stands between two without.
    """
    if codec is not None:
        codec.claim(send.size, send.dtype)
    engine = selection.engine_for(call.engine, algorithm)
    if engine is None:
        if codec is None and _carries_reduction(call, algorithm, send):
            total = _carry_reduction(transport, call, send, op)
            host.store(total, out.shape, out.dtype, out)
            return
        call.agree()
    elif place := engine.shared.place_of(send, out):
        call.add(memory=f"shared array {place.number} + {place.offset} bytes")
    allreduce_agreed(transport, call, send, out, op, algorithm, codec)


def allreduce_agreed(
    transport: Transport, call: Call, send: Array, out: Array, op: Op, algorithm: str,
    codec: Codec | None = None,
) -> None:  # fmt: skip
    """As `allreduce`, of a slice of what the ranks have agreed on, or will as they meet."""
    engine = selection.engine_for(call.engine, algorithm)
    if engine is not None:
        call.met(engine.allreduce(send, out, op, call.digest, call.deadline))
        return
    run = call.by_messages("allreduce", algorithm, send.nbytes)
    if codec is not None:
        _allreduce_compressed(transport, call, send, out, op, algorithm, codec)
        return
    on_ring = algorithm == "auto" and call.picks("allreduce", algorithm, send.nbytes) == "ring"
    if on_ring and _is_half(send):  # which sends half of what a ring of float32 would
        buffer = host.flat_copy(send, out, send.dtype)
        divisor = transport.size if op is MEAN else 1
        compressed.allreduce_16(transport, buffer, op, call.deadline, divisor=divisor)
    else:
        buffer = _contribution(send, out, op, transport.size)
        run(buffer, op, call.deadline)
    host.store(buffer, out.shape, out.dtype, out)


def _allreduce_compressed(
    transport: Transport, call: Call, send: Array, out: Array, op: Op, algorithm: str, codec: Codec
) -> None:
    """As `allreduce` by messages of 16 bits: all of them, or those between nodes."""
    if call.levels is None or algorithm not in ("auto", "hierarchical"):
        divisor = transport.size if op is MEAN else 1
        compressed.allreduce(
            transport, out, op, call.deadline, codec=codec, contribution=send, divisor=divisor
        )
        return
    buffer = _contribution(send, out, op, transport.size)
    levels = compressed.between_nodes(call.levels, codec)
    hierarchical.allreduce(levels, buffer, op, call.deadline)
    host.store(buffer, out.shape, out.dtype, out)


def reduce(
    transport: Transport, call: Call, send: Array, out: Array | None, op: Op, root: int,
    algorithm: str,
) -> None:  # fmt: skip
    """Reduce `send` over all ranks into the root's `out`; None elsewhere."""
    engine = selection.engine_for(call.engine, algorithm)
    if engine is not None:
        call.met(engine.reduce(send, out, op, root, call.digest, call.deadline))
        return
    run = call.by_messages("reduce", algorithm, send.nbytes)
    if _carries_reduction(call, algorithm, send):
        buffer = _carry_reduction(transport, call, send, op)
    else:
        call.agree()
        buffer = _contribution(send, out, op, transport.size)
        run(buffer, op, root, call.deadline)
    if out is not None:
        host.store(buffer, out.shape, out.dtype, out)


def reduce_scatter(
    transport: Transport, call: Call, send: Array, out: Array, bounds: Sequence[int], op: Op,
    algorithm: str,
) -> None:  # fmt: skip
    """Reduce `send` over all ranks, of which this one takes chunk `rank` into `out`."""
    engine = selection.engine_for(call.engine, algorithm)
    if engine is not None:
        call.met(engine.reduce_scatter(send, out, bounds, op, call.digest, call.deadline))
        return
    run = call.by_messages("reduce_scatter", algorithm, send.nbytes)
    if _carries_reduction(call, algorithm, send):
        buffer = _carry_reduction(transport, call, send, op)
    else:
        call.agree()
        buffer = _contribution(send, None, op, transport.size)
        run(buffer, bounds, op, call.deadline)
    own = buffer[bounds[transport.rank] : bounds[transport.rank + 1]]
    host.store(own, out.shape, out.dtype, out)


def broadcast(transport: Transport, call: Call, buffer: Array, root: int, algorithm: str) -> None:
    """Replace `buffer` by the root's, which is only read."""
    if selection.engine_for(call.engine, algorithm) is None:
        if call.carries(algorithm, buffer.nbytes):
            bits = buffer.view(np.uint8)
            if transport.rank == root:
                call.carry(bits, compare.union)
            else:
                bits[:] = call.carry(np.zeros(bits.size, np.uint8), compare.union)
            return
        call.agree()
    broadcast_agreed(transport, call, buffer, root, algorithm)


def broadcast_agreed(
    transport: Transport, call: Call, buffer: Array, root: int, algorithm: str
) -> None:
    """As `broadcast`, of a slice of what the ranks have agreed on, or will as they meet."""
    engine = selection.engine_for(call.engine, algorithm)
    if engine is not None:
        own = transport.rank == root
        wanted = [] if own else [(root, 0, buffer)]
        stream = buffer if own else None
        call.met(engine.publish(stream, wanted, call.digest, call.deadline, buffer.nbytes))
        return
    call.by_messages("broadcast", algorithm, buffer.nbytes)(buffer, root, call.deadline)


def gather(
    transport: Transport, call: Call, own: Array, counts: Sequence[int], root: int, algorithm: str
) -> Array | None:
    """Join the ranks' arrays on the root; the counts have been agreed on."""
    engine = selection.engine_for(call.engine, algorithm)
    if engine is None:
        run = call.by_messages("gather", algorithm, sum(counts) * own.itemsize)
        result: Array | None = run(own, counts, root, call.deadline)
        return result
    joined = np.empty(sum(counts), own.dtype) if transport.rank == root else None
    wanted = [] if joined is None else _joined(joined, counts)
    longest = max(counts) * own.itemsize
    call.met(engine.publish(own, wanted, call.digest, call.deadline, longest))
    return joined


def allgather(
    transport: Transport, call: Call, own: Array, counts: Sequence[int], algorithm: str
) -> Array:
    """Join the ranks' arrays on all ranks; the counts have been agreed on."""
    joined = np.empty(sum(counts), own.dtype)
    engine = selection.engine_for(call.engine, algorithm)
    if engine is not None:
        longest = max(counts) * own.itemsize
        wanted = _joined(joined, counts)
        call.met(engine.publish(own, wanted, call.digest, call.deadline, longest))
        return joined
    run = call.by_messages("allgather", algorithm, joined.nbytes)
    bounds = [0, *np.cumsum(counts).tolist()]
    joined[bounds[transport.rank] : bounds[transport.rank + 1]] = own
    run(joined, bounds, call.deadline)
    return joined


def scatter(
    transport: Transport, call: Call, send: Array | None, counts: Sequence[int], root: int,
    out: Array, algorithm: str,
) -> None:  # fmt: skip
    """Give every rank its part of the root's array; the counts are known to all."""
    nbytes = sum(counts) * out.itemsize
    first = sum(counts[: transport.rank]) * out.itemsize
    engine = selection.engine_for(call.engine, algorithm)
    if engine is None:
        run = call.by_messages("scatter", algorithm, nbytes)
        if call.carries(algorithm, nbytes):
            data = np.zeros(nbytes, np.uint8) if send is None else send.view(np.uint8)
            joined = call.carry(data, compare.union)
            out.view(np.uint8)[:] = joined[first : first + out.nbytes]
            return
        call.agree()
        out[...] = run(send, counts, root, out.dtype, call.deadline)
        return
    call.met(engine.publish(send, [(root, first, out)], call.digest, call.deadline, nbytes))


def alltoall(
    transport: Transport, call: Call, send: Array, rows: Sequence[int], width: int, algorithm: str
) -> tuple[Array, int]:
    """Give every rank its rows of this rank's array.

    Args:
        transport: the ranks.
        call: under way, and described.
        send: flat.
        rows: for every rank; a row may have no elements.
        width: elements of a row, equal on all ranks.
        algorithm: its name.

    Returns:
        This rank's rows of all arrays, flat, and how many they are.
    """
    engine = selection.engine_for(call.engine, algorithm)
    starts = [0, *np.cumsum(rows).tolist()]
    # What every rank has for every other: the first row, how many, and how many in all.
    own = np.array([[starts[r], rows[r], starts[-1]] for r in range(transport.size)], np.int64)
    facts = np.empty((transport.size, 3), np.int64)
    if engine is None:
        call.agree()
        threes = [3] * transport.size
        flat = rotation.alltoall(transport, own.reshape(-1), threes, threes, call.deadline)
        received = flat.reshape(-1, 3)[:, 1]
        counts = [n * width for n in rows]
        result: Array = call.by_messages("alltoall", algorithm, send.nbytes)(
            send, counts, (width * received).tolist(), call.deadline
        )
        return result, int(received.sum())
    mine = 3 * own.itemsize * transport.rank
    table = [(rank, mine, facts[rank]) for rank in range(transport.size)]
    call.met(engine.publish(own.reshape(-1), table, call.digest, call.deadline, own.nbytes))
    bounds = [0, *np.cumsum(facts[:, 1]).tolist()]
    joined = np.empty(bounds[-1] * width, send.dtype)
    wanted = [
        (
            rank,
            int(facts[rank, 0]) * width * send.itemsize,
            joined[bounds[rank] * width : bounds[rank + 1] * width],
        )
        for rank in range(transport.size)
    ]
    longest = int(facts[:, 2].max()) * width * send.itemsize
    call.met(engine.publish(send, wanted, call.digest, call.deadline, longest))
    return joined, bounds[-1]


def barrier(transport: Transport, call: Call, algorithm: str) -> None:
    """Wait for all ranks."""
    engine = selection.engine_for(call.engine, algorithm)
    if engine is None and call.carries(algorithm, 0):
        call.carry(*compare.NOTHING)
        return
    call.agree()
    if engine is None:  # in the engine, to agree is to wait
        call.by_messages("barrier", algorithm, 0)(call.deadline)


def _is_half(array: Array) -> bool:
    """Tell whether the array holds 16-bit floats, which travel as they are and are added wider."""
    return reduction.work_dtype(array.dtype) != array.dtype


def _carries_reduction(call: Call, algorithm: str, send: Array) -> bool:
    """Tell whether a reduction travels with the comparison of the call."""
    return call.carries(algorithm, send.size * reduction.work_dtype(send.dtype).itemsize)


def _carry_reduction(transport: Transport, call: Call, send: Array, op: Op) -> Array:
    """Reduce `send` over all ranks on the way of the comparison, in the dtype of sums."""
    own = _contribution(send, None, op, transport.size)
    return call.carry(own, reduction.combine(op))


def _contribution(send: Array, out: Array | None, op: Op, size: int) -> Array:
    """Copy a rank's array to where messages are made of it."""
    buffer = host.flat_copy(send, out, reduction.work_dtype(send.dtype))
    reduction.prepare(buffer, op, size)
    return buffer


def _joined(joined: Array, counts: Sequence[int]) -> list[tuple[int, int, Array]]:
    """Say which rank's bytes go where in the joined array."""
    bounds = [0, *np.cumsum(counts).tolist()]
    return [(rank, 0, joined[bounds[rank] : bounds[rank + 1]]) for rank in range(len(counts))]
