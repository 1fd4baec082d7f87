"""Cut batches for replicas, and keep ranks in step that read different amounts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

import collectives as cc
from strategies.agreement import agree, raise_everywhere
from strategies.input import empty
from strategies.structures import leaves, map_leaves

__all__ = ["Uneven", "cut", "cycle_sizes", "even_sizes", "has_rows", "in_step", "rows_of"]

Uneven = Literal["fewer", "drop", "pad"]


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return consecutive parts of a batch; past its end they are shorter, and then empty.

    Args:
        batch: arrays of shape (n, ...) with one n, or nested tuples, lists and dicts of them.
        sizes: rows of each part.

    Raises:
        ValueError: the arrays have different numbers of rows, or none at all.

    Example:
        >>> [part.tolist() for part in cut(np.arange(4), [3, 2, 1])]
        [[0, 1, 2], [3], []]
    """
    rows_of(batch)
    ends = [0, *itertools.accumulate(sizes)]

    def part(start: int, end: int) -> Any:
        return map_leaves(lambda leaf: _rows(leaf)[start:end], batch)

    return [part(start, end) for start, end in itertools.pairwise(ends)]


def even_sizes(rows: int, parts: int) -> list[int]:
    """Return sizes for `cut` of which all but the last ones are the same.

    Example:
        >>> even_sizes(7, 3), even_sizes(4, 3)
        ([3, 3, 3], [2, 2, 2])
    """
    return [-(-rows // parts)] * parts


def cycle_sizes(rows: int, pipeline: int, pipelines: int, replicas: int) -> list[int]:
    """Return sizes in which one pipeline cuts its own batches of `rows` rows.

    Every replica of the pipeline takes the next part in each step. All pipelines together take
    `rows` rows per step, and each of them `rows` in as many parts as there are replicas.

    Args:
        rows: of a global batch.
        pipeline: which one.
        pipelines: how many there are.
        replicas: of all pipelines together, a multiple of `pipelines`.

    Example:
        >>> [cycle_sizes(7, pipeline, 2, 4) for pipeline in (0, 1)]
        [[2, 2, 2, 1], [2, 1, 2, 2]]
    """
    small, longer = divmod(rows, replicas)
    sizes = [small + 1] * longer + [small] * (replicas - longer)
    first = pipeline * replicas // pipelines
    return sizes[first:] + sizes[:first]


def rows_of(batch: Any) -> int:
    """Return the number of rows that all arrays of a batch have.

    Raises:
        ValueError: they have different numbers of rows, or none at all.
    """
    rows = {np.shape(leaf)[:1] for leaf in leaves(batch)}
    if len(rows) != 1 or () in rows:
        raise ValueError(
            f"share: the batch has no common number of rows, expected arrays of shape (n, ...), "
            f"got shapes {[np.shape(leaf) for leaf in leaves(batch)]}"
        )
    return int(rows.pop()[0])


def has_rows(batch: Any) -> bool:
    """Return whether any array of a batch has a row."""
    return any(np.shape(leaf)[:1] != (0,) for leaf in leaves(batch))


def _rows(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)


def in_step(
    batches: Iterable[Any], comm: cc.Communicator, *, uneven: Uneven = "fewer"
) -> Iterator[Any]:
    """Yield this rank's batches so that all ranks take the same number of steps.

    *Collective* at each step: all ranks iterate, and stop together. A step in which no rank has a
    row is left out: a mean over it would be one over nothing.

    Args:
        batches: this rank's batches: arrays of shape (n, ...) in any nested structure, which is
            the same on all ranks.
        comm: the ranks to stay in step with.
        uneven: what happens when some ranks run out before others. "fewer": they go on with batches
            of 0 rows, and a mean that is weighted by rows has fewer contributors. "drop": all stop,
            and what the others have left is not used. "pad": they repeat their first batch.

    Yields:
        Batches of the same structure; with 0 rows when this rank has run out, or with "pad" when it
        never had any. Those are arrays of the library, dtype and kind of device that this rank's
        batches have, or the first rank's that has one.

    Raises:
        ValueError: no such way to end.
        OpError, ValueError, ...: the error of this rank's own iterable, or of another rank's, of
            the same class and with the rank in its message; on all ranks in the same step.
        RuntimeError: a rank that never had a batch cannot make the arrays that the others have; on
            all ranks.
    """
    if uneven not in get_args(Uneven):
        raise ValueError(
            f"in_step: no such way to end, expected one of {' '.join(get_args(Uneven))}, "
            f"got {uneven!r}"
        )
    iterator = iter(batches)
    first: Any = None
    nothing: Any = None
    while True:
        batch, error, rows = None, None, False
        try:
            batch = next(iterator, None)
            rows = batch is not None and has_rows(batch)
        except Exception as caught:
            error = caught
        ready = batch is not None
        mine = np.array([error is not None, error is None and not ready, ready, rows], np.int8)
        failed, ended, going, any_rows = comm.allreduce(mine, op=cc.MAX).tolist()
        if failed:
            raise_everywhere(error, comm, "input")
        if not going or (ended and uneven == "drop"):
            return
        if not any_rows:
            continue
        if nothing is None:
            nothing = _nothing_like(batch, comm)
        if first is None and uneven == "pad":
            first = batch
        yield batch if ready else nothing if first is None else first


def _nothing_like(batch: Any, comm: cc.Communicator) -> Any:
    """Return a batch of 0 rows; ranks without a batch learn the form from the others."""
    nothing: Any = None
    form, error = None, None
    try:
        if batch is not None:
            nothing = map_leaves(empty.like, batch)
            form = map_leaves(empty.form_of, nothing)
    except Exception as caught:
        error = caught
    forms = [form for form in comm.allgather_object(form) if form is not None]
    try:
        if batch is None and forms:
            nothing = map_leaves(lambda leaf: leaf.make(), forms[0])
    except Exception as caught:
        error = caught
    agree(comm, "in_step", [], error)
    return nothing
