"""Preemption: a stop signal on one rank stops all ranks at the same step.

Ranks that train in step agree at the end of a step, in a few bytes that a session exchanges there
anyway. They send no other messages. Ranks that are not in step, such as tasks of parameter servers,
send a message::

    rank 2   signal --> thread ----> note to ranks 0, 1, 3
    rank 0   ............................ thread: asked = True, read at the end of its own step

The signal handler only sets a flag and wakes the thread. Python calls it between two instructions
of the main thread, never inside MPI.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import collectives as cc
from collectives import extend
from strategies.core.validation import number
from strategies.elastic.surviving_ranks import retry_on_survivors

__all__ = ["STOPPED_EARLY", "Preemption", "accept_all", "is_accepted"]

_log = logging.getLogger(__name__)

STOPPED_EARLY = 85
"""Exit status of a job that stopped early and can resume; the scripts in `slurm/` check for it."""

_open: list[Preemption] = []  # open ones of this process


def _restore_signals_in_child() -> None:
    """Restore the former signal handlers in a forked child, such as a worker of a pool."""
    # In reverse order, because each one holds the handlers of the one before it.
    for each in reversed(_open):
        each.restore_signals()
    _open.clear()


extend.in_child(_restore_signals_in_child)

_NAP = 1.0  # seconds between checks of the thread without a wake-up
_NOTE = b"asked to stop"


class Preemption:
    """Handle SIGTERM and SIGUSR1, and let the job exit with status 85; use it with `with`.

    A `TrainingSession` opens one by default. Ranks without a session, or with other work beside it,
    open one around all of their work. The end of the block raises `SystemExit(85)` on all ranks if
    a session has stopped for a signal.

    If a cloud announces preemption by other means, call `request` from a thread that watches for
    it.

    Args:
        comm: ranks that notify each other of signals at any time. *Collective*: all ranks open and
            leave the block together. None for ranks in step, which agree in their sessions.
        signals: signals of this process to handle inside the block; in the main thread only.
        grace_seconds: guaranteed seconds between signal and termination. A session then saves at
            once, continues, and saves again before the time ends. None: the session saves and
            stops.

    Raises:
        ValueError: `grace_seconds` is not above 0; on opening, a signal is invalid.

    Attributes:
        asked: whether this rank received a signal, or was notified of another rank's.
        accepted: whether a session has stopped for a signal, after saving a checkpoint.
        grace_seconds: seconds, as passed.
        asked_at: time of the first request on this rank, by `time.monotonic`; None before.
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
        # The world is replaced after deaths, so the end of the block looks it up again.
        self._is_of_world = cc.is_initialized() and self._comm is cc.init()
        self._signals = tuple(dict.fromkeys(signals))
        self._before: dict[int, Any] = {}
        self._notes: _SignalThread | None = None

    def request(self) -> None:
        """Request a stop as a signal does; thread-safe, harmless when repeated."""
        if not self.asked:
            # The time first: a thread that sees `asked` reads `asked_at`.
            self.asked_at = time.monotonic()
            self.asked = True
        if self._notes is not None:
            self._notes.wake()

    def poll(self) -> None:
        """Record that another rank received a signal and that all ranks were notified."""
        if not self.asked:
            if self._notes is not None:
                # Before `asked`, so that the thread does not send notes of its own.
                self._notes.told = True
            self.asked_at = time.monotonic()
            self.asked = True

    def restore_signals(self, *, ignore: bool = False) -> None:
        """Restore the former signal handlers, or ignore the signals."""
        for each, before in self._before.items():
            # `signal.signal` returns None for a handler that C code installed, which Python cannot
            # restore.
            after = signal.SIG_DFL if before is None else before
            signal.signal(each, signal.SIG_IGN if ignore else after)
        self._before.clear()

    def acknowledge(self) -> None:
        """Record that a session saved a checkpoint and stopped; called by the session."""
        self.accepted = True

    def __enter__(self) -> Preemption:
        try:
            if self._comm is not None:
                # Before the handlers, which wake this thread.
                self._notes = _SignalThread(self._comm, self)
            # Python allows `signal.signal` in the main thread only.
            if threading.current_thread() is threading.main_thread():
                for each in self._signals:
                    self._before[each] = signal.signal(each, lambda *what: self.request())
        except BaseException:  # such as an invalid signal after a valid one
            self._stop_handling()
            raise
        _open.append(self)
        return self

    def _stop_handling(self, *, ignore: bool = False) -> None:
        # Before the channel is closed: a handler writes to its doorbell.
        self.restore_signals(ignore=ignore)
        if self._notes is not None:
            self._notes.close()
            self._notes = None

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop handling signals, and exit if a session has stopped for one.

        On exit the signals are ignored from then on. The batch system may signal nodes one after
        another, and a late signal must not kill a rank that is exiting with status 85.

        Raises:
            SystemExit: with status 85; on all surviving ranks.
        """
        leaves = False
        if self not in _open:  # a forked child
            return
        _open.remove(self)
        if self._is_of_world and cc.is_initialized():
            self._comm = cc.init()  # smaller if ranks have died
        try:
            # After an exception other ranks may not arrive, so nothing is shared.
            if kind is None and self._comm is not None:
                self._comm = retry_on_survivors(self._comm, self._share)
            leaves = kind is None and self.accepted
        finally:
            self._stop_handling(ignore=leaves)
        if leaves:
            cc.exit_all(STOPPED_EARLY)

    def _share(self, comm: cc.Communicator) -> None:
        """Agree on whether a session of any rank has stopped for a signal."""
        self.accepted = bool(comm.allreduce(int(self.accepted), op=cc.MAX))


def is_accepted() -> bool:
    """Return whether a session of this process has stopped for a signal."""
    return any(each.accepted for each in _open)


def accept_all() -> None:
    """Mark all open `Preemption` objects of a rank without a session as accepted."""
    for each in _open:
        each.acknowledge()


class _SignalThread(extend.BackgroundThread):
    """Notify the other ranks of a signal, and receive their notes."""

    def __init__(self, comm: cc.Communicator, preemption: Preemption) -> None:
        super().__init__("preemption")
        self._channel = extend.open_channel(comm)
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._preemption = preemption
        self.told = False  # whether any rank has notified all ranks
        self.start()

    def wake(self) -> None:
        """Wake the thread; safe in a signal handler."""
        self._channel.wake()

    _wake = wake

    def close(self) -> None:
        """Stop the thread and close its channel; harmless when repeated."""
        self.stop()
        self._channel.close()

    def stop_at_exit(self, timeout: float) -> None:
        """Close the channel before MPI is finalized, unless the thread is stuck in it."""
        # At least two naps, even if other threads have used up the time that all share at exit.
        if self.stop(max(timeout, 2 * _NAP)):
            self._channel.close()

    def _run(self) -> None:
        while not self._stopping:
            try:
                if self._channel.poll() is not None:
                    self.told = True  # the sender has notified all ranks
                    self._preemption.request()
                elif self._preemption.asked and not self.told:
                    self.told = True
                    for rank in self._others:
                        self._channel.send(rank, [_NOTE])
                self._channel.wait(_NAP)
            except cc.CollectiveError as error:
                _log.warning("preemption: other ranks cannot be told any more: %s", error)
                return
