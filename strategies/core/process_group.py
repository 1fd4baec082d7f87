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
    """Return the communicator of all processes of the job; None, without MPI, for one process."""
    # Without a launcher `cc.init()` would start MPI for one process only.
    return cc.init() if cc.is_initialized() or extend.launcher_world_size() > 1 else None


class ProcessGroup:
    """Operations among the processes of one strategy; no-ops for a single process.

    All methods but `start` and `with_options` are *collective*.

    `agree` propagates an error on one rank to all ranks. The other ranks may be inside nested
    calls, so each call that the error passes would agree on it again. So the error is remembered
    until the next call begins.

    Args:
        comm: the processes; None for a single one.
        options: how they exchange arrays.
    """

    def __init__(
        self,
        comm: cc.Communicator | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        self.comm = comm
        self.options = options or CommunicationOptions()
        # The errors themselves: an id alone could be reused after its error is freed.
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
        """Return a group of the same ranks, with options that differ from the defaults replaced."""
        if options is None:
            return self
        others = ProcessGroup(self.comm, options.over(self.options))
        # Shared, because an error agreed through one group is known in the other.
        others._known = self._known
        return others

    def start(self) -> None:
        """Forget the last error, because the caller has continued after it."""
        self._known.clear()

    def allreduce(self, arrays: list[Any], op: Any, *, rounded: bool = False) -> list[Any]:
        """Reduce arrays over the ranks.

        Args:
            arrays: arrays of any library.
            op: `cc.SUM` or `cc.MEAN`.
            rounded: whether they may be compressed.

        Returns:
            new arrays; the arguments themselves for a single process.
        """
        comm, options = self.comm, self.options
        # `size` is equal on all ranks, and so is the number of arrays of a collective call.
        if comm is None or comm.size == 1 or not arrays:
            return arrays
        how: dict[str, Any] = {
            "op": op,
            "compression": options.compression if rounded else cc.NONE,
            "timeout": options.timeout,
        }
        # An explicit algorithm is for a single array; packing would change the sizes it sees.
        if options.algorithm != "auto":
            return [comm.allreduce(x, algorithm=options.algorithm, **how) for x in arrays]
        results: list[Any] = [None] * len(arrays)
        for pack in options.packs([x.nbytes for x in arrays]):
            # Each pack has the same arrays on all ranks, since `packs` depends on sizes alone.
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
        """Call a *collective* function, and return its result.

        Raises:
            Exception: the function's error, on all ranks, even if it was raised on one rank before
                its first collective operation (see `agree`).
        """
        self.start()
        try:
            return function()
        except Exception as error:
            # Without an exchange on success, because the function itself is collective.
            self.agree(name, error)
            raise

    def run_then_agree(self, name: str, function: Callable[[], T]) -> T:
        """Call a function, wait until all ranks have called it, and return its result.

        Raises:
            Exception: the function's error, on all ranks (see `agree`).
        """
        error = None
        try:
            result = function()
        except Exception as caught:
            error = caught
        self.agree(name, error)
        return result

    def agree(self, name: str, error: Exception | None = None) -> None:
        """Synchronize all ranks at a point, and propagate errors.

        Cost: one all-reduce of 24 bytes.

        Args:
            name: name of the point; its first word is the operation in errors.
            error: error of this rank before the point.

        Raises:
            MismatchError: the ranks are at different points; on all ranks.
            Exception: `error` itself on ranks that have one, a copy on others; on all ranks.
        """
        # A final error means that messages may never arrive, so this rank raises alone.
        if self.comm is None or self.comm.size == 1 or _is_final(error) or self._knows(error):
            if error is not None:
                raise error
            return
        operation = name.split()[0].rstrip(":")
        # Names of points are compared as numbers, so that one all-reduce of fixed size suffices.
        number = zlib.crc32(name.encode())
        # Repeats: after a mismatch all ranks are at this point, and the second exchange succeeds.
        while True:
            # MAX of -n is -MIN of n, so one reduction finds the highest and the lowest number.
            mine = np.array([error is not None, number, -number])
            try:
                failed, high, low = self.comm.allreduce(
                    mine, op=cc.MAX, timeout=self.options.timeout
                ).tolist()
                break
            except cc.MismatchError as mismatch:
                # A rank was inside another operation, which has failed there; that rank also comes
                # here.
                error = mismatch if error is None else error
            except cc.CollectiveError as failure:
                if error is None:
                    raise
                raise error from failure
        # Equal numbers and no failure: the common case ends after one message.
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
            # Remembered for the callers above, which pass the same error and must not agree again.
            self._known.append(raised)
            raise

    def _knows(self, error: BaseException | None) -> bool:
        """Return whether all ranks know this error, or one that caused it."""
        while error is not None:
            # An error may be wrapped on its way up, so look along the chain.
            if any(error is known for known in self._known):
                return True
            error = error.__cause__ or error.__context__
        return False


def _is_final(error: Exception | None) -> bool:
    """Return whether these ranks cannot communicate after this error."""
    return isinstance(error, cc.CollectiveError) and not isinstance(error, cc.MismatchError)
