"""Snapshots of one ps task: the variables after the same changes as on all other ps tasks.

::

    chief     hold 0 ---> hold others ---> take ------------------> resume ---> write ---> end
    ps 0      changes: 7 of task 2, 4 of 3   4 of 3 arrives: views   goes on     file
    ps 1               6 of task 2, 5 of 3   7 of 2 arrives: views   goes on     file

A *change* is a push, an assignment or a load. Each task numbers its changes, and sends each of them
to all ps tasks. A held ps makes no change. `take` has the highest numbers of all ps tasks, which
the ps reaches before it takes its views, so that every change is in all parts of the snapshot or in
none. Updates then write to other memory, until the request for the snapshot ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from strategies.checkpoint import checkpoint, shards
from strategies.checkpoint.async_writer import AsyncWriter
from strategies.checkpoint.boxes import Box
from strategies.checkpoint.shards import NamedSlice
from strategies.checkpoint.storage import resolve
from strategies.errors import AbortedError, CancelledError, DeadlineExceededError, OpError
from strategies.rpc.server_requests import ServerRequest
from strategies.variables.variable_group import VariableGroup, VariableState, pack

__all__ = ["OWN_CHANGES", "SnapshotServer"]

OWN_CHANGES = -1
"""In place of a task: changes that all ps tasks make without a message."""

Request = Callable[[ServerRequest], None]


class _Snapshot:
    """A snapshot of another task, from its request until this request ends.

    Attributes:
        work: the request, which has no reply.
        waiting: `hold` or `take` request without a reply.
        target: task -> number of its last change in the snapshot; None before `take`.
        states: state of each variable, in order.
        updates: number of updates.
        over: whether the request has ended.
    """

    def __init__(self, work: ServerRequest) -> None:
        self.work = work
        self.waiting: ServerRequest | None = None
        self.target: dict[int, int] | None = None
        self.states: list[VariableState] = []
        self.updates = 0
        self.over = False


class SnapshotServer:
    """Gate of the changes of one ps task, and its snapshots; for the thread of the variables.

    Args:
        group: the variables.
        go_on: called when changes may be possible again.
        has_left: returns whether a task is a worker that has left or died.
    """

    def __init__(
        self,
        group: VariableGroup,
        go_on: Callable[[], None],
        has_left: Callable[[int], bool],
    ) -> None:
        self._group = group
        self._go_on = go_on
        self._has_left = has_left
        self._made: dict[int, int] = {}  # task -> number of its last change
        self._failed: dict[int, int] = {}  # task -> number of its last change that failed here
        # The changes that are allowed; None for all.
        self._limits: dict[int, int] | None = None
        self._paused: list[tuple[ServerRequest, Request]] = []
        self._snapshots: dict[tuple[int, int], _Snapshot] = {}
        # The first one holds the changes. All tasks hold ps 0 first, so two snapshots that begin at
        # once never wait for each other.
        self._line: list[_Snapshot] = []

    def change(self, work: ServerRequest, request: Request) -> None:
        """Handle a change now, or when no snapshot holds it."""
        if not self.allows(work):
            self._paused.append((work, request))
            return
        try:
            request(work)
        except Exception as error:
            self.fail(work, error)
        self.advance()

    def allows(self, work: ServerRequest) -> bool:
        """Return whether a change may be made now."""
        return self._limits is None or work.arguments["change"] <= self._limits.get(work.source, 0)

    def made(self, work: ServerRequest) -> None:
        """Record that a change was made."""
        self._made[work.source] = max(work.arguments["change"], self._made.get(work.source, 0))

    def made_own(self) -> None:
        """Record a change that all ps tasks make without a message."""
        self._made[OWN_CHANGES] = self._made.get(OWN_CHANGES, 0) + 1

    def fail(self, work: ServerRequest, error: Exception) -> None:
        """Answer a change with its error; another ps may have made it."""
        self._failed[work.source] = work.arguments["change"]
        work.fail(error)

    def snapshot(self, work: ServerRequest) -> None:
        """Begin a snapshot, which lasts until this request ends."""
        # Without a reply: the request ends with its task, so a dead chief holds no ps.
        self._snapshots[_key(work)] = snapshot = _Snapshot(work)
        self._line.append(snapshot)

    def hold(self, work: ServerRequest) -> None:
        """Hold all changes; reply with the number of each task's last one."""
        self._find(work).waiting = work
        self.advance()

    def take(self, work: ServerRequest) -> None:
        """Make the changes that other ps tasks have made, then take the views."""
        snapshot = self._find(work)
        snapshot.waiting = work
        snapshot.target = self._limits = dict(work.arguments["changes"])
        self._retry()

    def resume(self, work: ServerRequest) -> None:
        """Make changes again; the snapshot remains."""
        self._release(self._find(work))
        work.reply()

    def advance(self) -> None:
        """Answer the request of the first snapshot when its condition is met."""
        if not self._line:
            return
        first = self._line[0]
        if self._limits is None:
            self._limits = dict(self._made)
        work = first.waiting
        if work is None:
            return
        if first.target is None:
            first.waiting = None
            work.reply(changes=sorted(self._made.items()))
            return
        missing = self._missing(first.target)
        failed = [task for task in missing if self._failed.get(task, 0) >= first.target[task]]
        if missing and not failed:
            return
        first.waiting = None
        try:
            if failed:
                raise AbortedError(
                    f"snapshot: a change of tasks {failed} has failed on this ps, expected all ps "
                    f"tasks to make it; start again from a checkpoint"
                )
            first.states = list(self._group.states().values())
            first.updates = self._group.updates
            facts, _ = pack(first.states)
            work.reply(parts=facts, updates=first.updates)
        except Exception as error:
            work.fail(error)

    def read(self, work: ServerRequest) -> None:
        """Reply with all arrays of the snapshot."""
        _, arrays = pack(self._find(work).states)
        work.reply(arrays)

    def write(self, work: ServerRequest) -> None:
        """Write the snapshot to a file, in a thread, and reply with its facts."""
        snapshot, told = self._find(work), work.arguments
        given = [
            _slice(snapshot, *entry)  # in the thread of the variables, which owns the snapshot
            for entry in told["entries"]
        ]
        writer = AsyncWriter()

        def rest() -> None:
            if snapshot.over:
                raise CancelledError("save: the task that saves has dropped the snapshot")
            if told["gently"]:
                writer.throttle()

        def write() -> None:
            try:
                where = resolve(told["part"])
                written = checkpoint.write_shard(
                    where, told["suffix"], told["index"], given, "ps", rest
                )
            except BaseException as error:  # its thread has no caller
                work.fail(error)
                return
            entries = [
                [name, one.file, one.start, one.shape, one.checksum] for name, one in written.slices
            ]
            shapes = [[name, dtype, shape] for name, (dtype, shape) in written.shapes.items()]
            work.reply(file=written.file, nbytes=written.nbytes, shapes=shapes, slices=entries)

        writer.start(write)

    def end(self, work: ServerRequest, error: OpError | None) -> None:
        """End a waiting request, with an error or, for None, without a reply."""
        self._paused = [pair for pair in self._paused if pair[0] is not work]
        if error is not None and "change" in work.arguments:
            self._failed[work.source] = work.arguments["change"]
        if "snapshot" not in work.arguments:
            self.advance()
            return
        snapshot = self._snapshots.get(_key(work))
        if snapshot is None:
            return
        if snapshot.waiting is work:
            snapshot.waiting = None
        if snapshot.work is work:
            del self._snapshots[_key(work)]
            snapshot.over = True
            snapshot.states = []  # the views would make updates copy the variables
            self._release(snapshot)

    def close(self, error: OpError) -> None:
        """Fail all requests that wait, and drop the snapshots."""
        waiting = [snapshot.waiting for snapshot in self._line if snapshot.waiting is not None]
        for work in [*waiting, *(work for work, _ in self._paused)]:
            work.fail(error)
        self._paused.clear()
        for snapshot in self._snapshots.values():
            snapshot.over = True
            snapshot.work.fail(error)

    def explain(self, work: ServerRequest, error: OpError) -> OpError:
        """Add to a deadline error the condition that the request waited for."""
        if any(paused is work for paused, _ in self._paused):
            return DeadlineExceededError(f"{error.message}; a snapshot holds this ps")
        for snapshot in self._line:
            if snapshot.waiting is work:
                tasks = self._missing(snapshot.target or {})
                why = f"changes of tasks {tasks} are missing" if tasks else "another one holds it"
                return DeadlineExceededError(f"{error.message}; {why}")
        return error

    def _find(self, work: ServerRequest) -> _Snapshot:
        if _key(work) not in self._snapshots:
            raise CancelledError("snapshot: it has ended")
        return self._snapshots[_key(work)]

    def _missing(self, target: Mapping[int, int]) -> list[int]:
        """Return the tasks that owe a change."""
        # A worker that died while it sent a change owes nothing, as for its gradients.
        return [
            task
            for task, number in sorted(target.items())
            if self._made.get(task, 0) < number
            and not (self._has_left(task) and self._failed.get(task, 0) < number)
        ]

    def _release(self, snapshot: _Snapshot) -> None:
        if snapshot not in self._line:
            return
        held = self._line[0] is snapshot
        self._line.remove(snapshot)
        if held:
            self._limits = None
            if not self._line:
                self._retry()
            else:
                self.advance()

    def _retry(self) -> None:
        """Handle the paused changes that are allowed now."""
        paused, self._paused = self._paused, []
        for work, request in paused:
            self.change(work, request)
        self._go_on()
        self.advance()


def _key(work: ServerRequest) -> tuple[int, int]:
    return work.source, work.arguments["snapshot"]


def _slice(
    snapshot: _Snapshot, name: str, part: int | None, kind: str, start: Any, shape: Any
) -> NamedSlice:
    """Return an array or a count of a part, or without a part the number of updates."""
    if part is None:
        array: Any = np.array([snapshot.updates], np.int64)
    else:
        state = snapshot.states[part]
        found = state.arrays.get(kind)
        array = np.array([state.counts[kind]], np.int64) if found is None else found
    array = shards.as_slices({name: array})[name].array
    return NamedSlice(name, tuple(shape), Box(tuple(start), array.shape), array)
