"""Progress thread: moves open requests while the program computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from collectives.p2p.transfers import Transfer
from collectives.transport.backoff import Backoff
from collectives.transport.transport import this_thread

__all__ = ["ProgressThread"]

# Seconds that the thread sleeps between two looks, at first; 2 % of a core.
_NAP = 0.0005

# Seconds within which the thread sees that it shall stop.
_STOP = 1.0


class ProgressThread:
    """The thread, which starts when it is first needed.

    Args:
        requests: returns those that are not over.
        move: moves messages for one of them, and returns how many have ended so far.
        look_after: ends a request whose time is over or, where it is told to look, for which
            another rank does not live any more.
    """

    def __init__(
        self,
        requests: Callable[[], Sequence[Transfer]],
        move: Callable[[Transfer], int],
        look_after: Callable[[Transfer, bool], None],
    ) -> None:
        self._requests = requests
        self._move = move
        self._look_after = look_after
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def needed(self) -> bool:
        """Whether there is no thread yet, nor has it been told to end."""
        return self._thread is None and not self._stop.is_set()

    def attend(self) -> None:
        """Let the thread see that there is a new request."""
        with self._changed:
            if self.needed:
                self._thread = threading.Thread(
                    target=self._work, name="unisono-messages", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def end(self) -> None:
        """End the thread; harmless when repeated."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP)

    def _work(self) -> None:
        this_thread.stop = self._stop
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._stop.is_set() or self._requests())
            self._attend()

    def _attend(self) -> None:
        """Move messages until no request is open."""
        wait, ended = Backoff(_NAP), -1
        while not self._stop.is_set() and (requests := self._requests()):
            now = self._move(requests[0])
            if now != ended:
                wait, ended = Backoff(_NAP), now
            look = wait.pause()
            for transfer in requests:
                if not transfer.over:
                    self._look_after(transfer, look)
