"""`prefetch`: reads batches ahead in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from collectives import extend
from strategies.core.validation import integer

__all__ = ["Prefetch", "prefetch"]

T = TypeVar("T")

_STOP_SECONDS = 10.0  # the thread finishes the batch that it is reading


class Prefetch(extend.BackgroundThread, Generic[T]):
    """Iterator that reads its next items ahead; created by `prefetch`.

    Use it in a `with` statement, or call `close`, if the loop may end early.
    """

    def __init__(
        self, batches: Iterable[T], count: int, position: Callable[[], Any] | None = None
    ) -> None:
        integer("prefetch", "number of batches ahead", count)
        super().__init__("prefetch")
        self._batches = batches
        self._count = count
        self._position = position
        # The position before the first batch, for a checkpoint at the start.
        self._taken = position() if position is not None else None
        self._ready: deque[tuple[T, Any]] = deque()
        self._error: BaseException | None = None
        self._over = False  # whether the thread has read its last batch
        self.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next batch; raise the error of reading it, with its traceback."""
        with self._changed:
            # `_stopping` too: a closed iterator ends instead of waiting for the thread.
            self._changed.wait_for(lambda: self._ready or self._over or self._stopping)
            if self._stopping:
                raise StopIteration
            if self._ready:
                batch, self._taken = self._ready.popleft()
                self._changed.notify_all()
                return batch
            # Raised once; after that the iteration has ended.
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def position(self) -> Any:
        """Return the result of the `position` function after the last returned batch was read."""
        return self._taken

    def close(self) -> None:
        """Stop reading and wait for the thread; harmless when repeated.

        Raises:
            RuntimeError: the thread does not end, because reading a batch is blocked.
        """
        # Frees the batches that are ready: the iteration returns none of them.
        self._ready.clear()
        if not self.stop(_STOP_SECONDS):
            raise RuntimeError(
                f"prefetch: the thread is still running {_STOP_SECONDS} s after it was told to "
                "stop; does reading a batch block"
            )

    def stop_at_exit(self, timeout: float) -> None:
        """Request the stop without waiting, because reading a batch may block."""
        self.stop(0)

    def _run(self) -> None:
        iterator: Iterator[T] | None = None
        try:
            iterator = iter(self._batches)
            for batch in iterator:
                # Right after the batch, because another read would move the position.
                position = self._position() if self._position is not None else None
                with self._changed:
                    self._ready.append((batch, position))
                    self._changed.notify_all()
                    # Waits after appending, so that `n` batches are ready and none is held besides.
                    self._changed.wait_for(lambda: len(self._ready) < self._count or self._stopping)
                    if self._stopping:
                        break
        except BaseException as error:
            # Also interrupts: the consumer raises them.
            self._error = error
        finally:
            close = getattr(iterator, "close", None)  # runs a generator's `finally` here
            try:
                if close is not None:
                    close()
            except BaseException as error:
                self._error = self._error or error
            # Last: the consumer may continue only when the source is closed.
            with self._changed:
                self._over = True
                self._changed.notify_all()


def prefetch(
    batches: Iterable[T], n: int, *, position: Callable[[], Any] | None = None
) -> Prefetch[T]:
    """Read up to `n` batches ahead in a thread.

    Args:
        batches: source of the batches; only the thread uses it.
        n: largest number of batches held ready.
        position: called after each batch was read, such as `ShardedInput.position`. Its result is
            stored with the batch, so that checkpoints exclude batches that were only read ahead.

    Raises:
        ValueError: `n` is below 1.

    Example:
        >>> with prefetch(range(3), 2) as batches:
        ...     list(batches)
        [0, 1, 2]
    """
    return Prefetch(batches, n, position)
