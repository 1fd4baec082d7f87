"""Message matching by source and tag: posted receives and unexpected messages.

An array matches the oldest posted receive that fits; a receive matches the oldest array that fits.
One rank's elements arrive in the order of its headers. So elements ahead of the wanted array are
received first, into buffers of the library.

One lock guards the state, and each method is one step under the lock. Completed transfers are
delivered without the lock, because callbacks may send and receive.
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

# Copies of sent arrays kept for reuse: fresh memory costs more than the copy into it.
_KEPT_BUFFERS = 4


class Matching:
    """Transfers of one group that are in progress.

    Args:
        ranks: the group.

    Attributes:
        lock: guards all state.
        torn: whether an error has interrupted a change of the state.
    """

    def __init__(self, ranks: Transport) -> None:
        self.lock = threading.Lock()
        self.torn = False
        # Created once: entering it costs less than a `contextmanager`.
        self._change = _Change(self)
        self._ranks = ranks
        self._sent: list[SendOperation] = []  # not known to have arrived
        self._wanted: list[ReceiveOperation] = []  # unmatched, in the order of the calls
        self._coming: list[ReceiveOperation] = []  # elements are in transfer
        self._arrived: list[UnexpectedMessage] = []  # unmatched, in order of arrival
        self._behind: dict[int, deque[UnexpectedMessage]] = defaultdict(
            deque
        )  # elements not received yet, by source
        # Delivered outside of the lock, because a callback may start another transfer.
        self._over: list[Transfer] = []  # ended, to be delivered
        self._spare: list[Array] = []

    @property
    def sent(self) -> list[SendOperation]:
        """The sends not known to have arrived."""
        # A copy, because other threads change the list.
        return list(self._sent)

    @property
    def requests(self) -> list[Transfer]:
        """The requests that are not complete."""
        under_way: list[Transfer] = [*self._coming, *self._wanted, *self._sent]
        return [transfer for transfer in under_way if transfer.job is not None]

    def start(
        self, lane: Transport, sending: SendOperation, head: Array, payload: Array | None
    ) -> bool:
        """Send a header and its payload back to back; return whether both have gone."""
        with self._change:
            # Under one lock, because the receiver pairs headers and payloads by their order.
            sending.messages.append(lane.send_nowait(head, sending.dest))
            if payload is not None:
                sending.messages.append(lane.start_send(payload, sending.dest))
            # Most short messages have gone by now, and need no poll later.
            # `poll` translates the errors of MPI.
            gone = all(lane.poll(m, sending.deadline.operation) for m in sending.messages)
            if not gone:
                # Kept until the peer has received it: MPI reads the memory until then.
                self._sent.append(sending)
        return gone

    def post_receive(self, lane: Transport, receiving: ReceiveOperation) -> None:
        """Match the oldest array that fits, or wait for one."""
        with self._change:
            # The oldest arrival first, as MPI's matching order requires.
            for arrival in self._arrived:
                if receiving.matches(arrival):
                    # Removing during the iteration is safe here, because the loop ends with it.
                    self._arrived.remove(arrival)
                    self._start_transfer(lane, arrival, receiving)
                    break
            else:
                self._wanted.append(receiving)

    def advance(self, lane: Transport) -> list[Transfer]:
        """Receive arrived headers, poll open transfers, and return the completed transfers."""
        with self._change:
            # All headers that have arrived, because a later one may match an earlier receive.
            while (found := lane.poll_mailbox()) is not None:
                source, data = found
                self._match(lane, UnexpectedMessage(header.read(data, source, self._ranks)), source)
            if self._coming:
                come = [receiving for receiving in self._coming if receiving.has_come()]
                # By identity of the objects, which define no equality.
                self._coming = [receiving for receiving in self._coming if receiving not in come]
                self._over += come
            if self._sent:
                gone = [sending for sending in self._sent if sending.has_gone()]
                self._sent = [sending for sending in self._sent if sending not in gone]
                self._over += gone
                spare = [sending.copy for sending in gone if sending.copy is not None]
                # The last few, because steps repeat the same sizes.
                self._spare = [*self._spare, *spare][-_KEPT_BUFFERS:]
            over, self._over = self._over, []
        return over

    def requeue(self, over: Sequence[Transfer]) -> None:
        """Return undelivered transfers again from the next `advance`."""
        # In front, because completions keep their order.
        with self.lock:
            self._over = [*over, *self._over]

    def _match(self, lane: Transport, arrival: UnexpectedMessage, source: int) -> None:
        """Match an arrived array with the oldest receive that fits, or keep the array."""
        if arrival.memory is None:
            # The elements follow in a message of their own.
            self._behind[source].append(arrival)
        # The oldest receive that fits; a receive from any rank does not overtake it.
        for receiving in self._wanted:
            if receiving.matches(arrival):
                self._wanted.remove(receiving)
                self._start_transfer(lane, arrival, receiving)
                return
        self._arrived.append(arrival)

    def _start_transfer(
        self, lane: Transport, arrival: UnexpectedMessage, receiving: ReceiveOperation
    ) -> None:
        """Receive the elements of a matched array, after all earlier elements of the same rank."""
        # An `out` that does not fit gets memory that is dropped, so the message is received in any
        # case.
        memory = receiving.start(arrival)
        if arrival.memory is None:
            source = arrival.head.envelope.source
            behind = self._behind[source]
            # MPI matches the messages of one rank in order, so earlier payloads must be received
            # first. Payloads without a receive go to temporary memory.
            while arrival.memory is None:
                first = behind.popleft()
                first.memory = memory if first is arrival else np.empty(first.head.nbytes, np.uint8)
                first.message = lane.start_receive(first.memory, source)
        self._coming.append(receiving)

    def find(self, receiving: ReceiveOperation) -> Envelope | None:
        """Return the envelope of the oldest array that a receive would match, None without one."""
        with self.lock:
            # Another thread may receive the array once the lock is released.
            fitting = (arrival for arrival in self._arrived if receiving.matches(arrival))
            return next((arrival.head.envelope for arrival in fitting), None)

    def memory(self, nbytes: int) -> Array:
        """Return memory for a copy, reused if a spare buffer has this size."""
        with self.lock:
            # Only equal sizes: a step sends the same arrays again.
            for index, spare in enumerate(self._spare):
                if spare.size == nbytes:
                    return self._spare.pop(index)
        return np.empty(nbytes, np.uint8)

    def drop(self) -> list[Transfer]:
        """Remove all open transfers, and return them."""
        with self.lock:
            # Arrived arrays need no outcome, because no transfer waits for them.
            dropped = [*self._over, *self._coming, *self._wanted, *self._sent]
            self._over, self._coming, self._wanted, self._sent = [], [], [], []
        return dropped


class _Change:
    """Context manager that holds the lock, and marks the state as torn after an error."""

    def __init__(self, matching: Matching) -> None:
        self._matching = matching

    def __enter__(self) -> None:
        self._matching.lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The callers then give up the group, after the lock is released.
        if kind is not None:
            self._matching.torn = True
        self._matching.lock.release()
