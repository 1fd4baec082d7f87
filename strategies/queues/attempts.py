"""One operation on a queue as a thing of its own, so that it can wait without a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strategies.errors import OpError
from strategies.queues.store import Columns

__all__ = ["Attempt", "Close", "Dequeue", "Enqueue"]


class Attempt:
    """One operation on a queue, waiting or finished.

    Attributes:
        on_done: called once without arguments when the attempt has finished, also if that is
            inside `Engine.submit`. Runs in any thread, holds no lock of the queue, must not block.
        done: whether it has finished; `error` and what was taken are then final.
        error: why it did not succeed, or None.
        count: number of rows, None for a single one.
    """

    count: int | None = None
    on_done: Callable[[], None] | None = None
    done = False
    error: OpError | None = None


class Enqueue(Attempt):
    """Put rows in, as many as there is room for, until all are in.

    Args:
        rows: one value per component, or columns if `count` is given, as `Components` checked them;
            not to be changed by the caller before the attempt has finished.
        count: number of rows in the columns; None for a single row.
        on_done: see `Attempt`.
    """

    entered = 0  # number of rows that are in

    def __init__(
        self,
        rows: tuple[Any, ...],
        count: int | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self.rows = rows
        self.count = count
        self.on_done = on_done


class Close(Attempt):
    """Close the queue when everything before it in the line is in."""


class Dequeue(Attempt):
    """Take rows out, as many as are allowed, until there are enough.

    Args:
        count: number of rows; None for a single row.
        up_to: whether fewer are enough once the queue is closed.
        on_done: see `Attempt`.

    Attributes:
        row: the row, if a single one was wanted and has come.
        pieces: the columns taken so far, if several were wanted.
        taken: number of rows in the pieces.
    """

    row: tuple[Any, ...] = ()
    pieces: list[Columns] | None = None
    taken = 0

    def __init__(
        self,
        count: int | None = None,
        *,
        up_to: bool = False,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self.count = count
        self.up_to = up_to
        self.on_done = on_done
