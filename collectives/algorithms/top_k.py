"""All-reduce of the largest elements of each array, all others counted as zeros.

Every rank sends the same number k of its largest elements with their indices. The entries of all
ranks travel around a ring, and each rank adds them into an array of zeros.

    step   rank 0        rank 1        rank 2
    1      e0 -> 1       e1 -> 2       e2 -> 0
    2      e2 -> 1       e0 -> 2       e1 -> 0

Cost per rank: P - 1 messages, and 8 (P - 1) k bytes, where k is the fraction of the elements,
rounded up. Scratch: the entries of all ranks, and two copies of the array.

Order: elements are summed in rank order; all ranks get the same bits.

Source: A. F. Aji, K. Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017.
"""

from __future__ import annotations

import numpy as np

from collectives.algorithms import ring
from collectives.arrays import device, reduction
from collectives.arrays.host_arrays import Array
from collectives.kernels.compression import Codec
from collectives.kernels.top_k import entries
from collectives.transport.transport import Deadline, Transport

__all__ = ["allreduce"]


def allreduce(
    transport: Transport,
    buffer: Array,
    deadline: Deadline,
    *,
    codec: Codec,
    contribution: Array | None = None,
    divisor: int = 1,
) -> None:
    """Fill `buffer` with the sum of the largest elements of all ranks' contributions.

    Args:
        transport: the ranks.
        buffer: shape (n,), float32 or float64, contiguous; the same n on all ranks.
        deadline: limit of every wait.
        codec: the fraction of the elements, with or without error feedback.
        contribution: shape (n,), dtype of `buffer`, contiguous, not changed; None for `buffer`.
        divisor: divides every contribution before its elements are chosen.
    """
    assert codec.fraction is not None
    source = buffer if contribution is None else contribution
    residual = codec.contribution_residual(source.size, source.dtype)
    own = entries(source, codec.fraction, divisor, residual)
    # Equal counts on all ranks, because the arrays have one size.
    bounds = [own.size * rank for rank in range(transport.size + 1)]
    gathered = np.empty(bounds[-1], own.dtype)
    gathered[bounds[transport.rank] : bounds[transport.rank + 1]] = own
    ring.allgather(transport, gathered, bounds, deadline)
    buffer[...] = 0
    with reduction.ignore_float_errors():
        for chosen in gathered.reshape(transport.size, own.size):
            # An index occurs once per rank, so the indexed sum misses no entry.
            buffer[chosen["index"].astype(np.intp)] += chosen["value"]
    # Each rank adds alone: all must get the same NaN. Finite numbers make none.
    if not np.isfinite(gathered["value"]).all():
        device.canonical_nans(buffer)
