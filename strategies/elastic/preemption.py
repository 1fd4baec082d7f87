"""Preemption: a stop signal on one rank stops all ranks at the same step.

Ranks that train in step agree at the end of a step, in the few bytes that a session exchanges
there anyway; no word of it travels in between. Ranks that are not in step, such as tasks of
parameter servers, are told by a message::

    rank 2   signal --> thread ----> note to ranks 0, 1, 3
    rank 0   ............................ thread: asked = True, read at the end of its own step

A signal handler does nothing but set a flag: Python calls it between two instructions of the
main thread, not inside of MPI.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import collectives as cc
from collectives import extend
from strategies.core.validation import number
from strategies.elastic.surviving_ranks import retry_on_survivors

__all__ = ["STOPPED_EARLY", "Preemption", "accept_all", "is_accepted"]

_log = logging.getLogger(__name__)

STOPPED_EARLY = 85
"""Exit status of a job that was asked to stop and can go on; the scripts in `slurm/` know it."""

_open: list[Preemption] = []  # those of this process that are in their blocks


def _restore_signals_in_child() -> None:
    """Restore the former signal handlers in a forked child, such as a worker of a pool."""
    for each in reversed(_open):
        each.restore_signals()
    _open.clear()


os.register_at_fork(after_in_child=_restore_signals_in_child)

_NAP = 1.0  # seconds between two looks of the thread, whatever wakes it
_NOTE = b"asked to stop"


class Preemption:
    """Hears of SIGTERM and SIGUSR1, and lets the job leave with status 85; to be used with `with`.

    A `TrainingSession` makes one for itself. Ranks that take no part in a session, or do so beside
    other work, open one around all of it: the block's end raises `SystemExit(85)` on all ranks if
    a session has stopped for a signal.

    Where a cloud says by other means that a machine will go, a thread that watches for it calls
    `request`.

    Args:
        comm: ranks that are told of each other's signals at any time. *Collective*: all of them
            open it and leave it together. None for ranks that meet in a session in step: it tells
            them.
        signals: of this process, for the time of the block; in the main thread alone.
        grace_seconds: how long after the signal the machine is there for certain. A session then
            saves at once, goes on, and saves again in time to leave. None: it saves and leaves.

    Raises:
        ValueError: seconds that are not above 0.

    Attributes:
        asked: whether this rank was asked to stop, or has been told of another one that was.
        accepted: whether a session has stopped for it, with a checkpoint to go on from.
        grace_seconds: as given.
        asked_at: when this rank heard of it first, by `time.monotonic`; None before.
    """

    def __init__(
        self,
        comm: cc.Communicator | None = None,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        grace_seconds: float | None = None,
    ) -> None:
        if grace_seconds is not None:
            number("Preemption", "grace_seconds", grace_seconds)
        self.grace_seconds = grace_seconds
        self.asked = self.accepted = False
        self.asked_at: float | None = None
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._is_of_world = cc.is_initialized() and self._comm is cc.init()
        self._signals = tuple(signals)
        self._before: dict[int, Any] = {}
        self._notes: _SignalThread | None = None

    def request(self) -> None:
        """Do as if a signal had come; from any thread, harmless when repeated."""
        if not self.asked:
            self.asked_at = time.monotonic()
            self.asked = True
        if self._notes is not None:
            self._notes.wake()

    def poll(self) -> None:
        """Know that another rank was asked to stop, which all others hear of, too."""
        if not self.asked:
            if self._notes is not None:
                self._notes.told = True
            self.asked_at = time.monotonic()
            self.asked = True

    def restore_signals(self, *, ignore: bool = False) -> None:
        """Restore the former signal handlers, or ignore the signals."""
        for each, before in self._before.items():
            after = signal.SIG_DFL if before is None else before
            signal.signal(each, signal.SIG_IGN if ignore else after)
        self._before.clear()

    def acknowledge(self) -> None:
        """Say that a checkpoint was written for it; what a session does."""
        self.accepted = True

    def __enter__(self) -> Preemption:
        if self._comm is not None:
            self._notes = _SignalThread(self._comm, self)
        if threading.current_thread() is threading.main_thread():
            for each in self._signals:
                self._before[each] = signal.signal(each, lambda *what: self.request())
        _open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take signals no longer, and leave the program if a session has stopped for one.

        From there on they are ignored: the batch system may tell nodes one after the other, and a
        signal that comes late must not end a rank that is leaving, and with it the status.

        Raises:
            SystemExit: with status 85; on all ranks that live.
        """
        leaves = False
        if self not in _open:  # a forked child
            return
        _open.remove(self)
        if self._is_of_world and cc.is_initialized():
            self._comm = cc.init()  # a smaller one, where ranks have died
        try:
            if kind is None and self._comm is not None:
                self._comm = retry_on_survivors(self._comm, self._share)
            leaves = kind is None and self.accepted
        finally:
            self.restore_signals(ignore=leaves)
            if self._notes is not None:
                self._notes.close()
                self._notes = None
        if leaves:
            cc.exit_all(STOPPED_EARLY)

    def _share(self, comm: cc.Communicator) -> None:
        """Learn whether a session of any rank has stopped for a signal."""
        self.accepted = bool(comm.allreduce(int(self.accepted), op=cc.MAX))


def is_accepted() -> bool:
    """Tell whether a session of this process has stopped for a signal."""
    return any(each.accepted for each in _open)


def accept_all() -> None:
    """Say so for a rank that has no session, of which others have stopped."""
    for each in _open:
        each.acknowledge()


class _SignalThread:
    """The thread that tells other ranks, and hears from them."""

    def __init__(self, comm: cc.Communicator, preemption: Preemption) -> None:
        self._channel = extend.open_channel(comm)
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._preemption = preemption
        self._closing = False
        self.told = False  # whether others are told, by whomever
        self._thread = threading.Thread(target=self._run, name="preemption", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # MPI ends after this: the thread must not be inside it then

    def wake(self) -> None:
        """Look now; also from a signal handler."""
        self._channel.wake()

    def close(self) -> None:
        """End the thread; harmless when repeated."""
        atexit.unregister(self.close)
        self._closing = True
        self._channel.wake()
        self._thread.join()
        self._channel.close()

    def _run(self) -> None:
        while not self._closing:
            try:
                if self._channel.poll() is not None:
                    self.told = True  # whoever sent it has told all
                    self._preemption.request()
                elif self._preemption.asked and not self.told:
                    self.told = True
                    for rank in self._others:
                        self._channel.send(rank, [_NOTE])
                self._channel.wait(_NAP)
            except cc.CollectiveError as error:
                _log.warning("preemption: other ranks cannot be told any more: %s", error)
                return
