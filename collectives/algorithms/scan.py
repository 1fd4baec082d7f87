"""Prefix reductions in ceil(log2 P) rounds.

In each round a rank sends everything it has combined to a rank at a distance, which doubles: 1, 2,
4 and so on. For 5 ranks, the arrays 0 to 4 that each rank has combined:

    rank            0     1     2     3     4
    at first        0     1     2     3     4
    distance 1      0     01    12    23    34
    distance 2      0     01    012   0123  1234
    distance 4      0     01    012   0123  01234

In addition each rank combines the received data without its own array: the exclusive result.

Cost per rank:

    operation     messages sent       bytes sent            scratch
    scan, exscan  up to ceil(log2 P)  up to ceil(log2 P) S  3 S

Order: depends on P and the rank alone; reproducible.

Source: W. D. Hillis, G. L. Steele, "Data parallel algorithms", Comm. ACM 29 (1986).
"""

from __future__ import annotations

import numpy as np

from collectives.arrays import reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import Op
from collectives.core import topology
from collectives.transport.transport import Deadline, Transport

__all__ = ["exclusive"]


def exclusive(ranks: Transport, own: Array, op: Op, deadline: Deadline) -> Array | None:
    """Return the reduction over the ranks before this one, shape (n,); None on rank 0."""
    # Arriving data is of lower ranks.
    combine = reduction.combine(op, before=True)
    # A copy, because the rounds change it; `own` stays the caller's.
    total, arriving = own.copy(), np.empty_like(own)
    result: Array | None = None
    for source, dest in topology.prefix(ranks.rank, ranks.size):
        # Ranks at the start have no source, ranks at the end no destination.
        messages = [] if source is None else [ranks.start_receive(arriving, source)]
        if dest is not None:
            messages.append(ranks.start_send(total, dest))
        # Both at once: the partner at a distance waits for this rank.
        ranks.wait(messages, deadline)
        if source is not None:
            # The first source is the rank before: its total is the result so far.
            if result is None:
                result = arriving.copy()
            else:
                combine(result, arriving)
            combine(total, arriving)
    return result
