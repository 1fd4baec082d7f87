"""Signature check: ranks compare their calls before any data moves.

MPI adds float32 to int32, or mixes SUM with MAX, without an error, and hangs if one rank broadcasts
while another reduces. Here each rank describes its call as a few named fields. One minimum over
all ranks compares 8-byte hashes of the descriptions. If the hashes differ, the ranks collect the
descriptions, and every rank raises the same error.

The data of a small operation travels in the same eager messages as its comparison
(`algorithms.eager`). Compiled code exchanges them if the transport uses MPI, Python otherwise. All
messages have equal length, so ranks in different calls still detect the mismatch.

A rank with wrong arguments takes part with the refusal as its description. The other ranks then
raise an error that contains the refusal, instead of waiting for the missing rank.

Cost: log2 P messages for a power of two, up to two more otherwise. With more than 8 ranks on a
node: two synchronizations on the node, and the messages between one rank per node.
"""

from __future__ import annotations

import bisect
import functools
from functools import partial
from typing import NamedTuple

import numpy as np

from collectives.algorithms import eager, hierarchical, recursive_doubling, selection
from collectives.algorithms.cost_model import RankLayout
from collectives.algorithms.eager import HEAD_BYTES, EagerExchange
from collectives.arrays import device, reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MAX, Op
from collectives.calls.group import Group
from collectives.calls.signature import Description, raise_mismatch
from collectives.transport.transport import Deadline, Transport

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "MESSAGE_BYTES",
    "MAX_SPEAKERS",
    "NOTHING",
    "Piggyback",
    "verify",
    "per_node",
    "eager_exchange_of",
    "max_piggyback_bytes",
    "seconds",
]

# Bytes of a message: the head and the data of a small operation. An exchange of 16 bytes / 3 KiB /
# 4,032 bytes / 16 KiB from Python, in us: 2 ranks of a node by messages 7.6 / 8.2 / 11.1 / 12.4,
# where MPI switches to its rendezvous protocol; 2 machines at 1 Gbit/s 53 / 45 / 48 / 54.
MESSAGE_BYTES = 3072
MAX_PAYLOAD_BYTES = MESSAGE_BYTES - HEAD_BYTES

# Most data of an all-reduce in the messages of its comparison, in compiled code: for one sending
# rank per node, and for all ranks of a node together, which share the node's link in every round.
# 4 machines of 2 ranks, 8 processes on 2 cores, 1 Gbit/s, in ms, this way / MPI with our settings:
# 512 bytes 1.03 / 1.39, 4 KiB 1.25 / 1.42, 64 KiB 1.85 / 2.08; comparison, then `hierarchical`:
# 3.3, 3.5, 3.7. On slow links whole arrays in every round cost more than messages: at 100 Mbit/s
# 64 KiB took 1.4 to 1.9 times as long as a comparison and the fastest algorithm. So
# `max_piggyback_bytes` asks the cost model, in steps of 1 KiB.
_MOST_CARRIED_BYTES, _MOST_OF_NODE = 1 << 16, 1 << 17
_CARRIED_STEP = 1 << 10

# Most ranks per node that all exchange messages with other nodes. Beyond, one rank per node sends,
# because a node's link transfers the messages of its ranks one after the other. 4 machines of 2
# ranks, 512 bytes: all ranks 1.04 ms, one rank of each machine 3.4 ms.
MAX_SPEAKERS = 8


class Piggyback(NamedTuple):
    """Data of a rank that travels with the comparison.

    Attributes:
        data: shape (n,), contiguous, at most `MAX_PAYLOAD_BYTES`, prepared for the op; n and dtype
            follow from the call.
        op: reduction over the ranks. MAX selects the data of one rank if all other ranks send zero
            bytes.
    """

    data: Array
    op: Op


NOTHING = Piggyback(np.empty(0, np.uint8), MAX)


def verify(
    group: Group,
    own: int,
    call: Description,
    deadline: Deadline,
    contribution: Piggyback = NOTHING,
) -> Array:
    """Compare the calls of all ranks, and return the reduced contributions.

    Args:
        own: digest of this rank's description.
        call: the description, for the error.
        contribution: data of an operation that travels with the comparison.

    Returns:
        The contributions of all ranks, reduced in an order that depends only on the group; the same
        bits on all ranks.

    Raises:
        MismatchError: the calls differ; the same error on all ranks, without pending messages.
    """
    data, op = contribution
    if group.size == 1:
        return data
    # Two words, because one minimum of both finds any difference: min(~h) is ~max(h).
    hashes = own, ~own
    exchange = eager_exchange_of(group)
    if per_node(group.layout):
        joined = _by_nodes(group, exchange, hashes, contribution, deadline)
    elif exchange is not None:
        joined = exchange.reduce(hashes, data, op, deadline)
    else:
        message = _write_message(hashes, data)
        recursive_doubling.allgather_combine(
            group.transport, message, partial(_combine, contribution), deadline
        )
        joined = _read_message(message, data)
    if joined is None:
        raise_mismatch(group.transport, call, deadline)
    return joined


def eager_exchange_of(group: Group) -> EagerExchange | None:
    """Return the exchange of eager messages in compiled code; None if Python exchanges them."""
    return group.state_of(_make_eager_exchange)


def _make_eager_exchange(group: Group) -> EagerExchange | None:
    if group.size == 1:  # a single rank needs no compiled code
        return None
    # None on ranks of a node that send nothing to other nodes.
    ranks = group.levels.network if per_node(group.layout) else group.transport
    return (
        None
        if ranks is None or ranks.native_mpi is None
        else EagerExchange(ranks, max_piggyback_bytes(group.layout))
    )


def per_node(layout: RankLayout) -> bool:
    """Whether one rank of each node compares for all ranks of the node."""
    return layout.is_hierarchical and layout.per_node > MAX_SPEAKERS


@functools.lru_cache(256)  # groups with equal layouts share the result
def max_piggyback_bytes(layout: RankLayout) -> int:
    """Return the most bytes of an all-reduce that travel with its comparison in compiled code.

    The limit is the largest size that the cost model rates faster than a comparison followed by the
    best algorithm. It depends only on the layout, so it is equal on all ranks.
    """
    if per_node(layout):
        # `_by_nodes` has messages of one fixed length.
        return MAX_PAYLOAD_BYTES
    highest = max(MAX_PAYLOAD_BYTES, min(_MOST_CARRIED_BYTES, _MOST_OF_NODE // layout.per_node))
    # The alternative: a comparison, then messages from Python.
    compared = eager.seconds(0, layout) + layout.call

    def is_slower(nbytes: int) -> bool:
        pick = selection.pick("allreduce", nbytes, layout)
        seconds = selection.ALGORITHMS["allreduce"][pick].seconds
        assert seconds is not None  # "native" is never picked
        return eager.seconds(nbytes, layout) > compared + seconds(nbytes, layout)

    sizes = range(MAX_PAYLOAD_BYTES, highest + 1, _CARRIED_STEP)
    # Once slower, larger arrays stay slower, so bisection finds the limit.
    first = bisect.bisect_left(sizes, True, key=is_slower)
    return highest if first == len(sizes) else sizes[max(0, first - 1)]


def seconds(nbytes: int, layout: RankLayout) -> float:
    """Return the predicted seconds of a comparison that carries `nbytes`."""
    if per_node(layout):
        return hierarchical.allreduce_seconds(HEAD_BYTES + nbytes, layout.compiled())
    return eager.seconds(nbytes, layout)


def _by_nodes(
    group: Group,
    exchange: EagerExchange | None,
    hashes: tuple[int, int],
    contribution: Piggyback,
    deadline: Deadline,
) -> Array | None:
    """Compare and reduce inside the nodes, then between one rank per node."""
    data, op = contribution
    combine = partial(_combine, contribution)

    def between(network: Transport, message: Array) -> None:
        if exchange is None:
            recursive_doubling.allgather_combine(network, message, combine, deadline)
            return
        # The words of the whole node: a difference inside it is already visible.
        smallest, inverse = message[:HEAD_BYTES].view(np.int64).tolist()
        joined = exchange.reduce((smallest, inverse), _payload_of(message, data), op, deadline)
        if joined is None:
            message[:HEAD_BYTES] = 0  # a mismatch: 0 is not the inverse of 0
        else:
            _payload_of(message, data)[:] = joined

    message = _write_message(hashes, data)
    hierarchical.allreduce_custom(group.levels, message, combine, between, deadline)
    return _read_message(message, data)


def _write_message(hashes: tuple[int, int], data: Array) -> Array:
    # Of one length for all calls, so that ranks in different calls receive it.
    message = np.zeros(MESSAGE_BYTES, np.uint8)
    message[:HEAD_BYTES].view(np.int64)[:] = hashes
    _payload_of(message, data)[:] = data
    return message


def _read_message(message: Array, like: Array) -> Array | None:
    """Return the data of a message, None if the hashes show a mismatch."""
    smallest, inverse = message[:HEAD_BYTES].view(np.int64)
    if smallest != ~inverse:
        return None
    joined = _payload_of(message, like)
    # Two processors may return different NaNs, and all ranks must get the same bits.
    device.canonical_nans(joined)
    return joined


def _combine(contribution: Piggyback, ours: Array, theirs: Array) -> None:
    hashes, others = ours[:HEAD_BYTES].view(np.int64), theirs[:HEAD_BYTES].view(np.int64)
    # Only equal calls have payloads of one layout.
    if hashes.tobytes() == others.tobytes():
        data, op = contribution
        reduction.combine(op)(_payload_of(ours, data), _payload_of(theirs, data))
    # Always, so that a difference reaches all ranks.
    np.minimum(hashes, others, out=hashes)


def _payload_of(message: Array, like: Array) -> Array:
    """Return the data of a message as a view with the dtype and size of `like`."""
    return message[HEAD_BYTES : HEAD_BYTES + like.nbytes].view(like.dtype)
