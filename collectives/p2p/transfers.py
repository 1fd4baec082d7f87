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
    """An array whose header has arrived.

    Attributes:
        head: the header.
        memory: flat memory for the elements; None until a receive needs them.
        message: message with the elements; None before it starts, and for elements in the header.
    """

    __slots__ = ("head", "memory", "message")

    def __init__(self, head: Header) -> None:
        self.head = head
        self.memory = head.elements
        self.message: PendingMessage | None = None


class Transfer(ABC):
    """One array between this rank and another rank.

    Args:
        deadline: limit of the transfer, with the name of the operation.
        ranks: the group, for errors.
        move: moves all messages of the group.

    Attributes:
        over: whether the transfer has ended and its outcome was delivered.
        result: result for the caller, once the transfer has ended.
        error: reason of a failure, else None.
        job: state of the request; None for a blocking call, and after the end.
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
        """Move all messages, and return whether the transfer has ended."""
        if not self.over:
            self._move()
        return self.over

    @abstractmethod
    def complete(self) -> None:
        """Deliver the outcome of the transfer."""

    def succeed(self, result: Any) -> None:
        """Deliver a result."""
        # Clearing the reference breaks the cycle between the transfer and its request.
        job, self.job = self.job, None
        self.result, self.over = result, True
        if job is not None:
            job.succeed(result)

    def fail(self, error: BaseException) -> None:
        """Deliver an error, unless the transfer has ended."""
        # A transfer that has ended keeps its result: an error of the group comes too late for it.
        if not self.over:
            job, self.job = self.job, None
            self.error, self.over = error, True
            if job is not None:
                job.fail(error)

    @abstractmethod
    def describe(self) -> str:
        """Describe the rank that the transfer waits for."""

    @property
    @abstractmethod
    def peers(self) -> Sequence[int]:
        """The ranks that the transfer waits for."""


class SendOperation(Transfer):
    """An array that this rank sends.

    Args:
        dest: the other rank.
        copy: the library's copy of the array; None if the caller's memory is sent.

    Attributes:
        messages: pending messages, in the order of sending.
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
        """Bytes of the library's copy."""
        return 0 if self.copy is None else self.copy.nbytes

    def has_gone(self) -> bool:
        """Poll the messages, and return whether their memory may change."""
        # In order, so that an error names the first message that is still pending.
        while self.messages and self.messages[0].done():
            del self.messages[0]
        return not self.messages

    def complete(self) -> None:
        """Deliver the end of the send: the array may change."""
        self.succeed(None)

    def describe(self) -> str:
        """Describe the rank that the transfer waits for."""
        waits = [message.describe() for message in self.messages]
        return waits[0] if waits else f"{self.ranks.name([self.dest])} to receive an array"

    @property
    def peers(self) -> Sequence[int]:
        """The destination."""
        return (self.dest,)


class ReceiveOperation(Transfer):
    """An array that this rank receives.

    Args:
        source: sending rank; None for any rank.
        tag: tag of the array; None for any tag.
        kind: expected kind of data: array or object.
        out: the caller's array for the result; None for new memory.
        ordered: called before a write to a device.
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
        """Return whether this receive accepts an arrived array."""
        # The header names source and tag, whatever the receive expects.
        envelope = arrival.head.envelope
        return self.source in (None, envelope.source) and self.tag in (None, envelope.tag)

    def start(self, arrival: UnexpectedMessage) -> Array:
        """Match an array; return flat memory for its elements, a dummy if `out` does not fit."""
        envelope, kind, nbytes, _ = arrival.head
        self._arrival, self.envelope = arrival, envelope
        # `Request.envelope` is readable before the elements arrive.
        if self.job is not None:
            self.job.envelope = envelope
        try:
            self._flat = self._target(envelope, kind)
        except Exception as error:
            # Any error, because the elements are on their way and must be received somewhere.
            self._wrong = error
            return np.empty(nbytes, np.uint8)  # so that later arrays of the rank can be received
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
        """Poll the message with the elements, if any; return whether all elements have arrived."""
        assert self._arrival is not None
        # None: the elements were in the header.
        return self._arrival.message is None or self._arrival.message.done()

    def complete(self) -> None:
        """Copy the elements to their destination if needed, and deliver the result."""
        assert self._arrival is not None
        assert self._arrival.memory is not None
        try:
            # Only now, so that the message has been received and later ones match.
            if self._wrong is not None:
                raise self._wrong
            # The elements arrived before the receive was posted, or in the header.
            if self._arrival.memory is not self._flat:
                host_arrays.raw_bytes(self._flat)[...] = host_arrays.raw_bytes(self._arrival.memory)
            result: Any = host_arrays.copy_to(self._flat, self._memory)
            # The stream of the caller may still use the device memory of `out`.
            if self._give_back is not None:
                self._ordered()
                result = self._give_back(result)
        except Exception as error:
            # Also an error of another library in `_give_back`: it concerns this transfer alone.
            self.fail(error)
        else:
            self.succeed(result)

    def describe(self) -> str:
        """Describe the rank that the transfer waits for."""
        if self._arrival is not None and self._arrival.message is not None:
            return self._arrival.message.describe()
        source = "any rank" if self.source is None else self.ranks.name([self.source])
        tag = {None: " with any tag", 0: ""}.get(self.tag, f" with tag {self.tag}")
        return f"{source} to send {self._kind}{tag}"

    @property
    def peers(self) -> Sequence[int]:
        """The sending rank; empty if several ranks may send, because one death is not final."""
        if self.envelope is not None:
            return (self.envelope.source,)
        if self.source is not None:
            return (self.source,)
        # With two ranks "any rank" is the other one, whose death is final.
        others = [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]
        return others if len(others) == 1 else ()
