"""Server side of RPC: requests of other tasks without a final reply."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strategies.errors import OpError
from strategies.rpc import message as protocol
from strategies.rpc.message import Kind, Message
from strategies.rpc.wire import Frame

__all__ = ["OpenRequests", "ServerRequest"]

_log = logging.getLogger(__name__)

Send = Callable[[int, list[Frame]], None]


def _ignore(*arguments: Any) -> None:
    """Do nothing: the request has ended."""


class ServerRequest:
    """A request of another task; answer it once, immediately or later.

    Attributes:
        source: task that sent the request.
        number: number of the request on that task.
        arguments: arguments from msgpack.
        values: arrays and other values of the message.
    """

    def __init__(self, incoming: OpenRequests, source: int, message: Message) -> None:
        self.source = source
        self.number = message.number
        self.arguments: Mapping[str, Any] = message.metadata.get("a") or {}
        self.values = message.values
        self.answered = False
        self.withdraw: Callable[[OpError], object] | None = None
        self.give_up: Callable[[], object] | None = None
        self._incoming = incoming

    def reply(self, values: Sequence[Any] = (), *, confirm: bool = False, **metadata: Any) -> None:
        """Send a result; with `confirm`, `give_up` undoes it unless its arrival is confirmed."""
        if confirm:
            metadata["confirm"] = True
        self._incoming.answer(self, Kind.RESULT, metadata, values, keep=confirm)

    def fail(self, error: BaseException, **metadata: Any) -> None:
        """Send an error."""
        if not isinstance(error, OpError):
            _log.warning("service: a request failed", exc_info=error)
        metadata |= protocol.error_to(error)
        self._incoming.answer(self, Kind.ERROR, metadata, (), keep=False)

    def wait(self, withdraw: Callable[[OpError], object], give_up: Callable[[], object]) -> None:
        """Set the functions that end the operation with an error, and that undo it."""
        self.withdraw, self.give_up = withdraw, give_up


class OpenRequests:
    """All unfinished requests of other tasks; thread-safe.

    Args:
        send: sends frames to a task without waiting.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        # Each task numbers its own requests, so the key needs the task.
        self._open: dict[tuple[int, int], ServerRequest] = {}

    def accept(self, source: int, message: Message) -> ServerRequest:
        """Register a request."""
        work = ServerRequest(self, source, message)
        with self._lock:
            # Before the handler runs, because `answer` drops replies to unknown requests.
            self._open[source, message.number] = work
        return work

    def answer(
        self,
        work: ServerRequest,
        kind: Kind,
        metadata: Mapping[str, Any],
        values: Sequence[Any],
        *,
        keep: bool,
    ) -> None:
        """Answer a request once; with `keep`, hold it until the reply is confirmed.

        If the reply cannot be sent, such as one with too many arrays, the error is sent instead and
        the operation is undone.
        """
        with self._lock:
            # Answered before, or given up in the meantime.
            if work.answered or (work.source, work.number) not in self._open:
                return
            work.answered = True
            if not keep:
                # A DISOWN that arrives from here on finds nothing: there is nothing left to undo.
                del self._open[work.source, work.number]
                work.wait(_ignore, _ignore)  # drops references that would form a cycle
        try:
            # Without the lock: sending takes the channel's lock and enters MPI.
            self._send(work.source, protocol.encode(kind, work.number, metadata, values))
        except Exception as error:
            _log.warning("service: an answer cannot be sent", exc_info=error)
            # The items never left this task, so they return to their owner.
            if keep:
                self.give_up(work.source, work.number)
            why = protocol.error_to(error)
            self._send(work.source, protocol.encode(Kind.ERROR, work.number, why))

    def acknowledged(self, source: int, number: int) -> None:
        """Record that a reply has arrived: the other task owns its items now."""
        with self._lock:
            self._open.pop((source, number), None)

    def withdraw(self, source: int, number: int, error: OpError) -> None:
        """End a waiting request with an error; no effect after its reply."""
        with self._lock:
            work = self._open.get((source, number))
        # `withdraw` is None for operations that cannot end early, such as an initialization.
        if work is not None and work.withdraw is not None:
            work.withdraw(error)

    def give_up(self, source: int, number: int | None = None) -> int:
        """Undo one request, or all requests of a lost task.

        Args:
            source: task that sent the requests.
            number: number of the request; None for all.

        Returns:
            Number of undone requests that had a reply in flight.
        """
        with self._lock:
            keys = [k for k in self._open if k[0] == source and number in (None, k[1])]
            works = [self._open.pop(key) for key in keys]
        # Without the lock: undoing one operation may complete another, whose reply takes the lock.
        for work in works:
            if work.give_up is not None:
                work.give_up()
        return sum(work.answered for work in works)
