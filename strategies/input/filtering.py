"""`maybe_batch` and its variants: batches of filtered elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from strategies.input.batching import batch, batch_join, shuffle_batch, shuffle_batch_join
from strategies.input.pipeline_state import ShardedRows
from strategies.input.pipelines import Batches, Read
from strategies.input.sharded import ShardedInput

__all__ = [
    "Keep",
    "maybe_batch",
    "maybe_batch_join",
    "maybe_shuffle_batch",
    "maybe_shuffle_batch_join",
]

Keep: TypeAlias = Callable[[Any], Any]
"""Filter: called with the value of `read`, in the same thread. Returns whether to keep it or, with
`enqueue_many`, one truth value per row."""


def maybe_batch(
    read: Read | ShardedInput[Any], keep: Keep, batch_size: int, **options: Any
) -> Batches:
    """As `batch`, of the elements that `keep` accepts.

    Args:
        read: as for `batch`.
        keep: see `Keep`.
        batch_size: rows per batch.
        **options: as for `batch`.

    Raises:
        ValueError: from the pipeline, if `keep` returns a vector without `enqueue_many`, one of
            the wrong length, or something with more dimensions.

    Example:
        >>> from strategies.input.producers import preload
        >>> numbers = preload(range(10), num_epochs=1, shuffle=False)
        >>> with maybe_batch(numbers, lambda number: number % 3 == 0, 2) as batches:
        ...     [batch.tolist() for batch in batches]
        [[0, 3], [6, 9]]
    """
    if isinstance(read, ShardedInput):
        # The positions to resume from are those of the accepted records.
        rows = ShardedRows(read, lambda record: bool(_wanted(keep, record, many=False)))
        return batch(rows, batch_size, **options)
    return batch(_keep(read, keep, options), batch_size, **options)


def maybe_batch_join(reads: Sequence[Read], keep: Keep, batch_size: int, **options: Any) -> Batches:
    """As `batch_join`, of the elements that `keep` accepts; see `maybe_batch`."""
    return batch_join([_keep(read, keep, options) for read in reads], batch_size, **options)


def maybe_shuffle_batch(read: Read, keep: Keep, batch_size: int, **options: Any) -> Batches:
    """As `shuffle_batch`, of the elements that `keep` accepts; see `maybe_batch`."""
    return shuffle_batch(_keep(read, keep, options), batch_size, **options)


def maybe_shuffle_batch_join(
    reads: Sequence[Read], keep: Keep, batch_size: int, **options: Any
) -> Batches:
    """As `shuffle_batch_join`, of the elements that `keep` accepts; see `maybe_batch`."""
    return shuffle_batch_join([_keep(read, keep, options) for read in reads], batch_size, **options)


def _keep(read: Read, keep: Keep, options: Mapping[str, Any]) -> Read:
    """Return a function that reads until `keep` accepts something."""
    many = bool(options.get("enqueue_many"))

    def read_on() -> Any:
        # Reads on until something is kept: the queue gets no empty elements.
        while True:
            values = read()
            wanted = _wanted(keep, values, many=many)
            # All rows rejected: nothing to enqueue.
            if wanted.any():
                return values if wanted.ndim == 0 else _rows(values, wanted)

    return read_on


def _wanted(keep: Keep, values: Any, *, many: bool) -> Any:
    """Return what `keep` accepts, as an array of truth values."""
    wanted = np.asarray(keep(values), bool)
    if wanted.ndim > 1 or (wanted.ndim == 1 and not many):
        allowed = "0 or 1 dimensions" if many else "no dimensions: it cannot be a vector"
        raise ValueError(f"keep: expected {allowed}, got shape {wanted.shape}")
    return wanted


def _rows(values: Any, wanted: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: _rows(part, wanted) for name, part in values.items()}
    if isinstance(values, (list, tuple)):
        return tuple(_rows(part, wanted) for part in values)
    array = np.asarray(values)
    if array.shape[:1] != wanted.shape:
        raise ValueError(
            f"keep: expected one truth value per row, got {len(wanted)} for shape {array.shape}"
        )
    return array[wanted]
