"""Controller: negotiates named requests and executes them in one order.

Ranks may make calls in any order. They synchronize in *rounds*. In a round every rank sends one
byte for each cached call, and a MIN all-reduce combines them::

                      news   0 "fc.weight"   1 "fc.bias"   2 "loss"
    rank 0            none       ready          ready        -
    rank 1            none       ready            -          -
    minimum                      ready -> executed now, on both

A call without a number is announced: if any rank has news, all ranks exchange their descriptions in
the same round. Once all ranks have announced a call, they compare it. It gets a number and is
executed, or it fails on all ranks. A program that repeats its calls in every step needs one round
of a microsecond, and one reduction, for all calls that are ready together.

Every process set has its own controller. A rank takes part in a round if it has an unfinished call,
or knows of one of other ranks. It does so in the thread that waits for a call (`Controller.wait`),
or else in a thread of the controller (`background_thread`). A rank without calls makes the other
ranks wait. After the timeout the waiting rank reports which ranks have not made the call, and the
call fails on all ranks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

import collectives as cc
from collectives import extend
from strategies.horovod.controller.execution import Response, execute
from strategies.horovod.controller.negotiation import (
    MOST,
    Joined,
    Leaving,
    NegotiationState,
    News,
    Ready,
    Stalled,
)
from strategies.horovod.controller.negotiation_thread import (
    STOP_SECONDS,
    CycleTime,
    NegotiationThread,
)
from strategies.horovod.controller.pending_requests import NamesInUse, PendingRequest
from strategies.horovod.controller.request_signature import RequestKey, RequestSignature, label
from strategies.horovod.controller.response_cache import CacheEntry, cache_key

__all__ = ["Controller"]

log = logging.getLogger(__name__)

# Seconds after which a call that is ready here, but not everywhere, is announced with its
# description. Then all ranks know which ranks made it, and detect other calls with the same key.
_TELL = 0.1

# Number of calls in a round of each width; a round uses the smallest one that fits.
_WIDTHS = (256, 1024, MOST + 1)


class Controller:
    """Executes the named calls of a group of ranks.

    Args:
        comm: communicator for the controller alone.

    Attributes:
        names: names in use on this rank.
        unnamed: counter of calls without a name.
    """

    def __init__(self, comm: cc.Communicator) -> None:
        self.names = NamesInUse()
        self.unnamed = itertools.count()
        self._comm = comm
        # Shared memory of a node; wide enough for the widest round.
        self._row = comm.shared_empty(_WIDTHS[-1], np.uint8)
        self._rounds: dict[int, Callable[[], Any]] = {}  # width -> planned all-reduce
        # Held during a round.
        self._driving = threading.Lock()
        # Guards the fields up to the next comment, which every thread that makes a call changes.
        self._lock = threading.Lock()
        self._fresh: list[PendingRequest] = []  # not in a round yet
        self._news: list[News] = []
        self._waiting = 0  # threads in `wait`
        self._broken: Exception | None = None  # why no more calls are possible
        self._owed: dict[RequestKey, str] = {}  # calls that failed on other ranks -> error
        # State of this rank, changed in rounds.
        self._held: dict[RequestKey, PendingRequest] = {}
        self._ready: dict[int, PendingRequest] = {}  # by number
        self._running: list[PendingRequest] = []  # in `execute`
        self._joining: PendingRequest | None = None
        self._shutdown: PendingRequest | None = None
        self._fruitless = 0
        # Replicated state, the same on all ranks.
        self._known = NegotiationState(comm)
        self._thread = NegotiationThread(
            # Not while a thread in `wait` runs the rounds.
            lambda: self._has_pending() and not self._waiting,
            self._negotiate,
            # Without messages, in shared memory of one node, MPI's support for threads does not
            # matter.
            allowed=extend.supports_threads(comm) or not extend.uses_messages(comm),
        )

    def submit(self, pending: PendingRequest, *, alone: bool) -> None:
        """Add a call. Unless it is left `alone`, the calling thread must `wait` at once.

        Raises:
            CollectiveError: no more calls are possible, or the call timed out on other ranks.
        """
        pending.since = time.monotonic()
        # Under `_lock` only: a call must not wait for a round in progress.
        with self._lock:
            self._check_usable(pending)
            # Other ranks gave up this call before this rank made it; here it fails at once.
            owed = self._owed.pop(pending.key, None)
            if owed is not None:
                raise cc.CollectiveTimeout(owed)
            self._fresh.append(pending)
        # The caller waits itself otherwise, and runs the round without a change of threads.
        if alone:
            self._thread.wake()

    def wait(self, pending: PendingRequest) -> None:
        """Take part in rounds until a call is done."""
        with self._lock:
            # Stops the background thread, which would otherwise run the same rounds.
            self._waiting += 1
        pause = CycleTime()
        try:
            while not pending.done:
                pause.after(self._negotiate(pending))
        finally:
            with self._lock:
                self._waiting -= 1
            # The background thread continues with calls that no thread waits for.
            if self._has_pending():
                self._thread.wake()

    def join(self, meanwhile: Callable[[], None]) -> int:
        """Take part without data until all ranks have joined; return the last one.

        Args:
            meanwhile: called after this rank's news, and returns when all ranks have joined.
        """
        # Earlier calls must use this rank's data, so they are completed before.
        for earlier in self.waiting():
            self.wait(earlier)
        pending = PendingRequest(RequestKey("join"), RequestSignature("join"))
        with self._lock:
            self._check_usable(pending)
            # From the next round on, other ranks do not wait for this rank's calls.
            self._joining = pending
            self._news.append(Joined())
        # The thread runs rounds until then.
        self._thread.wake()
        meanwhile()
        self.wait(pending)
        self.names.sweep()
        if pending.error is not None:
            raise pending.error
        return cast(int, pending.results[0])

    def leave(self) -> None:
        """Wait until all ranks leave, then close; *collective*. Calls of other ranks fail."""
        # After an error the ranks are not in step, and a round could wait for ever.
        if self._broken is None:
            pending = PendingRequest(RequestKey("shutdown"), RequestSignature("shutdown"))
            with self._lock:
                # Outside of `_held`, since it is not a call of one name.
                self._shutdown = pending
                self._news.append(Leaving())
            self.wait(pending)
        self.stop()

    def stop(self) -> None:
        """End the thread."""
        self._thread.stop(STOP_SECONDS)

    def waiting(self) -> list[PendingRequest]:
        """Return the unfinished calls."""
        return [*self._held.values(), *self._fresh]

    def _check_usable(self, pending: PendingRequest) -> None:
        if self._broken is not None:
            raise cc.CollectiveError(
                f"{label(pending.key, pending.description)}: not carried out, since {self._broken}"
            )

    def _has_pending(self) -> bool:
        """Return whether this rank has unfinished calls, or other ranks wait for its call."""
        own = self._fresh or self._held or self._news or self._joining or self._shutdown
        # `told` counts too: other ranks need this rank in the rounds until they have decided.
        return bool(own or self._known.told) and self._broken is None

    # A round.

    def _negotiate(self, pending: PendingRequest | None = None) -> bool:
        """Run a round unless `pending` is done; return whether anything changed."""
        with self._driving:
            # Another thread may have finished the call while this one waited for the lock.
            if (pending is not None and pending.done) or not self._has_pending():
                return True
            try:
                return self._exchange()
            except BaseException as error:
                # Also an interrupt: the round may be half done, so the next one would not match.
                self._break(error)
                # Each waiting thread raises it from its own call.
                if isinstance(error, cc.CollectiveError):
                    return True
                raise

    def _exchange(self) -> bool:
        table, joined = self._known.table, self._known.joined
        news = self._place()
        # The smallest width that fits, equal on all ranks as the table is.
        width = next(w for w in _WIDTHS if w > len(table))
        row = self._row[:width]
        row[...] = 0
        # 0 from any rank makes the minimum 0: then all ranks exchange their news.
        row[0] = not news
        if self._comm.rank in joined:  # ready for every call that is possible without its data
            row[1 : len(table) + 1] = [self._known.runnable(table[n][1]) for n in range(len(table))]
        if self._ready:
            # By one index, because a round takes a microsecond and a loop would take more.
            row[[number + 1 for number in self._ready]] = 1
        if width not in self._rounds:
            # A plan per width: repeated rounds then cost no preparation.
            self._rounds[width] = self._comm.plan_allreduce(row, op=cc.MIN)
        self._rounds[width]()
        # Positions where every rank has written 1.
        numbers = np.flatnonzero(row[1 : len(table) + 1]).tolist()
        told = None if row[0] else self._comm.allgather_object(news)
        works = [self._work(table[n][1], self._ready.pop(n, None)) for n in numbers]
        # In the order of numbers on all ranks, so that all evict the same entry later.
        table.used(numbers)
        if told is not None:
            works += self._apply(told)
        # Only rounds without a result count as a wait.
        self._fruitless = 0 if works else self._fruitless + 1
        self._running = [work.pending for work in works if work.pending is not None]
        for pending in self._running:
            # Removed before it runs, since another thread may make the next call of this name.
            del self._held[pending.key]
        execute(works)
        self._running = []
        return bool(works) or told is not None

    def _place(self) -> list[News]:
        """Number or announce each new call; return the news for other ranks."""
        # Swapped under the lock; the rest of the round needs no lock.
        with self._lock:
            fresh, self._fresh = self._fresh, []
            news, self._news = self._news, []
        later = []
        for pending in fresh:
            number = self._known.table.find((cache_key(pending.key), pending.description))
            if pending.key in self._held or number in self._ready:
                later.append(pending)  # one round per call with this key or number
            elif number is None or pending.key in self._known.told:
                # An announced call needs each rank's description; its number does not suffice.
                self._held[pending.key] = pending
                news.append(Ready(pending.key, pending.description))
            else:
                self._held[pending.key] = pending
                self._ready[number] = pending
        if later:
            with self._lock:
                # In front, so that calls keep their order.
                self._fresh[:0] = later
        if self._fruitless:
            news += self._overdue()
        return news

    def _overdue(self) -> list[News]:
        """Announce calls that have waited too long, or give them up."""
        now = time.monotonic()
        settings = self._comm.settings
        news: list[News] = []
        # A copy, because entries are removed in the loop.
        for number, pending in list(self._ready.items()):
            if now - pending.since > _TELL:
                # Its number is withdrawn: ranks must not execute it while it is announced.
                del self._ready[number]
                news.append(Ready(pending.key, pending.description))
        for key in self._known.told:
            held = self._held.get(key)
            # A call that this rank has not made is the other ranks' to report.
            if held is None or key in self._owed:
                continue
            age = now - held.since
            if age > settings.timeout:
                news.append(Stalled(key))
            elif age > settings.stall_warning and not held.warned:
                held.warned = True
                log.warning(
                    "[%d/%d] %s has waited for %.0f s; not called by %s",
                    self._comm.rank, self._comm.size, label(key, held.description), age,
                    extend.describe_ranks(self._comm, *self._known.missing(key)),
                )  # fmt: skip
        return news

    # Processing of news, which all ranks do in the same way.

    def _apply(self, told: Sequence[Sequence[News]]) -> list[Response]:
        """Process the news of all ranks; return the calls that are now ready."""
        # All ranks process the same news in the same order, so their states remain equal.
        late = self._known.apply(told)
        for number, pending in list(self._ready.items()):
            if pending.key in self._known.told:  # announced elsewhere, so announce it here
                del self._ready[number]
                del self._held[pending.key]
                with self._lock:
                    self._fresh.insert(0, pending)
        # Before the decisions: once all ranks have joined, none counts as joined any more.
        self._on_joined()
        works = [self._decide(key, late=key in late) for key in list(self._known.told)]
        # After them, because calls that all ranks have announced still run. Once all ranks leave,
        # no further call can become ready.
        if len(self._known.leaving) == self._comm.size:
            self._broken = cc.CollectiveError("shutdown was called")
            if self._shutdown is not None:
                self._shutdown.succeed([])
        return [work for work in works if work is not None]

    def _decide(self, key: RequestKey, *, late: bool) -> Response | None:
        """Execute a call that all ranks have announced, or fail it on all of them."""
        error, missing = self._known.error(key, late=late), self._known.missing(key)
        # Waits for the missing ranks.
        if error is None and missing:
            return None
        told = self._known.told.pop(key)
        if error is None:
            # The lowest rank's description; all are equal here.
            what, pending = told[min(told)], self._held.get(key)
            self._number((cache_key(key), what))
            return self._work(what, pending)
        # This rank will make the call later and must get the same error then.
        if isinstance(error, cc.CollectiveTimeout) and self._comm.rank in missing:
            self._owed[key] = str(error)
        own = self._held.pop(key, None)
        if own is not None:
            own.fail(extend.collective_error(self._comm, error, min(told)))
        return None

    def _number(self, entry: CacheEntry) -> None:
        """Give a call a number, possibly that of an evicted one."""
        number = self._known.table.add(entry)
        # An evicted call of this rank is announced in the next round.
        replaced = self._ready.pop(number, None)
        if replaced is not None:
            del self._held[replaced.key]
            with self._lock:
                self._fresh.insert(0, replaced)

    def _work(self, what: RequestSignature, pending: PendingRequest | None) -> Response:
        return Response(what, pending, self._comm, len(self._known.joined))

    def _on_joined(self) -> None:
        joined = self._known.joined
        if len(joined) == self._comm.size:
            last = joined[-1]
            joined.clear()
            self.unnamed = itertools.count()  # joined ranks have made fewer calls
            if self._joining is not None:
                self._joining.succeed([last])
                self._joining = None

    def _break(self, error: BaseException) -> None:
        """Fail all calls, because the ranks are no longer in step."""
        with self._lock:
            if self._broken is None:
                # The first error is the cause.
                self._broken = cc.CollectiveError(f"{type(error).__name__}: {error}")
            # A call may be in both lists while it moves between them.
            known = [*self._held.values(), *self._fresh, *self._running]
            open_calls = {id(p): p for p in known}
            self._held.clear()
            self._ready.clear()
            self._fresh.clear()
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), cc.CollectiveError)
        for pending in open_calls.values():
            if not pending.done:
                pending.fail(kind(f"{label(pending.key, pending.description)}: {error}"))
        for pending in filter(None, (self._joining, self._shutdown)):
            if not pending.done:
                pending.fail(kind(f"{pending.description.operation}: {error}"))


_KINDS: tuple[type[cc.CollectiveError], ...] = (cc.CollectiveTimeout, cc.PeerFailure)
