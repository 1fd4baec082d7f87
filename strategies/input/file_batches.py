"""Batches of file records; readers open only the files that they need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from strategies.core.pytree import zip_leaves
from strategies.core.validation import integer
from strategies.errors import InvalidArgumentError
from strategies.input.sharded import Policy, ShardedInput

__all__ = ["FileBatches"]


class FileBatches:
    """Batches of the records of files, iterable any number of times.

    Under the policies "file" and "auto", `Strategy.distribute_dataset` gives whole files to each
    process.

    Args:
        files: names, or other arguments of `read`; the same on all ranks.
        read: returns the records of a file, the same ones each time: arrays or numbers, or nested
            tuples, lists and dicts of them.
        batch_size: records in a batch; the last one may have fewer.
        shuffle: whether to reshuffle the files in each epoch.
        seed: seed of the shuffling, the same on all ranks.
        num_epochs: number of epochs; None repeats forever.

    Raises:
        ValueError: no files, or `batch_size` or `num_epochs` below 1.

    Example:
        >>> batches = FileBatches([0, 10], lambda n: [n, n + 1, n + 2], 4)
        >>> [batch.tolist() for batch in batches]
        [[0, 1, 2, 10], [11, 12]]
        >>> [batch.tolist() for batch in batches.share(1, 2)]
        [[10, 11, 12]]
    """

    def __init__(
        self,
        files: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_epochs: int | None = 1,
    ) -> None:
        integer("FileBatches", "batch_size", batch_size)
        self.files = tuple(files)
        self.batch_size = batch_size
        self._read = read
        self._order = {"shuffle": shuffle, "seed": seed, "num_epochs": num_epochs}
        # Made and dropped; readers are opened only when batches are taken.
        self._records(0, 1, "data")  # checks the other arguments

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._records(0, 1, "data"))

    def facts(self) -> list[str]:
        """Return the arguments that must be equal on all ranks, as text."""
        return self._records(0, 1, "data").facts()

    def share(self, rank: int, size: int) -> Iterator[Any]:
        """Return the batches of the files that belong to reader `rank` of `size`.

        Raises:
            InvalidArgumentError: there are fewer files than readers.
        """
        if len(self.files) < size:
            raise InvalidArgumentError(
                f"FileBatches: fewer files than processes, expected at least {size}, got "
                f"{len(self.files)}"
            )
        return self._batches(self._records(rank, size, "file"))

    def _records(self, rank: int, size: int, policy: Policy) -> ShardedInput[Any]:
        order: Any = self._order
        return ShardedInput(
            self.files, self._read, rank=rank, size=size, policy=policy, comm=None, **order
        )

    def _batches(self, records: Iterator[Any]) -> Iterator[Any]:
        while found := tuple(itertools.islice(records, self.batch_size)):
            yield zip_leaves(np.stack, found, "FileBatches")
