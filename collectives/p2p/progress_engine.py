"""Progress engine of a group: moves its point-to-point messages and completes them.

All of them go on a *lane* of the group's transport, where they never meet those of the operations
of all ranks, so that a rank may send before such an operation what another one receives after it.

Messages move whenever a thread sends, receives, asks or waits here. While requests are open, a
thread of ours moves them as well, and finds the errors that nobody waits for
(`collectives.p2p.progress_thread`); not where MPI does not allow that. After an error no later
message would meet its partner, so it ends all that is under way, and the group's later calls.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
import weakref
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

# Seconds that `close` waits for ranks that have not received yet what was sent to them.
_DRAIN = 5.0


class ProgressEngine:
    """Moves the messages of one group.

    Attributes:
        process: in which it was made.
        matching: which array goes to which receive.
    """

    def __init__(self, group: Group) -> None:
        self.process = os.getpid()
        self.matching = Matching(group.transport)
        self._group = group
        self._ranks = group.transport
        self._attendant = ProgressThread(self._requests, self._advance, self._poll)
        self._transport: Transport | None = None
        self._handed_over = 0  # so many transfers so far
        self._closed = False

    def transport(self) -> Transport:
        """Return what its messages go by, which the first one opens."""
        if self._transport is None:
            with self.matching.lock:
                self._transport = self._transport or self._ranks.channel()
        return self._transport

    def start(self, sending: SendOperation, head: Array, payload: Array | None) -> None:
        """Send a head and what follows it; no other thread's come between."""
        if self.matching.start(self.transport(), sending, head, payload):
            sending.complete()

    def move(self) -> None:
        """Move all messages, and hand over what has come."""
        if self._group.unusable is not None:
            self._drop()
            return
        over = self.matching.advance(self.transport())
        self._handed_over += len(over)
        try:
            for transfer in over:
                transfer.complete()
        except BaseException:  # of a signal handler: the others are delivered when this moves again
            self.matching.requeue([transfer for transfer in over if not transfer.over])
            raise

    def finish(self, transfer: Transfer, deadline: Deadline) -> Any:
        """Wait until a transfer is over, and return what has come of it."""
        try:
            self.transport().wait([transfer], deadline)
        except BaseException as error:
            # Whatever it is, as of a signal handler: what comes later would meet the rest of this.
            self.give_up(deadline.operation, error)
            raise
        if transfer.error is not None:
            raise transfer.error
        return transfer.result

    def job_of(self, transfer: Transfer) -> RequestState:
        """Let a transfer be one that a request waits for."""
        transfer.job = RequestState(transfer.deadline.operation, partial(self._run, transfer))
        return transfer.job

    def hand_to_thread(self, transfer: Transfer) -> None:
        """Let the thread move a request, too, where MPI allows that."""
        if transfer.over:
            return
        if self._attendant.needed:
            try:
                self._ranks.check_threads(transfer.deadline.operation)
            except LaunchError:
                return  # it moves whenever this rank calls something here
            _started.add(self)
        self._attendant.attend()

    def give_up(self, operation: str, error: BaseException) -> None:
        """Refuse later calls of the group, and end what is under way."""
        if self._group.unusable is None:
            self._group.mark_failed(operation, error)
        self._drop(PeerFailure if isinstance(error, PeerFailure) else CollectiveError)

    def close(self) -> None:
        """Wait a moment for ranks that have not received everything; harmless when repeated.

        Requests that are still open then fail, and are named in a warning.
        """
        if os.getpid() != self.process or self._closed:
            return
        self._closed = True
        sent = self.matching.sent
        try:
            if sent and self._group.unusable is None:
                self.transport().wait(sent, Deadline("close", _DRAIN))
        except CollectiveError as error:
            log.warning("what was sent has not been received: %s", error)
        finally:
            self.end()

    def end(self) -> None:
        """End the thread, and the requests that are open."""
        self._closed = True
        left = [transfer for transfer in self.matching.drop() if transfer.job is not None]
        jobs = [transfer.job for transfer in left if transfer.job is not None]
        warn_unwaited(jobs)
        for transfer in left:
            operation = transfer.deadline.operation
            transfer.fail(
                CollectiveError(f"{operation}: the communicator was closed before it was done")
            )
        self._attendant.end()

    def _run(self, transfer: Transfer, timeout: float | None) -> None:
        """Move messages until a request is over, or for so many seconds; what fails is its end."""
        deadline = transfer.deadline
        try:
            if timeout == 0:
                self.transport().poll(transfer, deadline.operation)
            else:
                give_up = math.inf if timeout is None else time.monotonic() + timeout
                self.transport().wait([_Until(transfer, give_up)], deadline)
        except CollectiveError as error:
            self._fail(transfer, error)
        except BaseException as error:
            if self.matching.torn:
                self._fail(transfer, error)
            raise

    def _requests(self) -> list[Transfer]:
        """Return the requests that are not over."""
        return self.matching.requests

    def _advance(self, request: Transfer) -> int:
        """Move messages as for a request, and return how many transfers have ended so far."""
        self._run(request, 0)
        return self._handed_over

    def _poll(self, transfer: Transfer, look: bool) -> None:
        """End a request whose time is over, or for which another rank does not live any more."""
        lane, deadline = self.transport(), transfer.deadline
        try:
            deadline.check(self._ranks, [transfer], lane.blocking_rank)
            if look:
                lane.check_peers(deadline.operation, transfer.peers)
        except CollectiveError as error:
            self._fail(transfer, error)

    def _fail(self, transfer: Transfer, error: BaseException) -> None:
        """End a request by an error, after which nothing here can go on."""
        operation = transfer.deadline.operation
        transfer.fail(error)
        self.give_up(operation, error)
        if isinstance(error, (CollectiveTimeout, PeerFailure)):
            recorder.write(f"{operation}: {type(error).__name__}")

    def _drop(self, kind: type[CollectiveError] = CollectiveError) -> None:
        """End what is under way, since the group is unusable."""
        for transfer in self.matching.drop():
            transfer.fail(
                kind(
                    f"{transfer.deadline.operation}: this communicator is not usable any more, "
                    f"since {self._group.unusable} ({self._ranks.where})"
                )
            )


class _Until(NamedTuple):
    """A transfer, or the end of the time that somebody waits for it."""

    transfer: Transfer
    give_up: float  # by the monotonic clock

    def done(self) -> bool:
        return self.transfer.done() or time.monotonic() >= self.give_up

    def describe(self) -> str:
        return self.transfer.describe()

    @property
    def peers(self) -> Sequence[int]:
        return self.transfer.peers


# Those whose threads were started.
_started: weakref.WeakSet[ProgressEngine] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the threads before the interpreter does."""
    for each in list(_started):
        if each.process == os.getpid():
            each.end()
