"""Signature check: ranks compare their calls before any data moves.

MPI sums float32 against int32, or SUM against MAX, without an error and wrongly, and waits for
ever where one rank broadcasts and another reduces. Here each rank describes its call as a few named
fields; 8-byte hashes of the descriptions are compared by one minimum over all ranks, and only when
they differ the descriptions themselves are collected, so that every rank raises the same error.

A small operation travels with its comparison, in the same eager messages (`algorithms.eager`),
which compiled code exchanges where messages are MPI's. Elsewhere Python does, and all messages are
equally long, so that ranks that mean different calls find out.

A rank whose own arguments are refused takes part with the refusal as its description. The others
then raise an error that says so, where they would otherwise wait for a rank that never comes.

Cost: log2 P messages for a power of two, up to two more otherwise; with more than 8 ranks on a node
two meetings there, and the messages between one rank of every node.
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

# How much of a small operation travels with its comparison. An exchange of 16 bytes / 3 KiB / 4,032
# bytes / 16 KiB from Python, in us: 2 ranks of a node by messages 7.6 / 8.2 / 11.1 / 12.4, where
# MPI begins to ask the receiver before it sends; 2 machines at 1 Gbit/s 53 / 45 / 48 / 54.
MESSAGE_BYTES = 3072
MAX_PAYLOAD_BYTES = MESSAGE_BYTES - HEAD_BYTES

# How much of an all-reduce travels with its comparison in compiled code at most, where one rank of
# a node sends; more of them share the node's line, in every round. 4 machines of 2 ranks, 8
# processes on 2 cores, 1 Gbit/s, in ms, so / MPI with our settings: 512 bytes 1.03 / 1.39, 4 KiB
# 1.25 / 1.42, 64 KiB 1.85 / 2.08; after a comparison, by `hierarchical`: 3.3, 3.5, 3.7. On slow
# lines whole arrays in every round cost more than messages: at 100 Mbit/s 64 KiB took 1.4 to 1.9
# times as long as the fastest algorithm after a comparison. So `max_piggyback_bytes` asks the cost
# model, in steps of 1 KiB.
_MOST_CARRIED_BYTES, _MOST_OF_NODE = 1 << 16, 1 << 17
_CARRIED_STEP = 1 << 10

# Ranks of a node up to which each exchanges messages with those of other nodes; beyond, one of them
# speaks for all, since a node's line takes the messages of its ranks one after the other. 4
# machines of 2 ranks, 512 bytes: all of them 1.04 ms, one of each machine 3.4 ms.
MAX_SPEAKERS = 8


class Piggyback(NamedTuple):
    """What a rank adds to an operation that travels with the comparison.

    Attributes:
        data: shape (n,), contiguous, at most `MAX_PAYLOAD_BYTES`, prepared for the op; n and dtype
            follow from the call.
        op: how it is combined with the other ranks'. MAX takes those of one rank where all others
            bring bytes of zeros.
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
    """Return when all ranks describe their call alike.

    Args:
        own: the digest of this rank's description.
        call: the description, for the error.
        contribution: to an operation that is carried out on the way.

    Returns:
        The contributions of all ranks, combined in an order that depends on the group alone; the
        same bits on all ranks.

    Raises:
        MismatchError: they do not; the same error on all ranks, and no message is left under way.
    """
    data, op = contribution
    if group.size == 1:
        return data
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
    """Return what exchanges eager messages in compiled code; None where Python does."""
    return group.state_of(_make_eager_exchange)


def _make_eager_exchange(group: Group) -> EagerExchange | None:
    if group.size == 1:  # nothing is compiled for a rank alone
        return None
    ranks = group.levels.network if per_node(group.layout) else group.transport
    return (
        None
        if ranks is None or ranks.native_mpi is None
        else EagerExchange(ranks, max_piggyback_bytes(group.layout))
    )


def per_node(layout: RankLayout) -> bool:
    """Whether one rank of each node compares for all of them."""
    return layout.is_hierarchical and layout.per_node > MAX_SPEAKERS


@functools.lru_cache(256)  # groups of the same layout share it
def max_piggyback_bytes(layout: RankLayout) -> int:
    """Return how many bytes of an all-reduce travel with its comparison in compiled code.

    As many as go faster so than after it, by the cost model; equal on all ranks, as the layout is.
    """
    if per_node(layout):
        return MAX_PAYLOAD_BYTES
    highest = max(MAX_PAYLOAD_BYTES, min(_MOST_CARRIED_BYTES, _MOST_OF_NODE // layout.per_node))
    compared = eager.seconds(0, layout) + layout.call

    def is_slower(nbytes: int) -> bool:
        pick = selection.pick("allreduce", nbytes, layout)
        seconds = selection.ALGORITHMS["allreduce"][pick].seconds
        assert seconds is not None  # "native" is never picked
        return eager.seconds(nbytes, layout) > compared + seconds(nbytes, layout)

    sizes = range(MAX_PAYLOAD_BYTES, highest + 1, _CARRIED_STEP)
    first = bisect.bisect_left(sizes, True, key=is_slower)
    return highest if first == len(sizes) else sizes[max(0, first - 1)]


def seconds(nbytes: int, layout: RankLayout) -> float:
    """Return how long a comparison should take with which so many bytes travel."""
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
    """Compare and combine inside the nodes, then between one rank of each."""
    data, op = contribution
    combine = partial(_combine, contribution)

    def between(network: Transport, message: Array) -> None:
        if exchange is None:
            recursive_doubling.allgather_combine(network, message, combine, deadline)
            return
        smallest, inverse = message[:HEAD_BYTES].view(np.int64).tolist()
        joined = exchange.reduce((smallest, inverse), _payload_of(message, data), op, deadline)
        if joined is None:
            message[:HEAD_BYTES] = 0  # no hash and its inverse
        else:
            _payload_of(message, data)[:] = joined

    message = _write_message(hashes, data)
    hierarchical.allreduce_custom(group.levels, message, combine, between, deadline)
    return _read_message(message, data)


def _write_message(hashes: tuple[int, int], data: Array) -> Array:
    """Write a message."""
    message = np.zeros(MESSAGE_BYTES, np.uint8)
    message[:HEAD_BYTES].view(np.int64)[:] = hashes
    _payload_of(message, data)[:] = data
    return message


def _read_message(message: Array, like: Array) -> Array | None:
    """Return the contribution in a message, None if it says that ranks disagree."""
    smallest, inverse = message[:HEAD_BYTES].view(np.int64)
    if smallest != ~inverse:
        return None
    joined = _payload_of(message, like)
    device.canonical_nans(joined)
    return joined


def _combine(contribution: Piggyback, ours: Array, theirs: Array) -> None:
    """Take another rank's message into this one."""
    hashes, others = ours[:HEAD_BYTES].view(np.int64), theirs[:HEAD_BYTES].view(np.int64)
    if hashes.tobytes() == others.tobytes():
        data, op = contribution
        reduction.combine(op)(_payload_of(ours, data), _payload_of(theirs, data))
    np.minimum(hashes, others, out=hashes)


def _payload_of(message: Array, like: Array) -> Array:
    """Return the contribution in a message, of the dtype and size of another one."""
    return message[HEAD_BYTES : HEAD_BYTES + like.nbytes].view(like.dtype)
