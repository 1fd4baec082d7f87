"""Find out which named calls all ranks have made, and carry these out in one order.

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

Every process set has an engine of its own. A rank takes part in a round when it has a call that is
not carried out, or knows of one that others have made, in the thread that waits for one
(`Engine.wait`), or else in one of the engine's own. One that has none lets the others wait; who has
waited for too long says which ranks have not made the call, and the call fails on all.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

import collectives as cc
from strategies.horovod.execution import WITHOUT_JOINED, Pending, Work, carry_out
from strategies.horovod.table import Entry, Table, slot_of
from strategies.horovod.words import Description, Key, difference, label, refusals

__all__ = ["Engine"]

log = logging.getLogger(__name__)

# Seconds before the engine's thread begins a round: calls that a program makes one after the other
# are carried out together, and a thread that waits for its result is there first.
_DELAY = 0.001

# Seconds between rounds in which nothing was ready: the first pause and the longest.
_SHORTEST, _LONGEST = 50e-6, 0.001

# Seconds after which a call that is ready here, but not everywhere, is told with its description:
# from then on all ranks know who has made it, and see whether others mean another call by its key.
_TELL = 0.1

# How many calls have numbers, and how many of these fit in the shortest round, the next, and so on.
_MOST = 4095
_WIDTHS = (256, 1024, 4096)

_HANDED_OVER = 1.0  # seconds that the end of the program waits for the thread


class _Told(NamedTuple):
    """A call that this rank has made, with its description."""

    key: Key
    description: Description


class _Late(NamedTuple):
    """A call has waited for too long on this rank."""

    key: Key


class _Joined(NamedTuple):
    """This rank has no more data."""


class _Leaves(NamedTuple):
    """This rank has called `shutdown`."""


class Engine:
    """Carries out the named calls of a group of ranks.

    Args:
        comm: for the engine alone.

    Attributes:
        handles: of the calls that have names, for those that look for a name in use.
        unnamed: numbers for the others.
    """

    def __init__(self, comm: cc.Communicator) -> None:
        self.handles: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.unnamed = itertools.count()
        self._comm = comm
        self._row = comm.shared_empty(_WIDTHS[-1], np.uint8)
        self._rounds: dict[int, Callable[[], Any]] = {}  # by width
        # Held during a round.
        self._driving = threading.Lock()
        # Guards what follows until the next comment: it is changed by whoever makes a call.
        self._lock = threading.Lock()
        self._fresh: list[Pending] = []  # not in a round yet
        self._news: list[Any] = []
        self._waiting = 0  # threads in `wait`
        self._broken: Exception | None = None  # why there can be no more calls
        self._owed: dict[Key, str] = {}  # calls that have failed elsewhere, and how
        # Of this rank, changed in rounds.
        self._held: dict[Key, Pending] = {}
        self._ready: dict[int, Pending] = {}  # by number
        self._joining: Pending | None = None
        self._shutdown: Pending | None = None
        self._fruitless = 0
        # The same on all ranks.
        self._table = Table(_MOST)
        self._told: dict[Key, dict[int, Description]] = {}
        self._joined: list[int] = []
        self._leaving: list[int] = []

        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._threads_allowed = self._may_use_threads()
        _engines.add(self)

    def submit(self, pending: Pending, *, alone: bool) -> None:
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
            self._rouse()

    def wait(self, pending: Pending) -> None:
        """Take part in rounds until a call is carried out, or has failed."""
        with self._lock:
            self._waiting += 1
        pause = _SHORTEST
        try:
            while not pending.done:
                with self._driving:
                    fruitful = pending.done or self._round()
                if fruitful:
                    pause = _SHORTEST
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST)
        finally:
            with self._lock:
                self._waiting -= 1
            if self._busy():
                self._rouse()

    def join(self) -> int:
        """Take part without data until all ranks do; returns the last one to come."""
        for earlier in self.waiting():
            self.wait(earlier)
        pending = Pending(Key("join"), Description("join"))
        with self._lock:
            self._check_usable(pending)
            self._joining = pending
            self._news.append(_Joined())
        self.wait(pending)
        if pending.error is not None:
            raise pending.error
        return cast(int, pending.results[0])

    def leave(self) -> None:
        """Wait until all ranks leave, and end; *collective*. Calls of the others fail."""
        if self._broken is None:
            pending = Pending(Key("shutdown"), Description("shutdown"))
            with self._lock:
                self._shutdown = pending
                self._news.append(_Leaves())
            self.wait(pending)
        self.stop()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_HANDED_OVER)

    def waiting(self) -> list[Pending]:
        """Return the calls that are not carried out."""
        return [*self._held.values(), *self._fresh]

    def _may_use_threads(self) -> bool:
        """Whether a thread may take part in rounds; if not, waiting does."""
        if self._comm.sends_messages:
            try:
                self._comm.transport.check_threads("named calls")
            except cc.LaunchError:
                return False
        return True

    def _check_usable(self, pending: Pending) -> None:
        if self._broken is not None:
            raise cc.CollectiveError(
                f"{label(pending.key, pending.description)}: not carried out, since {self._broken}"
            )

    def _busy(self) -> bool:
        """Whether this rank wants to meet the others, or some of them wait for its call."""
        own = self._fresh or self._held or self._news or self._joining or self._shutdown
        return bool(own or self._told) and self._broken is None

    def _rouse(self) -> None:
        """Let the thread take part."""
        if self._thread is None and self._threads_allowed and not self._stopped:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="unisono-named-calls", daemon=True
                    )
                    self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            time.sleep(_DELAY)
            pause = _SHORTEST
            while self._busy() and not self._waiting and not self._stopped:
                with self._driving:
                    fruitful = self._round()
                pause = _SHORTEST if fruitful else min(2 * pause, _LONGEST)
                if not fruitful:
                    time.sleep(pause)

    # A round.

    def _round(self) -> bool:
        """Meet the other ranks once; tells whether anything came of it."""
        if self._broken is not None or not self._busy():
            return True
        try:
            return self._meet()
        except BaseException as error:
            self._break(error)
            if isinstance(error, cc.CollectiveError):
                return True
            raise

    def _meet(self) -> bool:
        news = self._place()
        width = next(w for w in _WIDTHS if w > len(self._table))
        row = self._row[:width]
        row[...] = 0
        row[0] = not news
        if self._comm.rank in self._joined:  # the others decide
            row[1 : len(self._table) + 1] = [
                self._possible(self._table[n][1]) for n in range(len(self._table))
            ]
        if self._ready:
            row[[number + 1 for number in self._ready]] = 1
        self._round_of(width)()
        numbers = np.flatnonzero(row[1 : len(self._table) + 1]).tolist()
        told = None if row[0] else self._comm.allgather_object(news)
        works = [self._work(self._table[n][1], self._ready.pop(n, None)) for n in numbers]
        self._table.used(numbers)
        if told is not None:
            works += self._hear(told)
        self._fruitless = 0 if works else self._fruitless + 1
        for work in works:
            if work.pending is not None:
                del self._held[work.pending.key]
        carry_out(works)
        return bool(works) or told is not None

    def _possible(self, what: Description) -> bool:
        """Whether a call can be carried out though ranks have joined."""
        return what.operation not in WITHOUT_JOINED and what.root not in self._joined

    def _round_of(self, width: int) -> Callable[[], Any]:
        """Return what takes the smallest bytes of the ranks."""
        if width not in self._rounds:
            self._rounds[width] = self._comm.plan_allreduce(self._row[:width], op=cc.MIN)
        return self._rounds[width]

    def _place(self) -> list[Any]:
        """Give every call a number, or tell it; returns what the others are told."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            news, self._news = self._news, []
        later = []
        for pending in fresh:
            number = self._table.find((slot_of(pending.key), pending.description))
            if pending.key in self._held or number in self._ready:
                later.append(pending)  # one by one
            elif number is None or pending.key in self._told:
                self._held[pending.key] = pending
                news.append(_Told(pending.key, pending.description))
            else:
                self._held[pending.key] = pending
                self._ready[number] = pending
        if later:
            with self._lock:
                self._fresh[:0] = later
        if self._fruitless:
            news += self._overdue()
        return news

    def _overdue(self) -> list[Any]:
        """Say what has waited for so long that the others should know, or give it up."""
        now = time.monotonic()
        settings = self._comm.settings
        news: list[Any] = []
        for number, pending in list(self._ready.items()):
            if now - pending.since > _TELL:
                del self._ready[number]
                news.append(_Told(pending.key, pending.description))
        for key, told in self._told.items():
            held = self._held.get(key)
            if held is None or key in self._owed:
                continue
            age = now - held.since
            if age > settings.timeout:
                news.append(_Late(key))
            elif age > settings.stall_warning and not held.warned:
                held.warned = True
                log.warning(
                    "[%d/%d] %s has waited for %.0f s; not called by %s",
                    self._comm.rank, self._comm.size, label(key, held.description), age,
                    self._comm.name(*self._missing(told)),
                )  # fmt: skip
        return news

    # What ranks have told; the same is done on all of them.

    def _hear(self, told: Sequence[Sequence[Any]]) -> list[Work]:
        """Take in the news of all ranks; returns the calls that are ready now."""
        late: dict[Key, None] = {}
        for rank, news in enumerate(told):
            for item in news:
                if isinstance(item, _Told):
                    self._told.setdefault(item.key, {})[rank] = item.description
                elif isinstance(item, _Late):
                    late[item.key] = None
                elif isinstance(item, _Joined):
                    self._joined.append(rank)
                else:
                    self._leaving.append(rank)
        for number, pending in list(self._ready.items()):
            if pending.key in self._told:  # tell it, too
                del self._ready[number]
                del self._held[pending.key]
                with self._lock:
                    self._fresh.insert(0, pending)
        self._have_joined()
        works = [self._decide(key, late=key in late) for key in list(self._told)]
        self._have_left()
        return [work for work in works if work is not None]

    def _decide(self, key: Key, *, late: bool) -> Work | None:
        """Carry out a call that all ranks have told, or let it fail on all of them."""
        told = self._told[key]
        missing = self._missing(told)
        name = self._comm.name
        first = told[min(told)]
        here = label(key, first)
        gone = [rank for rank in missing if rank in self._leaving]
        joined = [] if self._possible(first) else [r for r in self._joined if r not in told]
        error: Exception | None = None
        if (refused := refusals(told, name)) is not None and not missing:
            error = cc.MismatchError(f"{here}: {refused}")
        elif gone:
            error = cc.CollectiveError(f"{here}: {name(*gone)} has called shutdown before")
        elif joined:
            error = cc.MismatchError(f"{here}: not possible after {name(*joined)} joined")
        elif missing and late:
            limit = self._comm.settings.timeout
            error = cc.CollectiveTimeout(
                f"{here}: not called by {name(*missing)} within {limit:g} s"
            )
            if self._comm.rank in missing:
                self._owed[key] = str(error)
        elif missing:
            return None
        elif (differs := difference(told, name)) is not None:
            error = cc.MismatchError(f"{here}: {differs}")
        del self._told[key]
        if error is None:
            pending = self._held.get(key)
            self._number((slot_of(key), first))
            return self._work(first, pending)
        own = self._held.pop(key, None)
        if own is not None:
            own.fail(self._comm.raised_by_all(error, min(told)))
        return None

    def _missing(self, told: dict[int, Description]) -> list[int]:
        """Return the ranks that have not made a call, and have to."""
        return [r for r in range(self._comm.size) if r not in told and r not in self._joined]

    def _number(self, entry: Entry) -> None:
        """Give a call a number, perhaps that of another one."""
        number = self._table.add(entry)
        replaced = self._ready.pop(number, None)
        if replaced is not None:
            del self._held[replaced.key]
            with self._lock:
                self._fresh.insert(0, replaced)

    def _work(self, what: Description, pending: Pending | None) -> Work:
        return Work(what, pending, self._comm, len(self._joined))

    def _have_joined(self) -> None:
        if len(self._joined) == self._comm.size:
            last = self._joined[-1]
            self._joined.clear()
            self.unnamed = itertools.count()  # of which some ranks have made more calls
            if self._joining is not None:
                self._joining.succeed([last])
                self._joining = None

    def _have_left(self) -> None:
        if len(self._leaving) == self._comm.size:
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

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """End the threads before the interpreter does."""
    for engine in list(_engines):
        engine.stop()
