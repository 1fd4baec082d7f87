"""Progress engine of a group: moves its point-to-point messages and completes them.

All messages use a *lane* of the group's transport, separate from the messages of collective
operations. So one rank may send before a collective operation, and the receiver may receive after
it.

Messages move whenever a thread sends, receives, polls or waits here. While requests are open, and
if MPI allows it, a background thread (`collectives.p2p.progress_thread`) also moves them and
detects errors. After an error later messages could match the wrong receive, so the engine fails all
open transfers and makes the group unusable.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from collectives.arrays.host_arrays import Array
from collectives.calls.group import Group
from collectives.calls.requests import RequestState, warn_unwaited
from collectives.core.errors import CollectiveError, CollectiveTimeout, LaunchError, PeerFailure
from collectives.p2p.matching import Matching
from collectives.p2p.progress_thread import ProgressThread
from collectives.p2p.transfers import SendOperation, Transfer
from collectives.tracing import recorder
from collectives.transport.transport import Deadline, Transport

__all__ = ["ProgressEngine"]

log = logging.getLogger(__name__)

# Seconds that `close` waits for ranks that have not received all messages.
_DRAIN = 5.0

# Seconds that `end` waits for the thread after stopping its waits.
_STOP = 1.0


class ProgressEngine:
    """Moves the messages of one group.

    Attributes:
        process: id of the process that created the engine.
        matching: posted receives and unexpected messages.
    """

    def __init__(self, group: Group) -> None:
        # A forked child must not touch the parent's messages.
        self.process = os.getpid()
        self.matching = Matching(group.transport)
        self._group = group
        self._ranks = group.transport
        self._thread = ProgressThread(
            lambda: self.matching.requests, self._advance, self._poll, self.end
        )
        self._transport: Transport | None = None
        self._handed_over = 0  # number of delivered transfers
        self._closed = False

    def transport(self) -> Transport:
        """Return the lane of the messages; the first call opens it."""
        # Checked twice, so that later calls take no lock.
        if self._transport is None:
            with self.matching.lock:
                # The second test is under the lock: two threads may open the lane at once.
                self._transport = self._transport or self._ranks.channel()
        return self._transport

    def start(self, sending: SendOperation, head: Array, payload: Array | None) -> None:
        """Send a header and its payload, without other messages in between."""
        # The message has gone at once, so no wait is needed.
        if self.matching.start(self.transport(), sending, head, payload):
            sending.complete()

    def move(self) -> None:
        """Move all messages, and deliver completed transfers."""
        # Another thread has failed: the messages of this group no longer match.
        if self._group.unusable is not None:
            self._drop()
            return
        over = self.matching.advance(self.transport())
        # Not exact with several threads: the progress thread only looks for a change.
        self._handed_over += len(over)
        try:
            for transfer in over:
                transfer.complete()
        except BaseException:  # of a signal handler: the next `move` delivers the rest
            self.matching.requeue([transfer for transfer in over if not transfer.over])
            raise

    def finish(self, transfer: Transfer, deadline: Deadline) -> Any:
        """Wait for a transfer, and return its result or raise its error."""
        try:
            self.transport().wait([transfer], deadline)
        except BaseException as error:
            # After any error, also of a signal handler, a later message could match this transfer.
            self.give_up(deadline.operation, error)
            raise
        if transfer.error is not None:
            raise transfer.error
        return transfer.result

    def job_of(self, transfer: Transfer) -> RequestState:
        """Attach a request state to a transfer, and return it."""
        # The request calls `_run` when the program waits, because MPI moves messages only in calls.
        transfer.job = RequestState(transfer.deadline.operation, partial(self._run, transfer))
        return transfer.job

    def hand_to_thread(self, transfer: Transfer) -> None:
        """Let the background thread move a request, if MPI allows that."""
        if transfer.over:
            return
        # MPI's thread support needs a check only before the thread starts.
        if self._thread.needed:
            try:
                self._ranks.check_threads(transfer.deadline.operation)
            except LaunchError:
                return  # the request moves during this rank's later calls
        self._thread.attend()

    def give_up(self, operation: str, error: BaseException) -> None:
        """Make the group unusable, and fail all open transfers."""
        # The first error is the cause; later ones follow from it.
        if self._group.unusable is None:
            self._group.mark_failed(operation, error)
        self._drop(PeerFailure if isinstance(error, PeerFailure) else CollectiveError)

    def close(self) -> None:
        """Wait a few seconds for ranks that have not received everything; harmless when repeated.

        Requests that are still open then fail, and a warning names them.
        """
        # The messages belong to the parent of a forked child.
        if os.getpid() != self.process or self._closed:
            return
        # First, because the wait below may be interrupted and repeated.
        self._closed = True
        sent = self.matching.sent
        try:
            # Also outside requests: sends that returned before their array was received.
            if sent and self._group.unusable is None:
                self.transport().wait(sent, Deadline("close", _DRAIN))
        except CollectiveError as error:
            log.warning("what was sent has not been received: %s", error)
        finally:
            self.end()

    def end(self) -> None:
        """Stop the thread, and fail the open requests."""
        self._closed = True
        # `drop` first, so that no thread completes these transfers meanwhile.
        left = [transfer for transfer in self.matching.drop() if transfer.job is not None]
        jobs = [transfer.job for transfer in left if transfer.job is not None]
        warn_unwaited(jobs)
        for transfer in left:
            operation = transfer.deadline.operation
            transfer.fail(
                CollectiveError(f"{operation}: the communicator was closed before it was done")
            )
        # Last: the thread may be in a callback that waits for one of these requests, which have
        # failed now.
        self._thread.stop(_STOP)

    def _run(self, transfer: Transfer, timeout: float | None) -> None:
        """Move messages until a request completes or `timeout` seconds pass; store errors in it."""
        deadline = transfer.deadline
        try:
            if timeout == 0:
                # One poll moves the messages of all transfers.
                self.transport().poll(transfer, deadline.operation)
            else:
                give_up = math.inf if timeout is None else time.monotonic() + timeout
                # `_Until` ends the wait without an error, and the request continues after
                # `timeout`.
                self.transport().wait([_Until(transfer, give_up)], deadline)
        except CollectiveError as error:
            # The error belongs to the request, whose `wait` raises it; the caller of `_run` only
            # waits.
            self._fail(transfer, error)
        except BaseException as error:
            # A signal handler interrupted a change, so the state is unreliable.
            if self.matching.torn:
                self._fail(transfer, error)
            raise

    def _advance(self, request: Transfer) -> int:
        """Poll once for a request, and return the number of transfers delivered so far."""
        self._run(request, 0)
        return self._handed_over

    def _poll(self, transfer: Transfer, look: bool) -> None:
        """Fail a request after its deadline or, if `look`, after the death of its peer."""
        lane, deadline = self.transport(), transfer.deadline
        try:
            # A deadline without a message, so it is checked here, and not by `Transport.wait`.
            deadline.check(self._ranks, [transfer], lane.blocking_rank)
            if look:
                lane.check_peers(deadline.operation, transfer.peers)
        except CollectiveError as error:
            self._fail(transfer, error)

    def _fail(self, transfer: Transfer, error: BaseException) -> None:
        operation = transfer.deadline.operation
        # This request first, so that it raises its own error instead of the group's.
        transfer.fail(error)
        self.give_up(operation, error)
        # As `Group.end` does for collective calls.
        if isinstance(error, (CollectiveTimeout, PeerFailure)):
            recorder.write(f"{operation}: {type(error).__name__}")

    def _drop(self, kind: type[CollectiveError] = CollectiveError) -> None:
        """Fail all open transfers of an unusable group."""
        for transfer in self.matching.drop():
            transfer.fail(
                kind(
                    f"{transfer.deadline.operation}: this communicator is not usable any more, "
                    f"since {self._group.unusable} ({self._ranks.where})"
                )
            )


class _Until(NamedTuple):
    """Wait condition: a transfer completes, or the time of one wait has passed."""

    transfer: Transfer
    give_up: float  # by the monotonic clock

    def done(self) -> bool:
        # The transfer first, so that a poll with a passed time still moves messages.
        return self.transfer.done() or time.monotonic() >= self.give_up

    def describe(self) -> str:
        return self.transfer.describe()

    @property
    def peers(self) -> Sequence[int]:
        return self.transfer.peers
