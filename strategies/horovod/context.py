"""Horovod's context: `init`, `shutdown` and process sets."""

from __future__ import annotations

import atexit
import copyreg
from collections.abc import Iterable, Sequence
from typing import Any

import collectives as cc
from collectives import extend
from strategies.core import agreement
from strategies.horovod.controller.controller import Controller
from strategies.horovod.process_sets import (
    NOT_INITIALIZED,
    Bound,
    ProcessSet,
    global_process_set,
)

__all__ = [
    "HorovodContext",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "get_process_set_ids_and_ranks",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


class HorovodContext:
    """The ranks of one `init`.

    Args:
        comm: all of them; not closed by this.
        process_sets: which there are from the beginning.

    Attributes:
        world: the process set of all ranks.
        sets: all of them by number.
    """

    def __init__(self, comm: cc.Communicator, process_sets: Iterable[ProcessSet] = ()) -> None:
        self.comm = comm
        self.sets: dict[int, ProcessSet] = {}
        self.world = ProcessSet(range(comm.size))
        self._comms: dict[int | None, list[cc.Communicator]] = {}  # by the number of their set
        self._alone: cc.Communicator | None = None
        self._numbers = 0  # given so far
        private = self._keep(comm.split(0, comm.rank), self._numbers)
        assert private is not None
        self._bind(self.world, comm, Controller(private))
        try:
            for process_set in process_sets:
                self.add(process_set)
        except Exception:  # on all ranks
            self.close()
            raise

    def add(self, ranks: ProcessSet | Sequence[int]) -> ProcessSet:
        """Add a process set; *collective*: all ranks, also those that are no members.

        Raises:
            ValueError: a rank does not exist, or there is such a set; on all ranks.
            MismatchError: ranks differ in the set; on all ranks.
        """
        say = "add_process_set"

        def prepare() -> tuple[ProcessSet, list[str]]:
            made = ranks if isinstance(ranks, ProcessSet) else ProcessSet(ranks)
            if not made.ranks or not 0 <= made.ranks[0] <= made.ranks[-1] < self.comm.size:
                raise ValueError(
                    f"{say}: expected ranks 0 .. {self.comm.size - 1}, got {made.ranks}"
                )
            same = [known for known in self.sets.values() if known.ranks == made.ranks]
            if same:
                raise ValueError(f"{say}: there is such a process set: {same[0]}")
            return made, [f"ranks {made.ranks}"]

        made = agreement.compare(self.comm, say, prepare)
        own = self._keep(self.comm.group(made.ranks), self._numbers)
        private = self._keep(self.comm.group(made.ranks), self._numbers)
        self._bind(made, own, None if private is None else Controller(private))
        return made

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a process set; *collective*. Tells whether there was such a set.

        Raises:
            ValueError: it is that of all ranks.
        """
        if process_set is self.world or process_set is global_process_set:
            raise ValueError("remove_process_set: the set of all ranks stays")
        number = process_set.process_set_id
        if number is None or self.sets.get(number) is not process_set:
            return False
        self._release(self.sets.pop(number))
        self.comm.barrier()
        self._close(number)
        return True

    def alone(self) -> cc.Communicator:
        """Return a communicator of this rank, which ends with the session."""
        if self._alone is None:
            self._alone = self._keep(self.comm.group([self.comm.rank], tag=0), None)
            assert self._alone is not None
        return self._alone

    def close(self) -> None:
        """Wait for all ranks, and end; *collective*. Calls that are not carried out fail."""
        for number in sorted(self.sets, reverse=True):  # all ranks' own at last
            self._release(self.sets.pop(number))
        for key in list(self._comms):
            self._close(key)

    def stop(self) -> None:
        """End the threads, as the program does; waits for nobody."""
        for process_set in self.sets.values():
            bound = process_set._bound
            if bound is not None and bound.controller is not None:
                bound.controller.stop()

    def _keep(self, comm: cc.Communicator | None, number: int | None) -> cc.Communicator | None:
        """Keep a communicator until its set is removed, or without a set until the session ends."""
        if comm is not None:
            self._comms.setdefault(number, []).append(comm)
        return comm

    def _close(self, number: int | None) -> None:
        for comm in self._comms.pop(number, []):
            comm.close()

    def _bind(
        self, process_set: ProcessSet, comm: cc.Communicator | None, controller: Controller | None
    ) -> None:
        ranks = tuple(process_set.ranks)
        process_set.bind(Bound(self, self._numbers, ranks, comm, controller))
        self.sets[self._numbers] = process_set
        self._numbers += 1

    def _release(self, process_set: ProcessSet) -> None:
        bound = process_set._bound
        process_set.bind(None)
        if bound is not None and bound.controller is not None:
            bound.controller.leave()


_session: HorovodContext | None = None


def _of_ranks(ranks: list[int]) -> ProcessSet:
    """Return this session's process set of these ranks, else one that was not added yet."""
    sets = () if _session is None else _session.sets.values()
    return next((known for known in sets if known.ranks == ranks), ProcessSet(ranks))


def _reduce(process_set: ProcessSet) -> str | tuple[Any, ...]:
    """Pickle a process set as its ranks."""
    if process_set is global_process_set:
        return "global_process_set"
    return _of_ranks, (process_set.ranks,)


copyreg.pickle(ProcessSet, _reduce)


def init(
    comm: cc.Communicator | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Begin; *collective*. Harmless if it was called before.

    Args:
        comm: who takes part: all ranks of the job, a communicator (of mpi4py, too), or a list of
            ranks, of which the others are worlds of their own.
        process_sets: which there are from the beginning; more can be added at any time, whether
            this is "dynamic" or not.

    Raises:
        TypeError: `comm` is none of these.
    """
    global _session
    if _session is not None:
        return
    sets = () if process_sets is None or isinstance(process_sets, str) else process_sets
    world = _members(comm)
    _session = HorovodContext(world, sets)
    global_process_set.bind(_session.world._bound)


def _members(comm: Any) -> cc.Communicator:
    if isinstance(comm, cc.Communicator):
        return comm
    if comm is not None and not isinstance(comm, Sequence):
        return cc.init(comm)  # of mpi4py, or refused
    whole = cc.init()
    if comm is None or list(comm) == list(range(whole.size)):
        return whole
    if not all(isinstance(rank, int) for rank in comm):
        raise TypeError(f"init: expected a communicator or ranks, got {type(comm).__name__}")
    own = whole.split(0 if whole.rank in comm else whole.rank + 1)
    assert own is not None
    return own


def _current() -> HorovodContext:
    """Return what `init` has begun.

    Raises:
        ValueError: it was not called.
    """
    if _session is None:
        raise ValueError(NOT_INITIALIZED)
    return _session


def shutdown() -> None:
    """Wait for all ranks, and end; *collective*, harmless before `init`. `init` may follow.

    Calls of other ranks that are not carried out fail there, with an error that says which rank has
    called this.
    """
    global _session
    if _session is not None:
        ended, _session = _session, None
        ended.close()
        global_process_set.bind(None)


@atexit.register
def _stop() -> None:
    if _session is not None:
        _session.stop()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Let every rank write a timeline into a folder; *collective*, as `collectives.start_timeline`.

    Args:
        file_path: of the folder.
        mark_cycles: not looked at: there are no cycles.

    Raises:
        ValueError: `init` was called by some of the processes only; or as there.
    """
    if _current().comm.size != cc.size():
        raise ValueError(
            "start_timeline: a timeline is of all processes, expected init() by all of them, got "
            f"{_current().comm.size} of {cc.size()}; let all call collectives.start_timeline"
        )
    cc.start_timeline(file_path)


def stop_timeline() -> None:
    """End it; *collective*, harmless where there is none."""
    cc.stop_timeline()


def is_initialized() -> bool:
    """Tell whether `init` was called."""
    return _session is not None


def size() -> int:
    """Return the number of ranks."""
    return _current().comm.size


def rank() -> int:
    """Return the number of this rank."""
    return _current().comm.rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return _current().comm.local_size


def local_rank() -> int:
    """Return the number of this rank among those of its node."""
    return _current().comm.local_rank


def cross_size() -> int:
    """Return how many nodes have a rank of this `local_rank`."""
    return len(_peers())


def cross_rank() -> int:
    """Return the number of this rank among those of its `local_rank`."""
    return _peers().index(_current().comm.rank)


def is_homogeneous() -> bool:
    """Tell whether every node has the same number of ranks."""
    leaders = extend.node_leaders(_current().comm)
    return len({leaders.count(leader) for leader in leaders}) == 1


def _peers() -> list[int]:
    """Return the ranks that have this one's number on their nodes."""
    comm = _current().comm
    seen: dict[int, int] = {}
    places = []
    for leader in extend.node_leaders(comm):
        places.append(seen.get(leader, 0))
        seen[leader] = places[-1] + 1
    return [rank for rank, place in enumerate(places) if place == comm.local_rank]


def add_process_set(ranks: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set; *collective*: all ranks, in the same order. See `HorovodContext.add`."""
    return _current().add(ranks)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; *collective*. See `HorovodContext.remove`."""
    return _current().remove(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of all process sets by their numbers."""
    return {number: list(known.ranks) for number, known in _current().sets.items()}
