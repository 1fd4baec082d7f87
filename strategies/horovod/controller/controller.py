"""Controller: negotiates named requests and executes them in one order.

Ranks may make calls in any order. They meet in *rounds*. In a round every rank brings one byte for
each call that has been made before, and the smallest byte of all ranks is taken::

                      news   0 "fc.weight"   1 "fc.bias"   2 "loss"
    rank 0            none       ready          ready        -
    rank 1            none       ready            -          -
    smallest                     ready -> is carried out now, on both

What has no number yet is *told*: where any rank has news, all of them exchange their descriptions
in the same round. A call that all have told is compared; it gets a number and is carried out, or
it fails on all of them. So a program that makes the same calls in every step costs one round of a
microsecond for all that are ready together, and one reduction for all of them.

Every process set has its own controller. A rank takes part in a round when it has a call that is
not carried out, or knows of one that others have made, in the thread that waits for one
(`Controller.wait`), or else in a thread of the controller (`background_thread`). One that has none
lets the others wait; who has waited for too long says which ranks have not made the call, and
the call fails on all.
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
from strategies.horovod.controller.background_thread import BackgroundThread, CycleTime
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
from strategies.horovod.controller.pending_requests import NamesInUse, PendingRequest
from strategies.horovod.controller.request_signature import RequestKey, RequestSignature, label
from strategies.horovod.controller.response_cache import CacheEntry, cache_key

__all__ = ["Controller"]

log = logging.getLogger(__name__)

# Seconds after which a call that is ready here, but not everywhere, is told with its description:
# from then on all ranks know who has made it, and see whether others mean another call by its key.
_TELL = 0.1

# How many calls with numbers fit in the shortest round, the next, and so on.
_WIDTHS = (256, 1024, MOST + 1)


class Controller:
    """Carries out the named calls of a group of ranks.

    Args:
        comm: for the controller alone.

    Attributes:
        names: names in use on this rank.
        unnamed: numbers of calls without a name.
    """

    def __init__(self, comm: cc.Communicator) -> None:
        self.names = NamesInUse()
        self.unnamed = itertools.count()
        self._comm = comm
        self._row = comm.shared_empty(_WIDTHS[-1], np.uint8)
        self._rounds: dict[int, Callable[[], Any]] = {}  # by width
        # Held during a round.
        self._driving = threading.Lock()
        # Guards what follows until the next comment: it is changed by whoever makes a call.
        self._lock = threading.Lock()
        self._fresh: list[PendingRequest] = []  # not in a round yet
        self._news: list[News] = []
        self._waiting = 0  # threads in `wait`
        self._broken: Exception | None = None  # why there can be no more calls
        self._owed: dict[RequestKey, str] = {}  # calls that have failed elsewhere, and how
        # Of this rank, changed in rounds.
        self._held: dict[RequestKey, PendingRequest] = {}
        self._ready: dict[int, PendingRequest] = {}  # by number
        self._joining: PendingRequest | None = None
        self._shutdown: PendingRequest | None = None
        self._fruitless = 0
        # The same on all ranks.
        self._known = NegotiationState(comm)
        self._helper = BackgroundThread(
            self._only_rank_active, self._negotiate, allowed=self._may_use_threads()
        )

    def submit(self, pending: PendingRequest, *, alone: bool) -> None:
        """Make a call; the thread that does so will `wait` at once unless it is left `alone`.

        Raises:
            CollectiveError: there can be no more calls, or the others have given up this one.
        """
        pending.since = time.monotonic()
        with self._lock:
            self._check_usable(pending)
            owed = self._owed.pop(pending.key, None)
            if owed is not None:
                raise cc.CollectiveTimeout(owed)
            self._fresh.append(pending)
        if alone:
            self._helper.wake()

    def wait(self, pending: PendingRequest) -> None:
        """Take part in rounds until a call is carried out, or has failed."""
        with self._lock:
            self._waiting += 1
        pause = CycleTime()
        try:
            while not pending.done:
                pause.after(self._negotiate(pending))
        finally:
            with self._lock:
                self._waiting -= 1
            if self._has_pending():
                self._helper.wake()

    def join(self) -> int:
        """Take part without data until all ranks do; returns the last one to come."""
        for earlier in self.waiting():
            self.wait(earlier)
        pending = PendingRequest(RequestKey("join"), RequestSignature("join"))
        with self._lock:
            self._check_usable(pending)
            self._joining = pending
            self._news.append(Joined())
        self.wait(pending)
        self.names.sweep()
        if pending.error is not None:
            raise pending.error
        return cast(int, pending.results[0])

    def leave(self) -> None:
        """Wait until all ranks leave, and end; *collective*. Calls of the others fail."""
        if self._broken is None:
            pending = PendingRequest(RequestKey("shutdown"), RequestSignature("shutdown"))
            with self._lock:
                self._shutdown = pending
                self._news.append(Leaving())
            self.wait(pending)
        self.stop()

    def stop(self) -> None:
        """End the thread."""
        self._helper.stop()

    def waiting(self) -> list[PendingRequest]:
        """Return the calls that are not carried out."""
        return [*self._held.values(), *self._fresh]

    def _may_use_threads(self) -> bool:
        """Whether a thread may take part in rounds; if not, waiting does."""
        return extend.supports_threads(self._comm) or not extend.uses_messages(self._comm)

    def _check_usable(self, pending: PendingRequest) -> None:
        if self._broken is not None:
            raise cc.CollectiveError(
                f"{label(pending.key, pending.description)}: not carried out, since {self._broken}"
            )

    def _has_pending(self) -> bool:
        """Whether this rank wants to meet the others, or some of them wait for its call."""
        own = self._fresh or self._held or self._news or self._joining or self._shutdown
        return bool(own or self._known.told) and self._broken is None

    def _only_rank_active(self) -> bool:
        """Whether there is something to do, and no thread waits for it."""
        return self._has_pending() and not self._waiting

    # A round.

    def _negotiate(self, pending: PendingRequest | None = None) -> bool:
        """Meet the other ranks once, unless a call is done; tells whether anything came of it."""
        with self._driving:
            if (pending is not None and pending.done) or not self._has_pending():
                return True
            return self._cycle()

    def _cycle(self) -> bool:
        """Make a round; an error in one is the end of all calls."""
        try:
            return self._exchange()
        except BaseException as error:
            self._break(error)
            if isinstance(error, cc.CollectiveError):
                return True
            raise

    def _exchange(self) -> bool:
        table, joined = self._known.table, self._known.joined
        news = self._place()
        width = next(w for w in _WIDTHS if w > len(table))
        row = self._row[:width]
        row[...] = 0
        row[0] = not news
        if self._comm.rank in joined:  # the others decide
            row[1 : len(table) + 1] = [self._known.runnable(table[n][1]) for n in range(len(table))]
        if self._ready:
            row[[number + 1 for number in self._ready]] = 1
        self._round_of(width)()
        numbers = np.flatnonzero(row[1 : len(table) + 1]).tolist()
        told = None if row[0] else self._comm.allgather_object(news)
        works = [self._work(table[n][1], self._ready.pop(n, None)) for n in numbers]
        table.used(numbers)
        if told is not None:
            works += self._apply(told)
        self._fruitless = 0 if works else self._fruitless + 1
        for work in works:
            if work.pending is not None:
                del self._held[work.pending.key]
        execute(works)
        return bool(works) or told is not None

    def _round_of(self, width: int) -> Callable[[], Any]:
        """Return what takes the smallest bytes of the ranks."""
        if width not in self._rounds:
            self._rounds[width] = self._comm.plan_allreduce(self._row[:width], op=cc.MIN)
        return self._rounds[width]

    def _place(self) -> list[News]:
        """Give every call a number, or tell it; returns what the others are told."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            news, self._news = self._news, []
        later = []
        for pending in fresh:
            number = self._known.table.find((cache_key(pending.key), pending.description))
            if pending.key in self._held or number in self._ready:
                later.append(pending)  # one by one
            elif number is None or pending.key in self._known.told:
                self._held[pending.key] = pending
                news.append(Ready(pending.key, pending.description))
            else:
                self._held[pending.key] = pending
                self._ready[number] = pending
        if later:
            with self._lock:
                self._fresh[:0] = later
        if self._fruitless:
            news += self._overdue()
        return news

    def _overdue(self) -> list[News]:
        """Say what has waited for so long that the others should know, or give it up."""
        now = time.monotonic()
        settings = self._comm.settings
        news: list[News] = []
        for number, pending in list(self._ready.items()):
            if now - pending.since > _TELL:
                del self._ready[number]
                news.append(Ready(pending.key, pending.description))
        for key in self._known.told:
            held = self._held.get(key)
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

    # What ranks have told; the same is done on all of them.

    def _apply(self, told: Sequence[Sequence[News]]) -> list[Response]:
        """Take in the news of all ranks; returns the calls that are ready now."""
        late = self._known.apply(told)
        for number, pending in list(self._ready.items()):
            if pending.key in self._known.told:  # tell it, too
                del self._ready[number]
                del self._held[pending.key]
                with self._lock:
                    self._fresh.insert(0, pending)
        self._on_joined()
        works = [self._decide(key, late=key in late) for key in list(self._known.told)]
        self._on_left()
        return [work for work in works if work is not None]

    def _decide(self, key: RequestKey, *, late: bool) -> Response | None:
        """Carry out a call that all ranks have told, or let it fail on all of them."""
        error, missing = self._known.error(key, late=late), self._known.missing(key)
        if error is None and missing:
            return None
        told = self._known.told.pop(key)
        if error is None:
            what, pending = told[min(told)], self._held.get(key)
            self._number((cache_key(key), what))
            return self._work(what, pending)
        if isinstance(error, cc.CollectiveTimeout) and self._comm.rank in missing:
            self._owed[key] = str(error)
        own = self._held.pop(key, None)
        if own is not None:
            own.fail(extend.collective_error(self._comm, error, min(told)))
        return None

    def _number(self, entry: CacheEntry) -> None:
        """Give a call a number, perhaps that of another one."""
        number = self._known.table.add(entry)
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
            self.unnamed = itertools.count()  # of which some ranks have made more calls
            if self._joining is not None:
                self._joining.succeed([last])
                self._joining = None

    def _on_left(self) -> None:
        if len(self._known.leaving) == self._comm.size:
            self._broken = cc.CollectiveError("shutdown was called")
            if self._shutdown is not None:
                self._shutdown.succeed([])

    def _break(self, error: BaseException) -> None:
        """Let all calls fail: the ranks are not in step any more."""
        with self._lock:
            if self._broken is None:
                self._broken = cc.CollectiveError(f"{type(error).__name__}: {error}")
            open_calls = {id(p): p for p in [*self._held.values(), *self._fresh]}
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
