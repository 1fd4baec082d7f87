"""`prefetch`: reads batches ahead in a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from strategies.core.validation import integer

__all__ = ["Prefetch", "prefetch"]

T = TypeVar("T")

_STOP_SECONDS = 10.0  # the thread ends with the batch that it is reading


class Prefetch(Generic[T]):
    """An iterator that has its next items ready; made by `prefetch`.

    Use it in a `with` statement, or call `close`, where the loop may end early.
    """

    def __init__(
        self, batches: Iterable[T], count: int, position: Callable[[], Any] | None = None
    ) -> None:
        integer("prefetch", "number of batches ahead", count)
        self._batches = batches
        self._count = count
        self._position = position
        self._taken = position() if position is not None else None
        self._ready: deque[tuple[T, Any]] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._over = False  # nothing more will come
        self._closed = False
        self._thread = threading.Thread(target=self._read_ahead, name="prefetch", daemon=True)
        self._thread.start()  # last: it uses all of the above

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next batch; raises what reading it has raised, with its traceback."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._over or self._closed)
            if self._closed:
                raise StopIteration
            if self._ready:
                batch, self._taken = self._ready.popleft()
                self._changed.notify_all()
                return batch
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def position(self) -> Any:
        """Return what the `position` function said when the last batch taken had been read."""
        return self._taken

    def close(self) -> None:
        """Stop reading and wait for the thread; harmless when repeated.

        Raises:
            RuntimeError: the thread does not end, because reading a batch is blocked.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(
                f"prefetch: the thread is still running {_STOP_SECONDS} s after it was told to "
                "stop; does reading a batch block"
            )

    def _read_ahead(self) -> None:
        iterator: Iterator[T] | None = None
        try:
            iterator = iter(self._batches)
            for batch in iterator:
                position = self._position() if self._position is not None else None
                with self._changed:
                    self._ready.append((batch, position))
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._ready) < self._count or self._closed)
                    if self._closed:
                        break
        except BaseException as error:
            self._error = error
        finally:
            close = getattr(iterator, "close", None)  # of a generator: runs its `finally` here
            try:
                if close is not None:
                    close()
            except BaseException as error:
                self._error = self._error or error
            with self._changed:
                self._over = True
                self._changed.notify_all()


def prefetch(
    batches: Iterable[T], n: int, *, position: Callable[[], Any] | None = None
) -> Prefetch[T]:
    """Read up to `n` batches ahead, in a thread of its own.

    Args:
        batches: where they come from; used by that thread alone.
        n: how many may be ready.
        position: called after each batch has been read, such as `ShardedInput.position`: what it
            returns belongs to that batch, so that a checkpoint does not count what was only read.

    Raises:
        ValueError: `n` below 1.

    Example:
        >>> with prefetch(range(3), 2) as batches:
        ...     list(batches)
        [0, 1, 2]
    """
    return Prefetch(batches, n, position)
