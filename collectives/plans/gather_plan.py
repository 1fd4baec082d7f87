"""Plan of a repeated gather whose row counts are those of the last call."""

from __future__ import annotations

import ctypes
import itertools
import math
from types import FrameType

import numpy as np

from collectives.arrays import host_arrays
from collectives.arrays.host_arrays import ALLOCATE, Array, RowsOut, address
from collectives.calls import signature
from collectives.calls.call import Call
from collectives.calls.counts import output_mismatch
from collectives.node.engine import Engine
from collectives.plans.prepared_calls import NodeCall

__all__ = ["GatherPlan"]


class GatherPlan:
    """A gather or an all-gather in the node engine: all move what each has brought the last time.

    As they meet they compare what they know of that. Where a rank knows anything else, or nothing
    yet, all tell how many rows they bring, and how many rows their `out` takes, so that all know of
    one that does not fit; and then they move them.

    Args:
        call: that makes it, and has been described.
        array: shape (n, ...).
        root: who gets the rows; None for all.

    Attributes:
        rows: how many each rank has brought in the last call.
        shape: of the last result.
        input_offset: after how many bytes of it this rank's array lies in it.
    """

    by_messages = False
    arrays = 0

    def __init__(self, call: Call, engine: Engine, array: Array, root: int | None = None) -> None:
        self._group, self._operation = call.group, call.operation
        self._takes = root in (None, call.group.rank)
        self._alone = root is not None and self._takes  # nobody else wants what this rank brings
        self._dtype, self._row = array.dtype, array.shape[1:]
        self._row_bytes = array.itemsize * math.prod(self._row)
        self._own = np.array([len(array), ALLOCATE.number])
        self._everyones = np.empty((engine.size, 2), np.int64)
        each = self._own.nbytes
        table = [(rank, 0, each, each * rank) for rank in range(engine.size)]
        self._addresses = address(self._own), address(self._everyones)
        self._tell = NodeCall(call, engine.plan_publish(each, table, call.digest, each))
        unknown = signature.hash_of({"rows": "unknown", "rank": engine.rank})
        self._move = self._tell.matching_detail(0, [], 0, detail=unknown)
        self._told: list[list[int]] = []
        self.rows: list[int] = []
        self._own_bytes = len(array) * self._row_bytes
        self._note([])

    def first(self, call: Call, flat: Array, out: RowsOut = ALLOCATE) -> Array | None:
        """Carry out the call that has made the plan; returns the rows, None where nobody asks."""
        self._move.first(call)  # with ranks that know rows of earlier calls
        self._own[1] = out.number
        self._tell.first(call, self._own, self._everyones)
        self._own[1] = ALLOCATE.number  # in later calls
        if error := self._look():
            raise call.announce(error)
        if not self._takes:
            self._move.first(call, flat)
            return None
        result, joined = host_arrays.output(
            out.target, self.shape, self._dtype, flat, self.input_offset
        )
        self._move.first(call, flat, joined)
        return host_arrays.copy_to(joined, result)

    def run(self, send: int, out: int, timeout: float | None, frame: FrameType) -> Array | None:
        """Make the call once more, whatever the other ranks bring; as `NodeCall.run`.

        Args:
            send: address of this rank's array.
            out: address of the result, of the shape of the last one; 0 for a new array.
            timeout: seconds, None for the setting.
            frame: of the operation's caller, as for `Recorder.take`.

        Returns:
            The new array, if it is one.

        Raises:
            ValueError: the ranks bring another number of rows than `out` takes.
        """
        made: Array | None = None
        error: Exception | None = None

        def room() -> int:
            nonlocal made
            made = None
            if not self._takes or (out and self._is_free(send, out)):
                return out
            made = np.empty(self.shape, self._dtype)
            return address(made)

        def tell_and_move() -> None:
            nonlocal error
            if not self._move.is_mismatch:
                return
            self._own[1] = sum(self.rows) if out else ALLOCATE.number
            try:
                self._tell.meet(*self._addresses, timeout)
            finally:
                self._own[1] = ALLOCATE.number
            error = self._look()
            if error is None:
                self._move.meet(send, room(), timeout)

        self._move.run(send, room(), timeout, frame, tell_and_move)
        if error is not None:  # which all ranks know
            raise error
        if out and made is not None:
            ctypes.memmove(out, address(made), made.nbytes)
            return None
        return made

    def _is_free(self, send: int, out: int) -> bool:
        """Whether a result may grow where it shall lie while the array is read."""
        before, after = out - send, send - out
        return after == self.input_offset or before >= self._own_bytes or after >= self._nbytes

    def _note(self, rows: list[int]) -> None:
        """Note how many rows each rank brings, and what follows."""
        self.rows = rows
        self.shape = (sum(rows), *self._row)
        self.input_offset = self._row_bytes * sum(rows[: self._group.rank])
        self._nbytes = self._row_bytes * sum(rows)

    def _look(self) -> Exception | None:
        """Plan the move of what each rank has said it brings; or say whose `out` does not fit."""
        told = self._everyones.tolist()
        if told == self._told:
            return None
        rows, given = ([pair[i] for pair in told] for i in (0, 1))
        error = output_mismatch(
            self._group, self._operation, self._row, given, [sum(rows)] * len(rows)
        )
        if error is not None:
            return error
        if rows != self.rows:
            bounds = [0, *(self._row_bytes * n for n in itertools.accumulate(rows))]
            table = [
                (rank, 0, stop - start, start)
                for rank, (start, stop) in enumerate(itertools.pairwise(bounds))
                if start < stop and self._takes
            ]
            own, longest = self._own_bytes, max(rows) * self._row_bytes
            kept = (0, own) if self._alone else (0, 0)
            detail = signature.hash_of({"rows": tuple(rows)})
            self._move = self._tell.matching_detail(own, table, longest, kept, detail)
            self._note(rows)
        self._told = told
        return None
