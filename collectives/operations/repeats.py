"""Calls that are like earlier ones, resolved once.

What a call in the node engine needs, but for the addresses of its arrays, follows from its
operation, op, dtype, shape, root and algorithm: description and hash, loops, bounds, kernel. The
first such call goes the long way (`collectives.communicator`), with all its checks, and what it
found is kept here. Later ones with contiguous NumPy arrays look for it, and go to the kernel. Ranks
that take the short way and ranks that take the long way meet in the same rounds and compare the
same hashes, so that it does not matter which of them found what they looked for.

Cost: 2 to 3 us of Python per call; at most 256 calls are remembered, without their arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives.algorithms import selection
from collectives.arrays.host import Array, address
from collectives.arrays.reduction import Op
from collectives.compression import NONE, Compression
from collectives.operations.call import Call, Calls
from collectives.operations.resolved import Resolved

if TYPE_CHECKING:
    from collectives.node.engine import Engine, Work

__all__ = ["NEW", "Repeats"]

# What the methods of `Repeats` return for a call that is not known, and has not been begun.
NEW: Any = object()

# How many calls are remembered; a training step makes a few dozen different ones.
_MOST = 256


class _Shares(NamedTuple):
    """A reduction of which every rank gets its share."""

    call: Resolved
    shape: tuple[int, ...]  # of the share
    before: int  # bytes of the whole result before it


@dataclass
class _Join:
    """A call that joins the arrays of all ranks: they tell each other how many rows they bring."""

    tell: Resolved
    own_rows: Array  # shape (1,)
    all_rows: Array  # shape (P,), where those of all ranks arrive
    move: Resolved | None  # for these rows:
    known_rows: list[int]


class Repeats:
    """The calls of one communicator that need no second look.

    The methods named after operations carry out one call each and return its result, or `NEW` where
    no call like it is known: then nothing has happened, and the long way has to be taken. The
    others note what a call on the long way has found.

    Args:
        calls: those of the communicator.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._rank = calls.transport.rank
        self._engine: Engine | None = None  # as soon as a call is known
        self._known: dict[tuple[object, ...], Any] = {}

    def allreduce(
        self, x: Any, op: Op, out: Any, algorithm: str, compression: Compression | None,
        timeout: float | None,
    ) -> Any:  # fmt: skip
        """Reduce as an earlier call did."""
        if self._engine is None or type(x) is not np.ndarray:
            return NEW
        if compression is not NONE and compression is not None:
            return NEW
        try:
            result = _result(x, out, timeout)
            if result is None:
                return NEW
            send = address(x)
            target = send if result is x else address(result)
            place = None
            if target == send:
                place = self._engine.shared.place_at(send, x.nbytes)
            elif -x.nbytes < target - send < x.nbytes:  # what is written would be read again
                return NEW
            known = self._known[("allreduce", op, algorithm, x.dtype, x.shape, place)]
        except _NO_REPEAT:
            return NEW
        known.run(send, target, timeout)
        return result

    def reduce(
        self, x: Any, root: int, op: Op, out: Any, algorithm: str, timeout: float | None
    ) -> Any:
        """Reduce to the root as an earlier call did."""
        if self._engine is None or type(x) is not np.ndarray:
            return NEW
        try:
            result = _result(x, out if root == self._rank else x, timeout)
            if result is None:
                return NEW
            send = address(x)
            target = send if result is x else address(result)
            if target != send and -x.nbytes < target - send < x.nbytes:
                return NEW
            known = self._known[("reduce", op, algorithm, x.dtype, x.shape, root)]
        except _NO_REPEAT:
            return NEW
        known.run(send, target, timeout)
        return result if root == self._rank else None

    def reduce_scatter(self, x: Any, op: Op, algorithm: str, timeout: float | None) -> Any:
        """Reduce and share as an earlier call did."""
        if self._engine is None or type(x) is not np.ndarray:
            return NEW
        try:
            if not x.flags.c_contiguous or not (timeout is None or timeout > 0):
                return NEW
            known = self._known[("reduce_scatter", op, algorithm, x.dtype, x.shape)]
            result = np.empty(known.shape, x.dtype)
        except _NO_REPEAT:
            return NEW
        known.call.run(address(x), address(result) - known.before, timeout)
        return result

    def allgather(self, x: Any, algorithm: str, timeout: float | None) -> Any:
        """Join as an earlier call did, whatever the other ranks bring this time."""
        if self._engine is None or type(x) is not np.ndarray:
            return NEW
        try:
            if not x.flags.c_contiguous or not (timeout is None or timeout > 0):
                return NEW
            join = self._known[("allgather", algorithm, x.dtype, x.shape)]
        except _NO_REPEAT:
            return NEW
        result = x

        def move() -> None:
            nonlocal result
            rows = join.all_rows.tolist()
            if rows != join.known_rows:
                join.move, join.known_rows = self._moving(join.tell, x, rows), rows
            result = np.empty((sum(rows), *x.shape[1:]), x.dtype)
            join.move.meet(address(x), address(result), timeout)

        join.tell.run(address(join.own_rows), address(join.all_rows), timeout, move)
        return result

    def broadcast(self, x: Any, root: int, out: Any, algorithm: str, timeout: float | None) -> Any:
        """Broadcast as an earlier call did."""
        if self._engine is None or type(x) is not np.ndarray:
            return NEW
        try:
            result = _result(x, out, timeout)
            if result is None:
                return NEW
            known = self._known[("broadcast", algorithm, x.dtype, x.shape, root)]
        except _NO_REPEAT:
            return NEW
        if root != self._rank:
            known.run(0, address(result), timeout)
        else:
            known.run(address(x), 0, timeout)
            if result is not x:
                np.copyto(result, x)
        return result

    def barrier(self, algorithm: str, timeout: float | None) -> bool:
        """Wait as an earlier call did, and tell whether there was one."""
        try:
            if timeout is not None and not timeout > 0:
                return False
            known = self._known[("barrier", algorithm)]
        except _NO_REPEAT:
            return False
        known.run(0, 0, timeout)
        return True

    def note_allreduce(
        self, call: Call, x: Any, result: Array, op: Op, algorithm: str, compression: Compression
    ) -> None:
        """Note what an all-reduce of `x` into `result` has found."""
        engine = selection.engine_for(call.engine, algorithm)
        if engine is None or compression is not NONE or not _is_plain(x) or not _is_plain(result):
            return
        send, out = x.reshape(-1), result.reshape(-1)
        key = ("allreduce", op, algorithm, x.dtype, x.shape, engine.shared.place_of(send, out))
        self._note(key, call, engine, engine.plan_allreduce(send, out, op, call.digest))

    def note_reduce(self, call: Call, x: Any, root: int, op: Op, algorithm: str) -> None:
        """Note what a reduction to `root` has found."""
        engine = selection.engine_for(call.engine, algorithm)
        if engine is None or not _is_plain(x):
            return
        key = ("reduce", op, algorithm, x.dtype, x.shape, root)
        send = x.reshape(-1)
        self._note(key, call, engine, engine.plan_reduce(send, None, op, root, call.digest))

    def note_reduce_scatter(
        self, call: Call, x: Any, bounds: Sequence[int], result: Array, op: Op, algorithm: str
    ) -> None:
        """Note what a reduce-scatter in chunks between `bounds` has found."""
        engine = selection.engine_for(call.engine, algorithm)
        if engine is None or not _is_plain(x):
            return
        key = ("reduce_scatter", op, algorithm, x.dtype, x.shape)
        work = engine.plan_reduce_scatter(x.reshape(-1), bounds, op, call.digest)
        before = bounds[self._rank] * x.itemsize
        self._note(key, call, engine, work)
        self._known[key] = _Shares(self._known[key], result.shape, before)

    def note_allgather(self, call: Call, x: Any, algorithm: str) -> None:
        """Note what an all-gather has found; what the others bring is seen every time."""
        engine = selection.engine_for(call.engine, algorithm)
        if engine is None or not _is_plain(x):
            return
        own, places = np.array([len(np.atleast_1d(x))]), range(engine.size)
        each = own.nbytes
        rows = [(rank, 0, each, each * rank) for rank in places]
        key = ("allgather", algorithm, x.dtype, x.shape)
        self._note(key, call, engine, engine.plan_publish(each, rows, call.digest, each))
        self._known[key] = _Join(self._known[key], own, np.empty(engine.size, np.int64), None, [])

    def _moving(self, tell: Resolved, x: Array, rows: Sequence[int]) -> Resolved:
        """Resolve the part of an all-gather that moves what each rank has said it brings."""
        row_bytes = x.itemsize * math.prod(x.shape[1:])
        bounds = [0, *(row_bytes * n for n in itertools.accumulate(rows))]
        table = [
            (rank, 0, stop - start, start)
            for rank, (start, stop) in enumerate(itertools.pairwise(bounds))
            if start < stop
        ]
        return tell.like(x.nbytes, table, max(rows) * row_bytes)

    def note_broadcast(self, call: Call, x: Any, root: int, algorithm: str) -> None:
        """Note what a broadcast has found."""
        engine = selection.engine_for(call.engine, algorithm)
        if engine is None or not _is_plain(x):
            return
        own = root == self._rank
        rows = [] if own or not x.nbytes else [(root, 0, x.nbytes, 0)]
        work = engine.plan_publish(x.nbytes if own else 0, rows, call.digest, x.nbytes)
        self._note(("broadcast", algorithm, x.dtype, x.shape, root), call, engine, work)

    def note_barrier(self, call: Call, algorithm: str) -> None:
        """Note what a barrier has found."""
        engine = selection.engine_for(call.engine, algorithm)
        if engine is not None:
            work = engine.plan_publish(0, [], call.digest, 0)
            self._note(("barrier", algorithm), call, engine, work)

    def _note(self, key: tuple[object, ...], call: Call, engine: Engine, work: Work) -> None:
        self._engine = engine
        if len(self._known) >= _MOST:
            self._known.clear()
        description = call.description
        self._known[key] = Resolved(self._calls, engine, call.operation, description, work)


# What goes wrong here and is for the long way, which tells the other ranks of it: an unknown call,
# arguments that cannot be looked for or compared, no memory for the result.
_NO_REPEAT = (KeyError, TypeError, ValueError, MemoryError)


def _result(x: Array, out: Any, timeout: float | None) -> Array | None:
    """Return where a result like `x` goes; None if the arguments need a closer look."""
    if not x.flags.c_contiguous or not (timeout is None or timeout > 0):
        return None
    if out is None:
        return np.empty(x.shape, x.dtype)
    if out is not x and (
        type(out) is not np.ndarray or out.dtype != x.dtype or out.shape != x.shape
    ):
        return None
    return out if out.flags.c_contiguous and out.flags.writeable else None


def _is_plain(x: Any) -> bool:
    """Tell whether an array can be found again: NumPy's, contiguous, in native byte order."""
    return type(x) is np.ndarray and x.flags.c_contiguous and x.dtype.isnative
