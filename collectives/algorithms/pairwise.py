"""Pairwise all-to-all: in step s every rank sends to the rank s places to its right.

For 3 ranks (`ab` is the part of rank a for rank b):

    step    rank 0            rank 1            rank 2
     0      keeps 00          keeps 11          keeps 22
     1      01 -> / <- 20     12 -> / <- 01     20 -> / <- 12
     2      02 -> / <- 10     10 -> / <- 21     21 -> / <- 02

In every step each rank sends to one rank and receives from one, so no rank is a bottleneck. Up to
`IN_FLIGHT` steps overlap, and long parts are sent in slices.

Cost per rank:

    operation  messages sent  bytes sent   scratch
    alltoall   P - 1          (P - 1)/P S  none

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), section 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from collectives.algorithms import ring
from collectives.algorithms.cost_model import RankLayout
from collectives.arrays.host_arrays import Array
from collectives.core import topology
from collectives.transport.transport import Deadline, PendingMessage, Transport

__all__ = ["alltoall", "alltoall_seconds"]

# Steps in flight. With one, a rank is idle while its peers of this step are late (4 nodes at 1
# Gbit/s, 16 MiB per rank: 150 ms, with two 124 ms, with four 121 ms; line time 101 ms). With all,
# P - 1 messages arrive at one rank at once.
IN_FLIGHT = 4


def alltoall(
    transport: Transport,
    send: Array,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    deadline: Deadline,
) -> Array:
    """Send every rank its part of this rank's array, and receive this rank's part of every array.

    Args:
        transport: the ranks.
        send: shape (sum(send_counts),), contiguous; the elements for rank 0, 1, ... in turn.
        send_counts: elements for each rank.
        receive_counts: elements from each rank; entry b on rank a equals `send_counts[a]` on rank
            b.
        deadline: limit of every wait.

    Returns:
        a new array, shape (sum(receive_counts),): the elements from rank 0, 1, ... in turn.
    """
    result = np.empty(sum(receive_counts), send.dtype)
    outgoing = _parts(send, send_counts)
    incoming = _parts(result, receive_counts)
    under_way: list[list[PendingMessage]] = []
    for step in range(1, transport.size):
        left, right = topology.ring_neighbours(transport.rank, transport.size, step)
        # Receives first, so that the peer's data lands without a copy.
        receives = [transport.start_receive(s, left) for s in ring.slices(incoming[left])]
        sends = [transport.start_send(s, right) for s in ring.slices(outgoing[right])]
        under_way.append(receives + sends)
        if len(under_way) == IN_FLIGHT:
            # The oldest step must be complete before a further one begins.
            transport.wait(under_way.pop(0), deadline)
    incoming[transport.rank][...] = outgoing[transport.rank]  # while the last steps are in flight
    transport.wait([message for step in under_way for message in step], deadline)
    return result


def alltoall_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `alltoall` with `nbytes` per rank.

    Each of P - 1 steps is a message of S/P bytes; most leave the node, over its one link.
    """
    node, network = layout.machine.node, layout.machine.network
    part = nbytes / layout.size
    away = layout.size - layout.per_node
    between = away * (network.alpha + layout.per_node * part * network.beta)
    return between + (layout.per_node - 1) * (node.alpha + part * node.beta)


def _parts(array: Array, counts: Sequence[int]) -> list[Array]:
    ends = accumulate(counts)
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]
