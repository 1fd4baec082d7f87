"""Sharded writing: all ranks write one checkpoint, led by rank 0.

::

    rank 0        begin ---- where ----> all     write own part     take all reports     commit
    others        wait for it                    write own part     report -> rank 0

Messages go on a communicator of their own, by any thread, so that a checkpoint may be written
behind the program while its ranks meet in other operations. Whatever goes wrong on a rank is in its
report: rank 0 abandons the checkpoint, and has the error.
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

# Seconds that rank 0 waits for a rank to write its part. A dead rank is found at once, so that this
# ends only what hangs in the file system.
_LIMIT = 3600.0


class _WriterChannel:
    """The communicator of the crews among some ranks, and how many crews there have been."""

    def __init__(self, comm: cc.Communicator) -> None:
        own = comm.split(0)
        assert own is not None
        self.comm = own
        self.crews = 0


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
        self._tag = line.crews << 32

    def next(self) -> int:
        """Return the number of the next checkpoint, by which its messages are known.

        All ranks call it at the same place.
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
        """On rank 0: write a checkpoint with the others; returns where it is.

        Raises:
            OpError: of any rank; nothing of it is there.
        """
        told = False

        def write(begun: CheckpointTransaction) -> list[Written]:
            nonlocal told
            told = True
            self._tell((begun.part, begun.suffix), number)
            error: BaseException | None = None
            try:
                written = [checkpoint.write_shard(begun.part, begun.suffix, 0, given, rest=rest)]
            except BaseException as caught:
                error = caught
            reports = [
                self._comm.recv_object(rank, tag=number, timeout=_LIMIT)
                for rank in range(1, self._comm.size)
            ]
            if error is not None:
                raise error
            for rank, (kind, content) in enumerate(reports, start=1):
                if kind:
                    raise error_of("save", kind, content, f"rank {rank} of {self._comm.size}")
                written.append(content)
            return written

        try:
            return checkpoint.commit(transaction.begin(root, draft.step), draft, write)
        finally:
            if not told:
                self._tell(None, number)

    def follow(
        self, given: list[NamedSlice], number: int, rest: Callable[[], object] | None = None
    ) -> None:
        """On other ranks: write this rank's part, and report to rank 0.

        Raises:
            BaseException: what went wrong; rank 0 knows.
        """
        try:
            place = self._comm.recv_object(0, tag=number, timeout=_LIMIT)
            if place is None:
                return
            part, suffix = place
            rank = self._comm.rank
            report: Any = "", checkpoint.write_shard(part, suffix, rank, given, rest=rest)
        except BaseException as error:
            self._comm.send_object((type(error).__name__, str(error)), 0, tag=number)
            raise
        self._comm.send_object(report, 0, tag=number)

    def _tell(self, place: Any, number: int) -> None:
        for rank in range(1, self._comm.size):
            self._comm.send_object(place, rank, tag=number)


def error_of(what: str, kind: str, text: str, rank: str) -> errors.OpError:
    """Return an error that another rank has told of.

    Args:
        what: the operation.
        kind: the name of the error's class.
        text: its message.
        rank: whose it is; "" if its message needs none.
    """
    error_type = getattr(errors, kind, None)
    if isinstance(error_type, type) and issubclass(error_type, errors.OpError):
        return error_type(f"{text} ({rank})" if rank else text)
    return errors.AbortedError(f"{what}: {rank or 'rank 0'} stopped with {kind}: {text}")
