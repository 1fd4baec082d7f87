"""State of one point-to-point transfer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays import host_arrays
from collectives.arrays.host_arrays import Array
from collectives.calls.requests import RequestState
from collectives.transport.backoff import RankSet
from collectives.transport.header import Envelope, Header
from collectives.transport.transport import Deadline, PendingMessage

__all__ = ["UnexpectedMessage", "ReceiveOperation", "SendOperation", "Transfer"]


class UnexpectedMessage:
    """An array whose head has come.

    Attributes:
        head: what has come.
        memory: for its elements, flat; None before anybody wants them.
        message: that brings them; None before, and where they are in the head.
    """

    __slots__ = ("head", "memory", "message")

    def __init__(self, head: Header) -> None:
        self.head = head
        self.memory = head.elements
        self.message: PendingMessage | None = None


class Transfer(ABC):
    """What has to happen between this rank and another one.

    Args:
        deadline: when that has taken long enough; knows the name of the operation.
        ranks: the group, for errors.
        move: moves all messages of the group.

    Attributes:
        over: whether it has come to its end, and what has come of it was handed over.
        result: what the caller gets, once it is over.
        error: why it has failed, if it has.
        job: what a request knows of it; None for a blocking call, and in the end.
    """

    def __init__(self, deadline: Deadline, ranks: RankSet, move: Callable[[], None]) -> None:
        self.deadline = deadline
        self.ranks = ranks
        self.over = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.job: RequestState | None = None
        self._move = move

    def done(self) -> bool:
        """Move all messages, and tell whether this is over."""
        if not self.over:
            self._move()
        return self.over

    @abstractmethod
    def complete(self) -> None:
        """Hand over what has come of it."""

    def succeed(self, result: Any) -> None:
        """Hand over a result."""
        job, self.job = self.job, None
        self.result, self.over = result, True
        if job is not None:
            job.succeed(result)

    def fail(self, error: BaseException) -> None:
        """Hand over an error, unless it is over."""
        if not self.over:
            job, self.job = self.job, None
            self.error, self.over = error, True
            if job is not None:
                job.fail(error)

    @abstractmethod
    def describe(self) -> str:
        """Say whom this waits for."""

    @property
    @abstractmethod
    def peers(self) -> Sequence[int]:
        """The ranks that this waits for."""


class SendOperation(Transfer):
    """An array that this rank sends.

    Args:
        dest: the other rank.
        copy: memory of ours that is sent; None if it is the caller's.

    Attributes:
        messages: by which it goes, the oldest first.
    """

    def __init__(
        self,
        deadline: Deadline,
        ranks: RankSet,
        move: Callable[[], None],
        dest: int,
        copy: Array | None = None,
    ) -> None:
        super().__init__(deadline, ranks, move)
        self.dest = dest
        self.copy = copy
        self.messages: list[PendingMessage] = []

    @property
    def copied(self) -> int:
        """Bytes of our memory."""
        return 0 if self.copy is None else self.copy.nbytes

    def has_gone(self) -> bool:
        """Poll the messages, and tell whether their memory may change."""
        while self.messages and self.messages[0].done():
            del self.messages[0]
        return not self.messages

    def complete(self) -> None:
        """Tell that the array may change."""
        self.succeed(None)

    def describe(self) -> str:
        """Say whom this waits for."""
        waits = [message.describe() for message in self.messages]
        return waits[0] if waits else f"{self.ranks.name([self.dest])} to receive an array"

    @property
    def peers(self) -> Sequence[int]:
        """The rank that it is for."""
        return (self.dest,)


class ReceiveOperation(Transfer):
    """An array that this rank wants.

    Args:
        source: who sends it; None for any rank.
        tag: the number that it is sent with; None for any.
        kind: what it has to be.
        out: where the caller wants it; None for new memory.
        ordered: called before a device is written to.
    """

    def __init__(
        self,
        deadline: Deadline,
        ranks: RankSet,
        move: Callable[[], None],
        source: int | None,
        tag: int | None,
        kind: str,
        out: Any,
        ordered: Callable[[], None],
    ) -> None:
        super().__init__(deadline, ranks, move)
        self.source = source
        self.tag = tag
        self.envelope: Envelope | None = None
        self._kind = kind
        self._out = out
        self._ordered = ordered
        self._arrival: UnexpectedMessage | None = None
        self._wrong: Exception | None = None  # why it does not fit
        self._memory = self._flat = np.empty(0)
        self._give_back: Callable[[Array], Any] | None = None

    def matches(self, arrival: UnexpectedMessage) -> bool:
        """Tell whether this takes an array that has come."""
        envelope = arrival.head.envelope
        return self.source in (None, envelope.source) and self.tag in (None, envelope.tag)

    def start(self, arrival: UnexpectedMessage) -> Array:
        """Take an array, and return flat memory for its elements; any, if it does not fit."""
        envelope, kind, nbytes, _ = arrival.head
        self._arrival, self.envelope = arrival, envelope
        if self.job is not None:
            self.job.envelope = envelope
        try:
            self._flat = self._target(envelope, kind)
        except Exception as error:
            self._wrong = error
            return np.empty(nbytes, np.uint8)  # so that the next array can be received
        return self._flat

    def _target(self, envelope: Envelope, kind: str) -> Array:
        operation = self.deadline.operation
        if kind != self._kind:
            raise TypeError(
                f"{operation}: {self.ranks.name([envelope.source])} sent {kind}, expected "
                f"{self._kind} ({self.ranks.where})"
            )
        _, _, shape, dtype = envelope
        target = None
        if self._out is not None:
            target, self._give_back = host_arrays.check_out(
                self._out, shape, dtype, operation=operation
            )
        self._memory = np.empty(shape, dtype) if target is None else target
        return host_arrays.flat_target(self._memory)

    def has_come(self) -> bool:
        """Poll the message with the elements, if there is one."""
        assert self._arrival is not None
        return self._arrival.message is None or self._arrival.message.done()

    def complete(self) -> None:
        """Put the elements where they belong, and hand over the result."""
        assert self._arrival is not None
        assert self._arrival.memory is not None
        try:
            if self._wrong is not None:
                raise self._wrong
            if self._arrival.memory is not self._flat:
                host_arrays.raw_bytes(self._flat)[...] = host_arrays.raw_bytes(self._arrival.memory)
            result: Any = host_arrays.copy_to(self._flat, self._memory)
            if self._give_back is not None:
                self._ordered()
                result = self._give_back(result)
        except Exception as error:
            self.fail(error)
        else:
            self.succeed(result)

    def describe(self) -> str:
        """Say whom this waits for."""
        if self._arrival is not None and self._arrival.message is not None:
            return self._arrival.message.describe()
        source = "any rank" if self.source is None else self.ranks.name([self.source])
        tag = {None: " with any tag", 0: ""}.get(self.tag, f" with tag {self.tag}")
        return f"{source} to send {self._kind}{tag}"

    @property
    def peers(self) -> Sequence[int]:
        """Who has to send it; nobody where several can, since the end of one says nothing."""
        if self.envelope is not None:
            return (self.envelope.source,)
        if self.source is not None:
            return (self.source,)
        others = [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]
        return others if len(others) == 1 else ()
