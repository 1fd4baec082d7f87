"""Unfinished requests of other tasks."""

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
    """A request of another task under way at this one; answer it once, then or later.

    Attributes:
        source: the task that asks.
        number: of the request there.
        arguments: what msgpack has carried.
        values: what came with it.
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
        """Send a result; with `confirm` it is given up unless it is known to have arrived."""
        if confirm:
            metadata["confirm"] = True
        self._incoming.answer(self, Kind.RESULT, metadata, values, keep=confirm)

    def fail(self, error: Exception, **metadata: Any) -> None:
        """Send an error."""
        if not isinstance(error, OpError):
            _log.warning("service: a request failed", exc_info=error)
        metadata |= protocol.error_to(error)
        self._incoming.answer(self, Kind.ERROR, metadata, (), keep=False)

    def wait(self, withdraw: Callable[[OpError], object], give_up: Callable[[], object]) -> None:
        """Say how to end the work with an error, or if its answer does not reach anybody."""
        self.withdraw, self.give_up = withdraw, give_up


class OpenRequests:
    """All such requests of one task; usable from any thread.

    Args:
        send: sends frames to a task without waiting.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], ServerRequest] = {}

    def accept(self, source: int, message: Message) -> ServerRequest:
        """Take in a request."""
        work = ServerRequest(self, source, message)
        with self._lock:
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
        """Answer a request once; keep it until the answer is confirmed, if so wished.

        Where an answer cannot be sent, such as one of too many arrays, the reason is the answer,
        and what it was to carry goes back.
        """
        with self._lock:
            if work.answered or (work.source, work.number) not in self._open:
                return
            work.answered = True
            if not keep:
                del self._open[work.source, work.number]
                work.wait(_ignore, _ignore)  # else what these refer to lives in a circle
        try:
            self._send(work.source, protocol.encode(kind, work.number, metadata, values))
        except Exception as error:
            _log.warning("service: an answer cannot be sent", exc_info=error)
            if keep:
                self.give_up(work.source, work.number)
            why = protocol.error_to(error)
            self._send(work.source, protocol.encode(Kind.ERROR, work.number, why))

    def acknowledged(self, source: int, number: int) -> None:
        """Note that an answer has arrived: what it carried belongs to the other task now."""
        with self._lock:
            self._open.pop((source, number), None)

    def withdraw(self, source: int, number: int, error: OpError) -> None:
        """End a request that waits with an error; one that was answered cannot be ended."""
        with self._lock:
            work = self._open.get((source, number))
        if work is not None and work.withdraw is not None:
            work.withdraw(error)

    def give_up(self, source: int, number: int | None = None) -> int:
        """Undo a request whose answer nobody wants, or all of a task that is gone.

        Returns:
            How many answers were under way that had carried something away.
        """
        with self._lock:
            keys = [k for k in self._open if k[0] == source and number in (None, k[1])]
            works = [self._open.pop(key) for key in keys]
        for work in works:
            if work.give_up is not None:
                work.give_up()
        return sum(work.answered for work in works)
