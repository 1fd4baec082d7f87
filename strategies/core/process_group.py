"""Processes of a strategy; a single process is a group of one."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import collectives as cc
from collectives import extend
from strategies.core.agreement import raise_everywhere
from strategies.core.communication_options import CommunicationOptions

__all__ = ["ProcessGroup", "of_this_job"]

T = TypeVar("T")


def of_this_job() -> cc.Communicator | None:
    """Return the communicator of all processes of the job; None, without MPI, if there is one."""
    return cc.init() if cc.is_initialized() or extend.launcher_world_size() > 1 else None


class ProcessGroup:
    """What the processes of one strategy do together; nothing if there is only one.

    All methods but `start` and `with_options` are *collective*.

    An error on one rank is brought to all others by `agree`. The other ranks may be inside calls
    that the failed one has left, so each of them raises, and no call that the error passes on its
    way out may agree on it again: it is known until the next call begins.

    Args:
        comm: the processes, None for this one alone.
        options: how they exchange arrays.
    """

    def __init__(
        self,
        comm: cc.Communicator | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        self.comm = comm
        self.options = options or CommunicationOptions()
        self._known: list[BaseException] = []

    @property
    def rank(self) -> int:
        """Number of this process."""
        return 0 if self.comm is None else self.comm.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self.comm is None else self.comm.size

    def with_options(self, options: CommunicationOptions | None) -> ProcessGroup:
        """Return the same ranks with other options, where these are not the defaults."""
        if options is None:
            return self
        others = ProcessGroup(self.comm, options.over(self.options))
        others._known = self._known
        return others

    def start(self) -> None:
        """Forget the last error: whoever calls has gone on after it."""
        self._known.clear()

    def allreduce(self, arrays: list[Any], op: Any, *, rounded: bool = False) -> list[Any]:
        """Reduce arrays over the ranks.

        Args:
            arrays: of any kinds.
            op: `cc.SUM` or `cc.MEAN`.
            rounded: whether they may be compressed.

        Returns:
            New arrays; the given ones if this process is alone.
        """
        comm, options = self.comm, self.options
        if comm is None or comm.size == 1 or not arrays:
            return arrays
        how: dict[str, Any] = {
            "op": op,
            "compression": options.compression if rounded else cc.NONE,
            "timeout": options.timeout,
        }
        if options.algorithm != "auto":
            return [comm.allreduce(x, algorithm=options.algorithm, **how) for x in arrays]
        results: list[Any] = [None] * len(arrays)
        for pack in options.packs([x.nbytes for x in arrays]):
            given = comm.grouped_allreduce([arrays[i] for i in pack], **how)
            for i, result in zip(pack, given, strict=True):
                results[i] = result
        return results

    def allgather(self, array: Any) -> Any:
        """Join arrays of shape (n, ...), n different on every rank, along the first axis."""
        if self.comm is None or self.comm.size == 1:
            return array
        return self.comm.allgather(array, timeout=self.options.timeout)

    def broadcast_from_chief(self, array: Any) -> Any:
        """Return rank 0's array."""
        if self.comm is None or self.comm.size == 1:
            return array
        return self.comm.broadcast(array, timeout=self.options.timeout)

    def raise_together(self, name: str, function: Callable[[], T]) -> T:
        """Return what a function returns that is *collective* itself.

        Raises:
            Exception: what it raised; on all ranks, also if it raised on one before it came to its
                first collective operation (see `agree`).
        """
        self.start()
        try:
            return function()
        except Exception as error:
            self.agree(name, error)
            raise

    def run_then_agree(self, name: str, function: Callable[[], T]) -> T:
        """Return what a function returns, once it has returned on all ranks.

        Raises:
            Exception: what it raised, on all ranks (see `agree`).
        """
        error = None
        try:
            result = function()
        except Exception as caught:
            error = caught
        self.agree(name, error)
        return result

    def agree(self, name: str, error: Exception | None = None) -> None:
        """Make sure that all ranks have come to the same point, without an error.

        Cost: one all-reduce of 24 bytes.

        Args:
            name: of the point; its first word begins the message of an error.
            error: what happened on this rank before it came here.

        Raises:
            MismatchError: the ranks are at different points; on all ranks.
            Exception: `error` itself on the ranks that have one, elsewhere its copy; on all ranks.
        """
        if self.comm is None or self.comm.size == 1 or _is_final(error) or self._knows(error):
            if error is not None:
                raise error
            return
        operation = name.split()[0].rstrip(":")
        number = zlib.crc32(name.encode())
        while True:
            mine = np.array([error is not None, number, -number])
            try:
                failed, high, low = self.comm.allreduce(
                    mine, op=cc.MAX, timeout=self.options.timeout
                ).tolist()
                break
            except cc.MismatchError as mismatch:
                # A rank was inside another operation, which has failed for it, too. It comes here.
                error = mismatch if error is None else error
            except cc.CollectiveError as failure:
                if error is None:
                    raise
                raise error from failure
        if not failed and high == -low:
            return
        try:
            if failed:
                raise_everywhere(error, self.comm, operation)
            names = self.comm.allgather_object(name)
            listed = ", ".join(
                f"{name!r} on {extend.describe_ranks(self.comm, rank)}"
                for rank, name in enumerate(names)
            )
            raise extend.collective_error(
                self.comm,
                cc.MismatchError(f"{operation}: the ranks are not at the same point, got {listed}"),
            )
        except Exception as raised:
            self._known.append(raised)
            raise

    def _knows(self, error: BaseException | None) -> bool:
        """Whether all ranks have been told of this error, or of one that it followed from."""
        while error is not None:
            if any(error is known for known in self._known):
                return True
            error = error.__cause__ or error.__context__
        return False


def _is_final(error: Exception | None) -> bool:
    """Whether no operation among these ranks is possible after this error."""
    return isinstance(error, cc.CollectiveError) and not isinstance(error, cc.MismatchError)
