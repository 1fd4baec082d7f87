"""`broadcast_batches`: one rank reads, and all ranks get its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar, cast

import collectives as cc
from strategies.core.agreement import raise_everywhere

__all__ = ["broadcast_batches"]

T = TypeVar("T")


def broadcast_batches(
    batches: Iterable[T] | None, comm: cc.Communicator, *, root: int = 0
) -> Iterator[T]:
    """Yield the batches of one rank on all ranks.

    For data that only one rank can read, such as a stream or an environment, and for model
    parallelism, where all ranks need the same rows. *Collective* at each step: all ranks iterate.

    Args:
        batches: the batches of the root, which are pickled; other ranks may pass None.
        comm: the ranks.
        root: rank that reads.

    Yields:
        The batch itself on the root, a copy elsewhere.

    Raises:
        ValueError: `root` is not a rank; on all ranks.
        MismatchError: the ranks pass different roots; on all ranks.
        OpError, ValueError, ...: the error of the root's iterable; on all ranks in the same step.
            Other ranks raise the same class with the root in the message.

    Cost: a broadcast of the pickled batch. Wrap the root's batches in `prefetch` to read the next
    ones meanwhile.

    Example:
        >>> import collectives as cc
        >>> list(broadcast_batches([[1, 2], [3]], cc.init()))
        [[1, 2], [3]]
    """
    iterator: Iterator[T] | None = None
    while True:
        error = None
        # One batch; an empty list at the end, None after an error.
        given: list[T] | None = None
        if comm.rank == root:
            try:
                iterator = iter(cast(Iterable[T], batches)) if iterator is None else iterator
                given = list(islice(iterator, 1))
            except Exception as caught:
                error = caught
        received = comm.broadcast_object(given, root)
        if received is None:
            raise_everywhere(error, comm, "input")
        if not received:
            return
        yield received[0]
