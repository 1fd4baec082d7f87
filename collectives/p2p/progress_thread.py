"""Progress thread: moves open requests while the program computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from collectives.core.background_threads import BackgroundThread
from collectives.p2p.transfers import Transfer
from collectives.transport.backoff import Backoff
from collectives.transport.transport import this_thread

__all__ = ["ProgressThread"]

# First sleep between two polls, in seconds; polling then takes 2 % of a core.
_NAP = 0.0005


class ProgressThread(BackgroundThread):
    """Moves the messages of open requests, and finds the errors of their peers.

    Args:
        requests: returns the requests that are not complete.
        move: moves messages for one of them; returns how many transfers have completed so far.
        check: ends a request whose deadline has passed or, if its second argument is True, whose
            peer has died.
        end: fails the open requests and stops this thread.
    """

    def __init__(
        self,
        requests: Callable[[], Sequence[Transfer]],
        move: Callable[[Transfer], int],
        check: Callable[[Transfer, bool], None],
        end: Callable[[], None],
    ) -> None:
        super().__init__("messages")
        self._requests = requests
        self._move = move
        self._check = check
        self._end = end
        self._stop_waits = threading.Event()

    @property
    def needed(self) -> bool:
        """Whether the thread has neither been started nor stopped."""
        return self._thread is None and not self._stopping

    def attend(self) -> None:
        """Start the thread if needed, and wake it for a new request."""
        self.start()
        with self._changed:
            self._changed.notify_all()

    def stop_at_exit(self, timeout: float) -> None:
        """Fail the open requests, and stop."""
        self._end()

    def _wake(self) -> None:
        self._stop_waits.set()

    def _run(self) -> None:
        # Waits of this thread end when the event is set.
        this_thread.stop = self._stop_waits
        while not self._stopping:
            with self._changed:
                # Sleeps without open requests, so that an idle communicator costs no polls.
                self._changed.wait_for(lambda: self._stopping or self._requests())
            self._move_all()

    def _move_all(self) -> None:
        """Move messages until no request is open."""
        wait, ended = Backoff(_NAP), -1
        while not self._stopping and (requests := self._requests()):
            # One poll moves the messages of all requests.
            now = self._move(requests[0])
            # Poll at short intervals again after each completion.
            if now != ended:
                wait, ended = Backoff(_NAP), now
            look = wait.pause()
            for transfer in requests:
                # `_move` may have ended it.
                if not transfer.over:
                    self._check(transfer, look)
