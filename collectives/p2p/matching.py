"""Message matching by source and tag: posted receives and unexpected messages.

An array goes to the oldest receive that wants it, a receive takes the oldest array that it wants.
Elements come from one rank in the order of its heads, so those before the wanted ones are taken,
too, into memory of ours.

One lock guards all of it. Each function here is one step with the lock; what is over then is handed
over without it, since callers' functions may go on with other messages.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.p2p.transfers import ReceiveOperation, SendOperation, Transfer, UnexpectedMessage
from collectives.transport import header
from collectives.transport.header import Envelope
from collectives.transport.transport import Transport

__all__ = ["Matching"]

# Sent buffers kept for the next arrays: fresh memory costs more than the copy into it.
_KEPT_BUFFERS = 4


class Matching:
    """What is known of the arrays of one group that are under way.

    Args:
        ranks: the group.

    Attributes:
        lock: guards all of it.
        torn: whether an error has interrupted a change.
    """

    def __init__(self, ranks: Transport) -> None:
        self.lock = threading.Lock()
        self.torn = False
        self._change = _Change(self)
        self._ranks = ranks
        self._sent: list[SendOperation] = []  # not known to have arrived
        self._wanted: list[
            ReceiveOperation
        ] = []  # in the order of the calls; nothing has come for them
        self._coming: list[ReceiveOperation] = []  # whose elements are under way
        self._arrived: list[UnexpectedMessage] = []  # that nobody wants yet, in order
        self._behind: dict[int, deque[UnexpectedMessage]] = defaultdict(
            deque
        )  # elements not yet taken
        self._over: list[Transfer] = []  # to be handed over
        self._spare: list[Array] = []

    @property
    def sent(self) -> list[SendOperation]:
        """What this rank has sent that is not known to have arrived."""
        return list(self._sent)

    @property
    def requests(self) -> list[Transfer]:
        """The requests that are not over."""
        under_way: list[Transfer] = [*self._coming, *self._wanted, *self._sent]
        return [transfer for transfer in under_way if transfer.job is not None]

    def start(
        self, lane: Transport, sending: SendOperation, head: Array, payload: Array | None
    ) -> bool:
        """Send a head and what follows it, no other thread's between; tell whether it has gone."""
        with self._change:
            sending.messages.append(lane.send_nowait(head, sending.dest))
            if payload is not None:
                sending.messages.append(lane.start_send(payload, sending.dest))
            # Most short ones have gone by now, and need no other look.
            gone = all(lane.poll(m, sending.deadline.operation) for m in sending.messages)
            if not gone:
                self._sent.append(sending)
        return gone

    def post_receive(self, lane: Transport, receiving: ReceiveOperation) -> None:
        """Take the oldest array that fits, or wait for one."""
        with self._change:
            for arrival in self._arrived:
                if receiving.matches(arrival):
                    self._arrived.remove(arrival)
                    self._start_transfer(lane, arrival, receiving)
                    break
            else:
                self._wanted.append(receiving)

    def advance(self, lane: Transport) -> list[Transfer]:
        """Take the heads that have come, poll what is under way, and return what is over."""
        with self._change:
            while (found := lane.poll_mailbox()) is not None:
                source, data = found
                self._match(lane, UnexpectedMessage(header.read(data, source, self._ranks)), source)
            if self._coming:
                come = [receiving for receiving in self._coming if receiving.has_come()]
                self._coming = [receiving for receiving in self._coming if receiving not in come]
                self._over += come
            if self._sent:
                gone = [sending for sending in self._sent if sending.has_gone()]
                self._sent = [sending for sending in self._sent if sending not in gone]
                self._over += gone
                spare = [sending.copy for sending in gone if sending.copy is not None]
                self._spare = [*self._spare, *spare][-_KEPT_BUFFERS:]
            over, self._over = self._over, []
        return over

    def requeue(self, over: Sequence[Transfer]) -> None:
        """Return again, by the next `advance`, what was not delivered."""
        with self.lock:
            self._over = [*over, *self._over]

    def _match(self, lane: Transport, arrival: UnexpectedMessage, source: int) -> None:
        """Give an array that has come to the oldest receive that wants it, or keep it."""
        if arrival.memory is None:
            self._behind[source].append(arrival)
        for receiving in self._wanted:
            if receiving.matches(arrival):
                self._wanted.remove(receiving)
                self._start_transfer(lane, arrival, receiving)
                return
        self._arrived.append(arrival)

    def _start_transfer(
        self, lane: Transport, arrival: UnexpectedMessage, receiving: ReceiveOperation
    ) -> None:
        """Let an array go where it is wanted."""
        memory = receiving.start(arrival)
        if arrival.memory is None:
            source = arrival.head.envelope.source
            behind = self._behind[source]
            while arrival.memory is None:
                first = behind.popleft()
                first.memory = memory if first is arrival else np.empty(first.head.nbytes, np.uint8)
                first.message = lane.start_receive(first.memory, source)
        self._coming.append(receiving)

    def find(self, receiving: ReceiveOperation) -> Envelope | None:
        """Return what is known of the oldest array that a receive would take."""
        with self.lock:
            fitting = (arrival for arrival in self._arrived if receiving.matches(arrival))
            return next((arrival.head.envelope for arrival in fitting), None)

    def memory(self, nbytes: int) -> Array:
        """Return memory for a copy, used before if some fits."""
        with self.lock:
            for index, spare in enumerate(self._spare):
                if spare.size == nbytes:
                    return self._spare.pop(index)
        return np.empty(nbytes, np.uint8)

    def drop(self) -> list[Transfer]:
        """Forget what is under way, and return it."""
        with self.lock:
            dropped = [*self._over, *self._coming, *self._wanted, *self._sent]
            self._over, self._coming, self._wanted, self._sent = [], [], [], []
        return dropped


class _Change:
    """Holds the lock, and remembers that an error has come in the middle of a change."""

    def __init__(self, matching: Matching) -> None:
        self._matching = matching

    def __enter__(self) -> None:
        self._matching.lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._matching.torn = True
        self._matching.lock.release()
