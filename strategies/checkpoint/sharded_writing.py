"""Sharded writing: all ranks write one checkpoint, led by rank 0.

::

    rank 0        begin ---- where ----> all     write own part     take all reports     commit
    others        wait for it                    write own part     report -> rank 0

Messages use a separate communicator, so that any thread may write a checkpoint while the program
runs other operations. Each rank reports its result or error. If any rank failed, rank 0 abandons
the checkpoint and raises the error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import collectives as cc
from strategies import errors
from strategies.checkpoint import checkpoint, transaction
from strategies.checkpoint.checkpoint import PreparedCheckpoint, Written
from strategies.checkpoint.shards import NamedSlice
from strategies.checkpoint.storage import Location
from strategies.checkpoint.transaction import CheckpointTransaction

__all__ = ["WriterGroup", "error_of"]

# Seconds that rank 0 waits for a rank's report, and a rank for rank 0's start. Dead ranks are
# detected at once, so this limit only ends waits on a hanging file system.
_LIMIT = 3600.0


class _WriterChannel:
    """The communicator of all writer groups of some ranks, and the number of groups so far."""

    def __init__(self, comm: cc.Communicator) -> None:
        # Private: receives of the background thread must not match messages of the program.
        own = comm.split(0)
        assert own is not None
        self.comm = own
        self.crews = 0
        # Shared by all groups, because creating a communicator is collective and costs messages.


# By weak reference, so that a dropped communicator takes its channel with it.
_lines: weakref.WeakKeyDictionary[cc.Communicator, _WriterChannel] = weakref.WeakKeyDictionary()


class WriterGroup:
    """The ranks that write the checkpoints of one manager.

    Args:
        comm: the ranks. *Collective*.
    """

    def __init__(self, comm: cc.Communicator) -> None:
        if comm not in _lines:
            _lines[comm] = _WriterChannel(comm)
        line = _lines[comm]
        line.crews += 1
        self._comm = line.comm
        # The upper bits number the group, so messages of different groups never match.
        self._tag = line.crews << 32

    def next(self) -> int:
        """Return the tag of the next checkpoint's messages.

        All ranks call it in the same order.
        """
        self._tag += 1
        return self._tag

    def lead(
        self,
        root: Location,
        draft: PreparedCheckpoint,
        given: list[NamedSlice],
        number: int,
        rest: Callable[[], object] | None = None,
    ) -> Location:
        """On rank 0: write a checkpoint together with the other ranks; return its location.

        Raises:
            OpError: the error of any rank; nothing of the checkpoint remains.
        """
        told = False

        def write(begun: CheckpointTransaction) -> list[Written]:
            nonlocal told
            # Set before the first send: `finally` must not send a second message to the same ranks.
            told = True
            # Only rank 0 knows the directory that it created, and its random suffix.
            self._tell((begun.part, begun.suffix), number)
            error: BaseException | None = None
            try:
                written = [checkpoint.write_shard(begun.part, begun.suffix, 0, given, rest=rest)]
            except BaseException as caught:
                error = caught
            # Take all reports even after an error: other ranks still write to the directory, which
            # may be removed only afterwards.
            reports = [
                self._comm.recv_object(rank, tag=number, timeout=_LIMIT)
                for rank in range(1, self._comm.size)
            ]
            if error is not None:
                # Rank 0's own error first: it has a traceback, and reports have only text.
                raise error
            for rank, (kind, content) in enumerate(reports, start=1):
                if kind:
                    raise error_of("save", kind, content, f"rank {rank} of {self._comm.size}")
                written.append(content)
            return written

        try:
            return checkpoint.commit(transaction.begin(root, draft.step), draft, write)
        finally:
            # The other ranks wait for a directory; None releases them if `begin` has failed.
            if not told:
                self._tell(None, number)

    def follow(
        self, given: list[NamedSlice], number: int, rest: Callable[[], object] | None = None
    ) -> None:
        """On other ranks: write this rank's part and report to rank 0.

        Raises:
            BaseException: the error of this rank, which is also in its report.
        """
        try:
            place = self._comm.recv_object(0, tag=number, timeout=_LIMIT)
            if place is None:
                # Rank 0 has failed in `begin`; all ranks get its error from rank 0.
                return
            part, suffix = place
            rank = self._comm.rank
            report: Any = "", checkpoint.write_shard(part, suffix, rank, given, rest=rest)
        except BaseException as error:
            # Also for an interrupt, because rank 0 waits for the report.
            # Name and text, because unpickling an arbitrary exception on rank 0 could fail.
            self._comm.send_object((type(error).__name__, str(error)), 0, tag=number)
            raise
        # Outside the `try`: a failed send must not be followed by a second report.
        self._comm.send_object(report, 0, tag=number)

    def _tell(self, place: Any, number: int) -> None:
        for rank in range(1, self._comm.size):
            self._comm.send_object(place, rank, tag=number)


def error_of(what: str, kind: str, text: str, rank: str) -> errors.OpError:
    """Return the error that another rank reported.

    Args:
        what: name of the operation.
        kind: class name of the error.
        text: message of the error.
        rank: text that names the rank; "" if the message needs none.
    """
    # The name may be that of any exception; only an `OpError` takes one message.
    error_type = getattr(errors, kind, None)
    if isinstance(error_type, type) and issubclass(error_type, errors.OpError):
        return error_type(f"{text} ({rank})" if rank else text)
    return errors.AbortedError(f"{what}: {rank or 'rank 0'} stopped with {kind}: {text}")
