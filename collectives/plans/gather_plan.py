"""Plan of a repeated gather that expects the row counts of the last call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from collectives.arrays import host_arrays
from collectives.arrays.host_arrays import ALLOCATE, Array, RowsOut
from collectives.calls import signature
from collectives.calls.call import Call
from collectives.calls.counts import output_mismatch
from collectives.node.engine import Engine
from collectives.plans.prepared_calls import NodeCall

__all__ = ["GatherPlan"]


class GatherPlan:
    """Plan of a gather or all-gather in the node engine, for the row counts of the last call.

    The ranks compare these counts while they synchronize. If a rank has other counts, or none yet,
    all ranks exchange their row counts and the rows of `out`, and check every `out`. Then they move
    the rows.

    Args:
        call: the described call that creates the plan.
        engine: the node engine.
        array: shape (n, ...).
        root: rank that receives the rows; None for all ranks.

    Attributes:
        rows: number of rows of each rank in the last call.
        shape: shape of the last result.
        input_offset: bytes from the start of the last result to this rank's rows.
    """

    arrays = 0

    def __init__(self, call: Call, engine: Engine, array: Array, root: int | None = None) -> None:
        self.group, self.operation = call.group, call.operation
        self._takes = root in (None, call.group.rank)
        self._alone = root is not None and self._takes  # no other rank reads this rank's rows
        self._dtype, self._row = array.dtype, array.shape[1:]
        self._row_bytes = array.itemsize * math.prod(self._row)
        # The row count of this rank and the rows of its `out`: the stream of `_tell`.
        self._own = np.array([len(array), ALLOCATE.number])
        self._everyones = np.empty((engine.size, 2), np.int64)
        each = self._own.nbytes
        table = [(rank, 0, each, each * rank) for rank in range(engine.size)]
        # Two rounds: `_tell` exchanges row counts and rows of `out`, `_move` moves the rows.
        self._tell = NodeCall(call, engine.plan_publish(each, table, call.digest, each))
        # Differs between ranks, so that the first round always exchanges the counts.
        unknown = signature.hash_of({"rows": "unknown", "rank": engine.rank})
        self._move = self._tell.matching_detail(0, [], 0, detail=unknown)
        self._told: list[list[int]] = []
        self.rows: list[int] = []
        self._own_bytes = len(array) * self._row_bytes
        self._note([])

    def first(self, call: Call, flat: Array, out: RowsOut = ALLOCATE) -> Array | None:
        """Run the call that created the plan; return the rows, None on ranks without a result."""
        self._move.first(call)  # a detail mismatch: this rank has no counts
        self._own[1] = out.number
        self._tell.first(call, self._own, self._everyones)
        self._own[1] = ALLOCATE.number  # the default of later calls
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

    # `first` and `run` make the same rounds in the same order, so that ranks with and without a
    # plan fit together.
    def run(
        self, send: Array, out: Array | None, timeout: float | None, frame: FrameType
    ) -> Array | None:
        """Repeat the call with any row counts on other ranks; as `PreparedCall.run`.

        Args:
            send: this rank's array.
            out: array with the shape of the last result, separate from `send` or with `send` at
                `input_offset`; None for a new array.
            timeout: seconds; None uses UNISONO_TIMEOUT.
            frame: frame of the operation's caller, as for `Recorder.take`.

        Raises:
            ValueError: the number of rows of all ranks is not the number of rows of `out`.
        """
        # For the row counts of the last call: whether they still hold is known only after the first
        # round.
        makes = self._takes and out is None
        result = np.empty(self.shape, self._dtype) if makes else out

        def again() -> Exception | None:
            nonlocal result
            # The counts are equal to the last ones on all ranks, so the first round has moved the
            # rows.
            if not self._move.is_mismatch:
                return None
            error, result = self._move_again(send, out, timeout)
            return error

        self._move.run(send, result, timeout, frame, again)
        return result if out is None else None

    def complete(self, status: int, result: Any, x: Any, out: Any, timeout: float | None) -> Any:
        """Complete a call that the fast path has begun; as `NodeCall.complete`."""
        made: Array | None = None
        restore: Callable[[Array], Any] = host_arrays.identity

        def again() -> Exception | None:
            nonlocal made, restore
            send, _, restore = host_arrays.host_view(x, operation=self.operation)
            to = None
            if out is not None:
                to, _ = host_arrays.check_out(
                    out, self.shape, self._dtype, operation=self.operation
                )
            error, made = self._move_again(send, to, timeout)
            return error

        self._move.complete_begun(status, timeout, again)
        return result if made is None or out is not None else restore(made)

    def _move_again(
        self, send: Array, out: Array | None, timeout: float | None
    ) -> tuple[Exception | None, Array | None]:
        """Move the rows after a round that has found other row counts.

        Returns:
            An error if an `out` does not fit; `out`, or the new array.
        """
        # `out` has the shape of the last result, which is not the shape of the next one.
        self._own[1] = ALLOCATE.number if out is None else sum(self.rows)
        try:
            self._tell.meet(self._own, self._everyones, timeout)
        finally:
            self._own[1] = ALLOCATE.number
        if error := self._look():
            return error, None
        result = out
        # With other counts `send` may overlap `out` at a wrong offset: then copy at the end.
        if self._takes and (out is None or not self._is_free(send, out)):
            result = np.empty(self.shape, self._dtype)
        self._move.meet(send, result, timeout)
        if out is not None and result is not None and result is not out:
            out[...] = result
        return None, result

    def node_call(self) -> NodeCall:
        """Return the round that moves the rows for the row counts of the last call."""
        return self._move

    def _is_free(self, send: Array, out: Array) -> bool:
        """Whether a result can be written to `out` while `send` is read."""
        readable = self.group.address_reader.readable
        before = readable(out) - readable(send)
        # Free if `send` is its own part of `out`, if `out` begins behind `send`, or `send` behind
        # `out`.
        after = -before
        return after == self.input_offset or before >= self._own_bytes or after >= self._nbytes

    def _note(self, rows: list[int]) -> None:
        """Store the row counts of all ranks, and the sizes that follow from them."""
        self.rows = rows
        self.shape = (sum(rows), *self._row)
        self.input_offset = self._row_bytes * sum(rows[: self.group.rank])
        self._nbytes = self._row_bytes * sum(rows)

    def _look(self) -> Exception | None:
        """Plan the move for the exchanged row counts; return an error if an `out` does not fit."""
        told = self._everyones.tolist()
        # All ranks have passed the numbers of the last exchange, which fitted.
        if told == self._told:
            return None
        rows, given = ([pair[i] for pair in told] for i in (0, 1))
        error = output_mismatch(
            self.group, self.operation, self._row, given, [sum(rows)] * len(rows)
        )
        if error is not None:
            return error
        if rows != self.rows:
            # In bytes, because the kernels that copy know no dtypes.
            bounds = [0, *(self._row_bytes * n for n in itertools.accumulate(rows))]
            table = [
                (rank, 0, stop - start, start)
                for rank, (start, stop) in enumerate(itertools.pairwise(bounds))
                if start < stop and self._takes
            ]
            own, longest = self._own_bytes, max(rows) * self._row_bytes
            kept = (0, own) if self._alone else (0, 0)
            # So the next call finds equal details if the counts stay equal, and moves the rows at
            # once.
            detail = signature.hash_of({"rows": tuple(rows)})
            self._move = self._tell.matching_detail(own, table, longest, kept, detail)
            self.group.fast_path.forget(self)
            self._note(rows)
        self._told = told
        return None
