"""Failure detector between nodes: asks a silent rank for its state.

A rank that has waited for a moment asks the one that it waits for. That one keeps the question
until it has something to tell:

    rank 0 waits for 1        rank 1 waits for 2          rank 2 has ended its program
    asks 1                    asks 2                      stays, and tells who asks
                              fails, tells who asked
    fails

A rank that computes tells nothing. While it compiles, a thread of its own says so, if MPI allows
calls from several threads. A rank that waits itself says for whom, so that a rank whose time
is over follows the chain to the one that everybody waits for. One that fails, because another has
ended, passes the news on. One that has ended its program stays until all have, and answers.

Questions name the communicator in which the asking rank waits: others do not count.

Cost: nothing for operations that take less than a tenth of a second. Per rank that is waited for,
and communicator, one message of 8 bytes in the life of a program, and few answers; at the end a
barrier that does not block, or P messages to and from each rank where some have died.

Where those that live go on after a death (`collectives.transport.ulfm`), they meet here, too:
who has come says so to all others. In such a job a rank that fails sends its exit status to all
other ranks, which exit with it.
"""

from __future__ import annotations

import atexit
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
from collectives.transport import backoff, liveness
from collectives.transport.backoff import Backoff, RankSet
from collectives.transport.mpi_messages import MpiEndpoint, MpiRequest

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MeetingState", "Departure", "FailureDetector", "current", "install", "next_key"]

_ASK, _TELL, _COME, _FAIL = 1, 2, 3, 4  # tags
_QUESTION = struct.Struct("q")  # key of the communicator; with _FAIL the exit status
_ANSWER = struct.Struct("qqq")  # key, kind, rank of the world; a text follows
# Kinds: this rank has ended its program; the teller waits for this rank; the teller has compiled
# for so many seconds, which stand in place of the rank.
_ENDED, _WAITS, _COMPILES = 0, 1, 2
_TEXT_BYTES = 200

# The key of an answer that holds in all communicators, and of the meeting at the end; those of
# communicators begin with 1.
_EVERYWHERE = 0

# Seconds between the news that a rank has ended and the end of the wait for it: what it sent before
# may come later than the news, which take another way.
_GRACE = 0.5

# A rank that waits looks ten times a second: within so many seconds it has answered, and so long
# holds what it said of itself.
_ANSWERS_WITHIN = 0.3

# Seconds between two looks of the thread that answers while this process compiles.
_LOOK_WHILE_COMPILING = 0.1

# Seconds for MPI to send the status of a failing rank: the first message between two nodes opens a
# connection.
_SEND_WITHIN = 0.5

# Seconds that the surviving ranks wait for each other at the end if a rank has failed.
_MEET_WITHIN = 5.0

_LONGEST_CHAIN = 8
_LOOK_AGAIN = 0.002


class Departure(NamedTuple):
    """That a rank of the world has left.

    Attributes:
        rank: its number in the world.
        text: how: "has ended its program (after allreduce #2 at train.py:5)".
        heard: when this rank heard of it, by the monotonic clock.
    """

    rank: int
    text: str
    heard: float


class MeetingState(NamedTuple):
    """Who is at a meeting.

    Attributes:
        dead: ranks of the world that have died.
        come: those that have come.
    """

    dead: set[int]
    come: set[int]


class FailureDetector(RankSet):
    """Questions and answers among all processes of a job; from any thread that may use MPI.

    Args:
        world: all processes; *collective*.
        last_call: tells what this rank did last: "after allreduce #2 at train.py:5".
    """

    def __init__(self, world: MPI.Comm, last_call: Callable[[], str]) -> None:
        from mpi4py import MPI

        self.endpoint = MpiEndpoint(world)
        self.status: MPI.Status | None = None  # lengths are those that were sent
        self._mpi = self._last = self.endpoint.mpi
        self._error = MPI.Exception
        self.rank = self._mpi.Get_rank()
        self.size = self._mpi.Get_size()
        self._process = os.getpid()
        self._last_call = last_call
        self._lock = threading.Lock()
        self._asked: dict[tuple[int, int], float] = {}  # (rank, key) that this rank has asked, when
        self._asking: set[tuple[int, int]] = set()  # (rank, key) that have asked this one
        self._news: dict[tuple[int, int], Departure] = {}  # by teller and key
        self._awaits: dict[tuple[int, int], int] = {}  # (teller, key) -> whom the teller waits for
        self._waiting: dict[int, tuple[int, float]] = {}  # key -> whom this rank waits for, when
        self._failed: dict[int, Departure] = {}  # key -> why this rank waits no more
        self._end: Departure | None = None  # of this rank's program
        self._come: set[tuple[int, int]] = set()  # (rank, key) that have come to a meeting
        self._failed_ranks: set[int] = set()  # their exit status was received
        self._compiling: dict[int, tuple[int, float]] = {}  # rank -> seconds so far, when heard
        self._compiles_since = 0.0  # this process; 0 if it does not
        self._compiled = threading.Event()  # ends the thread that answers until then
        self._answering: threading.Thread | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this process is the rank, not a forked child of it."""
        return os.getpid() == self._process

    def probe(self, key: int, peers: Sequence[int]) -> Departure | None:
        """Ask the ranks that this one waits for, once, and answer who asks this one.

        Args:
            key: of the communicator in which this rank waits.
            peers: the ranks that it waits for.

        Returns:
            Why one of them will not come.
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
        """Tell ranks that this one has come to the meeting of a communicator."""
        with self._lock:
            for peer in peers:
                self._send(_QUESTION.pack(key), peer, _COME)

    def meeting_state(self, key: int) -> MeetingState:
        """Return the ranks that have come to a meeting, and those that never will."""
        with self._lock:
            self._take()
            dead = self.endpoint.dead()
            return MeetingState(set(dead), {rank for rank, of in self._come if of == key})

    def send_failure(self, status: int) -> None:
        """Send the exit status of this rank, which fails, to all other ranks."""
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
        """Tell those who wait for this rank that it waits no more, since another one has left.

        Args:
            key: of the communicator.
            rank: who has left, by its number in the world.
            how: as in `Departure`.
        """
        if self.is_mine:
            with self._lock:
                self._take()
                self._fail(key, Departure(rank, how, time.monotonic()))

    def _fail(self, key: int, news: Departure) -> None:
        self._failed[key] = news
        self._tell_all(key, news)

    def answer_while_compiling(self) -> None:
        """From now on, answer from another thread while this process compiles, if MPI allows it."""
        from mpi4py import MPI

        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            compile_time.keep_noted(self)

    def note_preparation(self, since: float) -> None:
        """Start or end the thread that answers while this process compiles."""
        if not self.is_mine:
            return
        self._compiles_since = since
        if since:
            self._compiled.clear()
            self._answering = threading.Thread(
                target=self._answer_while_compiling, name="answers-while-compiling", daemon=True
            )
            self._answering.start()
        elif self._answering is not None:
            self._compiled.set()
            self._answering.join(_ANSWERS_WITHIN)  # it never waits for another rank
            self._answering = None

    def _answer_while_compiling(self) -> None:
        while not self._compiled.wait(_LOOK_WHILE_COMPILING) and self._end is None:
            # A death is for the thread that compiles to find, in its next call.
            with contextlib.suppress(RuntimeError), self._lock:
                self._take()

    def compile_seconds(self) -> dict[int, int]:
        """Return for how long ranks of the world have compiled that said so a moment ago."""
        with self._lock:
            self._take()
            now = time.monotonic()
            return {
                rank: seconds
                for rank, (seconds, heard) in self._compiling.items()
                if now - heard < 2 * _ANSWERS_WITHIN
            }

    def wait_chain(self, key: int, peers: Sequence[int]) -> list[int]:
        """Return whom this rank waits for, whom that one waits for, and so on, as far as they say.

        Takes some tenths of a second.
        """
        found = list(peers[:1])
        while found and len(found) < _LONGEST_CHAIN:
            following = self._ask_again(found[-1], key, peers)
            if following is None or following in (self.rank, *found):
                break
            found.append(following)
        return found

    def serve_until_exit(self) -> None:
        """Answer who asks, until all ranks have ended their programs; harmless when repeated.

        To be called at the end of the program, before MPI is finalized.
        """
        from mpi4py import MPI

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
        except self._error:  # a rank has died, of which this one may not have heard before
            if self.failed():
                self._meet_at_end(_MEET_WITHIN)
            liveness.arm()
            liveness.prepare_exit()

    def _meet_at_end(self, limit: float = math.inf) -> None:
        """Wait until all ranks have ended their programs, or died; then end soon.

        By messages: MPI's barrier has no way without the dead.

        Args:
            limit: seconds to wait at most.
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
        """Return why a rank will not come: another one has ended, or itself some time ago."""
        if (peer, key) in self._news:
            return self._news[peer, key]
        own = self._news.get((peer, _EVERYWHERE))
        if own is None:
            return None
        since = max(own.heard, self._asked[peer, key])
        return own if time.monotonic() - since > _GRACE else None

    def _note(self, key: int, peers: Sequence[int]) -> None:
        """Note whom this rank waits for, and look what has come."""
        if peers:
            self._waiting[key] = peers[0], time.monotonic()
        self._take()

    def _take(self) -> None:
        """Take the questions and answers that have come."""
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
        """Return the messages that have come, and their sources."""
        found = []
        try:
            while (taken := self.endpoint.take(tag)) is not None:
                found.append((taken[0], taken[1].tobytes()))
        except RuntimeError:
            # A rank has died. Acknowledged deaths do not keep MPI from receiving from others.
            with contextlib.suppress(NotImplementedError, self._error):
                self._mpi.Ack_failed()
        return found

    def _ask(self, peer: int, key: int) -> None:
        self._asked[peer, key] = time.monotonic()
        self._send(_QUESTION.pack(key), peer, _ASK)

    def _ask_again(self, peer: int, key: int, peers: Sequence[int]) -> int | None:
        """Return whom a rank waits for; None if it does not say so in time."""
        with self._lock:
            self._awaits.pop((peer, key), None)
            self._ask(peer, key)
        backoff.poll_until(
            lambda: self._has_answered(peer, key, peers), _ANSWERS_WITHIN, _LOOK_AGAIN
        )
        return self._awaits.get((peer, key))

    def _has_answered(self, peer: int, key: int, peers: Sequence[int]) -> bool:
        """Look whether a rank has said whom it waits for, and answer those who ask this one."""
        with self._lock:
            self._note(key, peers)
            return (peer, key) in self._awaits

    def _tell_all(self, key: int | None, news: Departure) -> None:
        """Tell the ranks that have asked this one, in one communicator or in any."""
        for rank, asked in self._asking:
            if key in (None, asked):
                self._tell(rank, asked, _ENDED, news.rank, news.text)

    def _tell(self, dest: int, key: int, kind: int, rank: int, text: str = "") -> None:
        self._send(_ANSWER.pack(key, kind, rank) + text.encode()[:_TEXT_BYTES], dest, _TELL)

    def _send(self, text: bytes, dest: int, tag: int) -> None:
        data = np.frombuffer(text, np.uint8)
        MpiRequest(self, data, dest, "receive").start(self._mpi.Isend, tag)

    def lost(self, message: MpiRequest, error: RuntimeError) -> bool:
        """Give a message up: the dead need none."""
        return message.give_up()


current: FailureDetector | None = None
_outlives_ranks = False
_attribute = 0  # of MPI's communicator of this process alone
_keys = 1


def install(world: MPI.Comm, last_call: Callable[[], str], outlives_ranks: bool = False) -> None:
    """From now on, answer other ranks; *collective*, harmless when repeated.

    At the end of its program a rank stays until all others have ended theirs, as it would in
    `MPI_Finalize`. Where the program itself calls that, it stays there.

    Args:
        world: all processes.
        last_call: as for `FailureDetector`.
        outlives_ranks: whether the job continues when a rank dies.
    """
    global current, _outlives_ranks, _attribute
    if current is None and world.Get_size() > 1:
        from mpi4py import MPI

        current, _outlives_ranks = FailureDetector(world, last_call), outlives_ranks
        # MPI_Finalize begins by deleting the attributes of this communicator.
        _attribute = MPI.Comm.Create_keyval(delete_fn=_serve_until_exit)
        MPI.COMM_SELF.Set_attr(_attribute, True)


def next_key(agree: Callable[[int], int]) -> int:
    """Return a number for a new communicator, equal on its ranks; no other one of theirs has it.

    Args:
        agree: returns the largest of the numbers that the ranks bring.
    """
    global _keys
    key = agree(_keys)
    _keys = key + 1
    return key


def _serve_until_exit(*_: Any) -> None:
    if current is not None:
        current.serve_until_exit()


# Registered when this package is imported, so called after what programs register themselves.
@atexit.register
def _at_exit() -> None:
    if current is None or not current.is_mine:
        return
    from mpi4py import MPI

    if not MPI.Is_finalized():
        liveness.prepare_exit()
        MPI.COMM_SELF.Delete_attr(_attribute)  # stays; later Python cannot be called any more
        # If a rank is killed in MPI_Finalize, the other ranks do not always return from it (in 1 of
        # 14 runs of 3 ranks on busy cores).
        if _outlives_ranks:
            liveness.arm_for_finalize()
