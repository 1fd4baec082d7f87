"""Share the input among ranks, and keep ranks in step that read different amounts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import collectives as cc
from strategies.agreement import raise_everywhere
from strategies.structures import leaves, map_leaves

__all__ = ["in_step", "share"]

# What a rank says before each step. The largest counts.
_ENDED, _READY, _FAILED = 0, 1, 2


def share(batch: Any, rank: int, size: int) -> Any:
    """Return one rank's rows of a global batch.

    Args:
        batch: arrays of shape (n, ...) with one n, or nested tuples, lists and dicts of them.
        rank: whose rows.
        size: among how many ranks; the first `n % size` of them get one row more.

    Raises:
        ValueError: the arrays have different numbers of rows, or none at all.
    """
    rows = {np.shape(leaf)[:1] for leaf in leaves(batch)}
    if len(rows) != 1 or () in rows:
        raise ValueError(
            f"share: the batch has no common number of rows, expected arrays of shape (n, ...), "
            f"got shapes {[np.shape(leaf) for leaf in leaves(batch)]}"
        )
    return map_leaves(lambda leaf: np.array_split(leaf, size)[rank], batch)


def in_step(batches: Iterable[Any], comm: cc.Communicator) -> Iterator[Any]:
    """Yield this rank's batches, and empty ones when only other ranks have some left.

    *Collective* at each step: all ranks iterate, and stop together.

    Args:
        batches: this rank's batches: arrays of shape (n, ...) in any nested structure, which is
            the same on all ranks.
        comm: the ranks to stay in step with.

    Yields:
        Batches of the same structure; with 0 rows when this rank has run out.

    Raises:
        OpError, ValueError, ...: the error of this rank's own iterable, or of another rank's, of
            the same class and with the rank in its message; on all ranks in the same step.
    """
    iterator = iter(batches)
    empty: Any = None
    while True:
        batch, error = None, None
        try:
            batch = next(iterator, None)
        except Exception as caught:
            error = caught
        state = _FAILED if error is not None else _ENDED if batch is None else _READY
        highest = int(comm.allreduce(state, op=cc.MAX))
        if highest == _FAILED:
            raise_everywhere(error, comm, "input")
        if highest == _ENDED:
            return
        if empty is None:
            empty = _empty_like(batch, comm)
        yield empty if batch is None else batch


def _empty_like(batch: Any, comm: cc.Communicator) -> Any:
    """Return a batch of 0 rows; ranks without a batch learn the structure from the others."""
    own = None if batch is None else map_leaves(lambda leaf: np.asarray(leaf)[:0], batch)
    return next(empty for empty in comm.allgather_object(own) if empty is not None)
