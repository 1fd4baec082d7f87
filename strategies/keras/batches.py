"""Batches for `fit`: equal numbers of steps, and means over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import collectives as cc
from collectives import extend
from strategies.core import array_ops
from strategies.core.pytree import map_leaves
from strategies.input import uneven_batches
from strategies.input.batch_split import rows_of

__all__ = ["in_step"]


def in_step(batches: Iterable[Any], *, comm: cc.Communicator | None = None) -> Iterator[Any]:
    """Yield this rank's batches for `fit`, with weights that make each step a mean over all rows.

    Keras divides the loss of a batch by the rows of this rank, and `DistributedOptimizer` divides
    the sum of the gradients by the number of ranks P. The weights correct for ranks with other
    numbers of rows: those of n rows, of N on all ranks, are multiplied by P * n / N. The gradient
    is then that of one process with all N rows, for losses with Keras's default reduction.

    A rank that runs out of batches before the others repeats its last batch with weights of 0.

    *Collective* at each step: all ranks iterate, and stop together.

    Args:
        batches: this rank's batches `(x, y)` or `(x, y, sample_weight)`, with arrays of n rows.
            `sample_weight` is one array, of shape (n, ...).
        comm: the ranks; None for the whole job.

    Yields:
        `(x, y, sample_weight)`, the weights in float32.

    Raises:
        ValueError: a batch has another form; on all ranks.
        Exception: as `strategies.input.in_step`.

    Cost: one small exchange and one all-reduce of 8 bytes per step.
    """
    comm = extend.comm_or_world(comm, "in_step")
    last: Any = None
    for x, y, weights in uneven_batches.in_step(map(_with_weights, batches), comm):
        rows = len(weights)
        total = comm.allreduce(float(rows), op=cc.SUM)
        if rows:
            last = x, y, weights
            yield x, y, weights * np.float32(comm.size * rows / total)
        else:
            # A mean over 0 rows is NaN, so the rank computes with rows of weight 0.
            x, y, weights = last or map_leaves(
                lambda leaf: np.zeros((1, *leaf.shape[1:]), array_ops.dtype_name(leaf)),
                (x, y, weights),
            )
            yield x, y, np.zeros_like(weights)


def _with_weights(batch: Any) -> tuple[Any, Any, Any]:
    """Return a batch with its weights in float32, by default 1 for each row."""
    if not isinstance(batch, (list, tuple)) or len(batch) not in (2, 3):
        raise ValueError(
            "in_step: expected batches (x, y) or (x, y, sample_weight), got "
            f"{type(batch).__name__}" + (f" of {len(batch)}" if hasattr(batch, "__len__") else "")
        )
    x, y, *given = batch
    rows = rows_of((x, y))
    weights = np.ones(rows, np.float32)
    if given and given[0] is not None:
        weights = array_ops.to_host(given[0]).astype(np.float32)
    return x, y, weights
