"""Failure detector between nodes: asks a silent rank for its state.

A rank that has waited for a moment sends a question to the rank that it waits for. That rank keeps
the question until it can answer:

    rank 0 waits for 1        rank 1 waits for 2          rank 2 has ended its program
    asks 1                    asks 2                      stays, and answers
                              fails, and answers 0
    fails

A rank that computes does not answer. While it compiles, a separate thread answers if MPI allows
calls from several threads. A waiting rank answers with the rank that it waits for, so that a rank
at its deadline can follow the chain to the rank that blocks all others. A rank that fails because
another rank has ended propagates the reason. A rank that has ended its program stays until all
ranks have ended, and answers.

Questions name the communicator in which the asking rank waits; waits in other communicators do not
count.

Cost: nothing for operations shorter than a tenth of a second. Per awaited rank and communicator,
one message of 8 bytes during the program, and few answers. At the end one nonblocking barrier, or
P messages to and from each rank after a death.

If the job continues after a death (`collectives.transport.ulfm`), the surviving ranks also wait
for each other here: each rank notifies all other ranks of its arrival. In such a job a failing rank
sends its exit status to all other ranks, which exit with the same status.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives.core import compile_time
from collectives.core.background_threads import BackgroundThread
from collectives.core.process_hooks import ExitStage, at_exit
from collectives.transport import backoff, liveness
from collectives.transport.backoff import Backoff, RankSet
from collectives.transport.mpi_messages import MpiEndpoint, MpiRequest

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

__all__ = ["MeetingState", "Departure", "FailureDetector", "current", "install", "next_key"]

_ASK, _TELL, _COME, _FAIL = 1, 2, 3, 4  # tags
_QUESTION = struct.Struct("q")  # key of the communicator; with _FAIL the exit status
_ANSWER = struct.Struct("qqq")  # key, kind, world rank or seconds; a text follows
# Kinds: the rank has ended its program; the sender waits for the rank; the sender has compiled for
# a number of seconds, in the field of the rank.
_ENDED, _WAITS, _COMPILES = 0, 1, 2
_TEXT_BYTES = 200

# Key of an answer that is valid in all communicators, and of the meeting at the end. Keys of
# communicators start at 1.
_EVERYWHERE = 0

# Seconds between the news that a rank has ended and the end of the wait for that rank: its earlier
# messages use another path and may arrive after the news.
_GRACE = 0.5

# A waiting rank polls ten times a second. So it answers within this number of seconds, and its
# statement about itself is valid as long.
_ANSWERS_WITHIN = 0.3

# Seconds between two polls of the thread that answers while this process compiles.
_LOOK_WHILE_COMPILING = 0.1

# Seconds for MPI to send the status of a failing rank: the first message between two nodes opens a
# connection.
_SEND_WITHIN = 0.5

# Seconds that the surviving ranks wait for each other at the end if a rank has failed.
_MEET_WITHIN = 5.0

_LONGEST_CHAIN = 8
_LOOK_AGAIN = 0.002


class Departure(NamedTuple):
    """Departure of a rank of the world.

    Attributes:
        rank: number of the rank in the world.
        text: description: "has ended its program (after allreduce #2 at train.py:5)".
        heard: when this rank received the news, by the monotonic clock.
    """

    rank: int
    text: str
    heard: float


class MeetingState(NamedTuple):
    """State of a meeting.

    Attributes:
        dead: world ranks that have died.
        come: world ranks that have arrived.
    """

    dead: set[int]
    come: set[int]


class _AnsweringThread(BackgroundThread):
    """Thread that answers ten times a second while this process compiles.

    Args:
        answer: answers the questions so far; returns False after the end of the program.
    """

    def __init__(self, answer: Callable[[], bool]) -> None:
        super().__init__("answers-while-compiling")
        self._answer = answer

    def _run(self) -> None:
        while not self._stopping and self._answer():
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, _LOOK_WHILE_COMPILING)


class FailureDetector(RankSet):
    """Questions and answers among all processes of a job; from any thread that may use MPI.

    Args:
        world: all processes; *collective*.
        last_call: describes the last call of this rank: "after allreduce #2 at train.py:5".
    """

    def __init__(self, world: MPI.Comm, last_call: Callable[[], str]) -> None:
        self.endpoint = MpiEndpoint(world)
        self.status: MPI.Status | None = None  # None: a probe gives lengths, so no check
        self._mpi = self._last = self.endpoint.mpi
        self._error = MPI.Exception
        self.rank = self._mpi.Get_rank()
        self.size = self._mpi.Get_size()
        self._process = os.getpid()
        self._last_call = last_call
        self._lock = threading.Lock()
        self._asked: dict[tuple[int, int], float] = {}  # (asked rank, key) -> time of the question
        self._asking: set[tuple[int, int]] = set()  # (asking rank, key)
        self._news: dict[tuple[int, int], Departure] = {}  # by sender and key
        self._awaits: dict[tuple[int, int], int] = {}  # (sender, key) -> the sender's awaited rank
        self._waiting: dict[int, tuple[int, float]] = {}  # key -> awaited rank, last poll
        self._failed: dict[int, Departure] = {}  # key -> reason why this rank no longer waits
        self._end: Departure | None = None  # of this rank's program
        self._come: set[tuple[int, int]] = set()  # (rank, key) that have arrived at a meeting
        self._failed_ranks: set[int] = set()  # their exit status was received
        self._compiling: dict[int, tuple[int, float]] = {}  # rank -> seconds, time of the answer
        self._compiles_since = 0.0  # start in this process; 0 while it does not compile
        self._answering: _AnsweringThread | None = None  # while this process compiles

    @property
    def is_mine(self) -> bool:
        """Whether this process is the rank, not a forked child of the rank."""
        return os.getpid() == self._process

    def probe(self, key: int, peers: Sequence[int]) -> Departure | None:
        """Ask each awaited rank once, and answer the questions of other ranks.

        Args:
            key: key of the communicator in which this rank waits.
            peers: awaited ranks.

        Returns:
            The departure that keeps an awaited rank from arriving, or None.
        """
        if not self.is_mine:
            return None
        with self._lock:
            self._note(key, peers)
            for peer in peers:
                if (peer, key) not in self._asked:
                    self._ask(peer, key)
            for peer in peers:
                if (news := self._departure_of(peer, key)) is not None:
                    self._fail(key, news)
                    return news
        return None

    def join_meeting(self, key: int, peers: Sequence[int]) -> None:
        """Notify ranks that this rank has arrived at the meeting of a communicator."""
        with self._lock:
            for peer in peers:
                self._send(_QUESTION.pack(key), peer, _COME)

    def meeting_state(self, key: int) -> MeetingState:
        """Return the dead ranks, and the ranks that have arrived at a meeting."""
        with self._lock:
            self._take()
            dead = self.endpoint.dead()
            return MeetingState(set(dead), {rank for rank, of in self._come if of == key})

    def send_failure(self, status: int) -> None:
        """Send the exit status of this failing rank to all other ranks."""
        if not self.is_mine:
            return
        with self._lock:
            for rank in range(self.size):
                if rank != self.rank:
                    self._send(_QUESTION.pack(status), rank, _FAIL)
        backoff.poll_until(self._all_sent, _SEND_WITHIN, _LOOK_AGAIN)

    def failed(self) -> set[int]:
        """Return the ranks that have sent the exit status of a failure."""
        with self._lock:
            self._take()
            return set(self._failed_ranks)

    def _all_sent(self) -> bool:
        with self._lock:
            self._take()
            return not self.endpoint.live

    def fail(self, key: int, rank: int, how: str) -> None:
        """Propagate the departure of `rank` to the ranks that wait for this rank.

        Args:
            key: key of the communicator.
            rank: world number of the departed rank.
            how: description, as in `Departure`.
        """
        if self.is_mine:
            with self._lock:
                self._take()
                self._fail(key, Departure(rank, how, time.monotonic()))

    def _fail(self, key: int, news: Departure) -> None:
        self._failed[key] = news
        self._tell_all(key, news)

    def answer_while_compiling(self) -> None:
        """Enable answers from another thread while this process compiles, if MPI allows it."""
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            compile_time.keep_noted(self)

    def note_preparation(self, since: float) -> None:
        """Start or stop the thread that answers while this process compiles."""
        if not self.is_mine:
            return
        self._compiles_since = since
        if since:
            self._answering = _AnsweringThread(self._answer)
            self._answering.start()
        elif self._answering is not None:
            self._answering.stop(_ANSWERS_WITHIN)  # short, because it never waits for another rank
            self._answering = None

    def _answer(self) -> bool:
        """Answer questions from another thread; return False after the end of the program."""
        # Ignore deaths here: the compiling thread detects them in its next call.
        with contextlib.suppress(RuntimeError), self._lock:
            self._take()
        return self._end is None

    def compile_seconds(self) -> dict[int, int]:
        """Return the compile times, in seconds, that world ranks have reported recently."""
        with self._lock:
            self._take()
            now = time.monotonic()
            return {
                rank: seconds
                for rank, (seconds, heard) in self._compiling.items()
                if now - heard < 2 * _ANSWERS_WITHIN
            }

    def wait_chain(self, key: int, peers: Sequence[int]) -> list[int]:
        """Return the chain of waits: the rank that this rank awaits, that rank's awaited rank, ...

        The chain ends at a rank that does not answer. Takes some tenths of a second.
        """
        found = list(peers[:1])
        while found and len(found) < _LONGEST_CHAIN:
            following = self._ask_again(found[-1], key, peers)
            if following is None or following in (self.rank, *found):
                break
            found.append(following)
        return found

    def serve_until_exit(self) -> None:
        """Answer questions until all ranks have ended their programs; harmless when repeated.

        Call it at the end of the program, before MPI is finalized.
        """
        if self._end is not None or not self.is_mine or MPI.Is_finalized():
            return
        with self._lock:
            how = f"has ended its program ({self._last_call()})"
            self._end = Departure(self.rank, how, time.monotonic())
            self._take()
            self._tell_all(None, self._end)
        if liveness.is_disarmed():
            self._meet_at_end()
            return
        try:
            together = self._last.Ibarrier()
            wait = Backoff()
            while not together.Test():
                with self._lock:
                    self._take()
                if wait.pause():
                    liveness.check_before_exit()
        except self._error:  # a rank has died, perhaps unnoticed until now
            if self.failed():
                self._meet_at_end(_MEET_WITHIN)
            liveness.arm()
            liveness.prepare_exit()

    def _meet_at_end(self, limit: float = math.inf) -> None:
        """Wait until all ranks have ended their programs or died; then exit soon.

        By messages, because MPI's barrier fails with dead ranks.

        Args:
            limit: most seconds to wait.
        """
        others = set(range(self.size)) - {self.rank}
        self.join_meeting(_EVERYWHERE, sorted(others))
        wait, give_up = Backoff(), time.monotonic() + limit
        while (
            not others <= set.union(*self.meeting_state(_EVERYWHERE)) and time.monotonic() < give_up
        ):
            wait.pause()
        liveness.fire_soon()

    def _departure_of(self, peer: int, key: int) -> Departure | None:
        """Return why a rank will not arrive: it has ended some time ago, or awaits one that has."""
        if (peer, key) in self._news:
            return self._news[peer, key]
        own = self._news.get((peer, _EVERYWHERE))
        if own is None:
            return None
        since = max(own.heard, self._asked[peer, key])
        return own if time.monotonic() - since > _GRACE else None

    def _note(self, key: int, peers: Sequence[int]) -> None:
        """Record the awaited rank, and receive questions and answers."""
        if peers:
            self._waiting[key] = peers[0], time.monotonic()
        self._take()

    def _take(self) -> None:
        """Receive questions and answers, and answer what can be answered now."""
        for message in list(self.endpoint.live):
            message.done()
        for source, question in self._messages(_ASK):
            (key,) = _QUESTION.unpack(question)
            self._asking.add((source, key))
            ended = self._failed.get(key) or self._end
            awaited, since = self._waiting.get(key, (0, -_ANSWERS_WITHIN))
            if ended is not None:
                self._tell(source, key, _ENDED, ended.rank, ended.text)
            elif time.monotonic() - since < _ANSWERS_WITHIN:
                self._tell(source, key, _WAITS, awaited)
            elif compiles_since := self._compiles_since:
                self._tell(source, key, _COMPILES, int(time.monotonic() - compiles_since))
        for source, question in self._messages(_COME):
            self._come.add((source, *_QUESTION.unpack(question)))
        for source, question in self._messages(_FAIL):
            self._failed_ranks.add(source)
            liveness.note_failure(*_QUESTION.unpack(question))
        for source, answer in self._messages(_TELL):
            key, kind, rank = _ANSWER.unpack_from(answer)
            if kind == _WAITS:
                self._awaits[source, key] = rank
            elif kind == _COMPILES:
                self._compiling[source] = rank, time.monotonic()
            else:
                key = _EVERYWHERE if source == rank else key
                text = answer[_ANSWER.size :].decode(errors="replace")
                self._news.setdefault((source, key), Departure(rank, text, time.monotonic()))

    def _messages(self, tag: int) -> list[tuple[int, bytes]]:
        """Return the received messages of a tag, with their sources."""
        found = []
        try:
            while (taken := self.endpoint.take(tag)) is not None:
                found.append((taken[0], taken[1].tobytes()))
        except RuntimeError:
            # A rank has died. MPI receives from other ranks again once the death is acknowledged.
            with contextlib.suppress(NotImplementedError, self._error):
                self._mpi.Ack_failed()
        return found

    def _ask(self, peer: int, key: int) -> None:
        self._asked[peer, key] = time.monotonic()
        self._send(_QUESTION.pack(key), peer, _ASK)

    def _ask_again(self, peer: int, key: int, peers: Sequence[int]) -> int | None:
        """Return the rank that a rank awaits; None without an answer in time."""
        with self._lock:
            self._awaits.pop((peer, key), None)
            self._ask(peer, key)
        backoff.poll_until(
            lambda: self._has_answered(peer, key, peers), _ANSWERS_WITHIN, _LOOK_AGAIN
        )
        return self._awaits.get((peer, key))

    def _has_answered(self, peer: int, key: int, peers: Sequence[int]) -> bool:
        """Return whether a rank has reported its awaited rank; also answer questions."""
        with self._lock:
            self._note(key, peers)
            return (peer, key) in self._awaits

    def _tell_all(self, key: int | None, news: Departure) -> None:
        """Send a departure to the ranks that have asked, in one communicator or in all."""
        for rank, asked in self._asking:
            if key in (None, asked):
                self._tell(rank, asked, _ENDED, news.rank, news.text)

    def _tell(self, dest: int, key: int, kind: int, rank: int, text: str = "") -> None:
        self._send(_ANSWER.pack(key, kind, rank) + text.encode()[:_TEXT_BYTES], dest, _TELL)

    def _send(self, text: bytes, dest: int, tag: int) -> None:
        data = np.frombuffer(text, np.uint8)
        MpiRequest(self, data, dest, "receive").start(self._mpi.Isend, tag)

    def lost(self, message: MpiRequest, error: RuntimeError) -> bool:
        """Drop a message to a dead rank."""
        return message.give_up()


current: FailureDetector | None = None
_outlives_ranks = False
_attribute = 0  # key of an attribute of MPI_COMM_SELF
_keys = 1


def install(world: MPI.Comm, last_call: Callable[[], str], outlives_ranks: bool = False) -> None:
    """Enable answers to other ranks; *collective*, harmless when repeated.

    At the end of its program a rank stays until all other ranks have ended theirs, as in
    `MPI_Finalize`. If the program itself calls `MPI_Finalize`, the rank stays there.

    Args:
        world: all processes.
        last_call: as for `FailureDetector`.
        outlives_ranks: whether the job continues when a rank dies.
    """
    global current, _outlives_ranks, _attribute
    if current is None and world.Get_size() > 1:
        current, _outlives_ranks = FailureDetector(world, last_call), outlives_ranks
        # MPI_Finalize first deletes the attributes of this communicator.
        _attribute = MPI.Comm.Create_keyval(delete_fn=_serve_until_exit)
        MPI.COMM_SELF.Set_attr(_attribute, True)


def next_key(agree: Callable[[int], int]) -> int:
    """Return a key for a new communicator: equal on its ranks, and new on each of them.

    Args:
        agree: returns the maximum of a number over the ranks.
    """
    global _keys
    key = agree(_keys)
    _keys = key + 1
    return key


def _serve_until_exit(*_: Any) -> None:
    if current is not None:
        current.serve_until_exit()


def _at_exit() -> None:
    if current is None or not current.is_mine:
        return
    if not MPI.Is_finalized():
        liveness.prepare_exit()
        MPI.COMM_SELF.Delete_attr(_attribute)  # stays here; Python code cannot run later
        # If a rank is killed in MPI_Finalize, the other ranks do not always return from it (in 1 of
        # 14 runs of 3 ranks on busy cores).
        if _outlives_ranks:
            liveness.arm_for_finalize()


at_exit(ExitStage.FAILURE_DETECTOR, _at_exit)
