"""JAX support: collective operations inside compiled programs, and Optax transformations."""

from __future__ import annotations

import jax  # noqa: F401  (the package needs it)

from strategies.jax.failures import library_errors
from strategies.jax.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    exscan,
    gather,
    grouped_allreduce,
    recv,
    reduce,
    reduce_scatter,
    scan,
    scatter,
    send,
    sendrecv,
)

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "grouped_allreduce",
    "library_errors",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]
