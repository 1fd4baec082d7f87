"""Horovod's context: `init`, `shutdown` and process sets."""

from __future__ import annotations

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
    """The state from `init` to `shutdown`.

    Args:
        comm: all ranks; not closed here.
        process_sets: the initial process sets.

    Attributes:
        world: the process set of all ranks.
        sets: number -> process set.
    """

    def __init__(self, comm: cc.Communicator, process_sets: Iterable[ProcessSet] = ()) -> None:
        self.comm = comm
        self.sets: dict[int, ProcessSet] = {}
        self.world = ProcessSet(range(comm.size))
        self._comms: dict[int | None, list[cc.Communicator]] = {}  # by the number of their set
        # Made at the first use, and shared by all sets without this rank.
        self._alone: cc.Communicator | None = None
        self._numbers = 0  # number of the next process set
        # A private communicator: rounds must never match messages of the program.
        private = self._keep(comm.split(0, comm.rank), self._numbers)
        assert private is not None
        # The set of all ranks has the number 0, as in Horovod.
        self._bind(self.world, comm, Controller(private))
        try:
            for process_set in process_sets:
                self.add(process_set)
        except Exception:  # raised on all ranks
            self.close()
            raise

    def add(self, ranks: ProcessSet | Sequence[int]) -> ProcessSet:
        """Add a process set; *collective* over all ranks, including ranks outside of the set.

        Raises:
            ValueError: a rank does not exist, or the set exists already; on all ranks.
            MismatchError: ranks differ in the set; on all ranks.
        """
        say = "add_process_set"

        def prepare() -> tuple[ProcessSet, list[str]]:
            # The caller's own object, so that it becomes usable.
            made = ranks if isinstance(ranks, ProcessSet) else ProcessSet(ranks)
            if not made.ranks or not 0 <= made.ranks[0] <= made.ranks[-1] < self.comm.size:
                raise ValueError(
                    f"{say}: expected ranks 0 .. {self.comm.size - 1}, got {made.ranks}"
                )
            # Compared as sorted lists: a set is its members, not their order.
            same = [known for known in self.sets.values() if known.ranks == made.ranks]
            if same:
                raise ValueError(f"{say}: the process set exists already: {same[0]}")
            return made, [f"ranks {made.ranks}"]

        made = agreement.compare(self.comm, say, prepare)
        # Two communicators: one for operations in program order, one for the controller's rounds.
        own = self._keep(self.comm.group(made.ranks), self._numbers)
        private = self._keep(self.comm.group(made.ranks), self._numbers)
        self._bind(made, own, None if private is None else Controller(private))
        return made

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a process set; *collective*. Return whether the set existed.

        Raises:
            ValueError: it is the set of all ranks.
        """
        if process_set is self.world or process_set is global_process_set:
            raise ValueError("remove_process_set: the set of all ranks stays")
        number = process_set.process_set_id
        # A set may have been removed already, or belong to an earlier `init`.
        if number is None or self.sets.get(number) is not process_set:
            return False
        self._release(self.sets.pop(number))
        # No rank closes the communicator while another one still uses it.
        self.comm.barrier()
        self._close(number)
        return True

    def alone(self) -> cc.Communicator:
        """Return a communicator of this rank alone, closed with this context."""
        if self._alone is None:
            self._alone = self._keep(self.comm.group([self.comm.rank], tag=0), None)
            assert self._alone is not None
        return self._alone

    def close(self) -> None:
        """Wait for all ranks and close; *collective*. Unfinished calls fail."""
        # Controllers leave before any communicator closes.
        for number in sorted(self.sets, reverse=True):  # the set of all ranks last
            self._release(self.sets.pop(number))
        for key in list(self._comms):
            self._close(key)

    def _keep(self, comm: cc.Communicator | None, number: int | None) -> cc.Communicator | None:
        """Keep a communicator until its set is removed, or without a set until `close`."""
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
        # Unbound first, so that new calls are rejected while the controller waits.
        process_set.bind(None)
        if bound is not None and bound.controller is not None:
            bound.controller.leave()


_session: HorovodContext | None = None


def _of_ranks(ranks: list[int]) -> ProcessSet:
    """Return the process set of these ranks, or a new one that is not added."""
    sets = () if _session is None else _session.sets.values()
    # Unpickled in another process, the set is found by its ranks.
    return next((known for known in sets if known.ranks == ranks), ProcessSet(ranks))


def _reduce(process_set: ProcessSet) -> str | tuple[Any, ...]:
    """Pickle a process set as its ranks."""
    if process_set is global_process_set:
        # By name, since the global set is one object in each process.
        return "global_process_set"
    return _of_ranks, (process_set.ranks,)


copyreg.pickle(ProcessSet, _reduce)


def init(
    comm: cc.Communicator | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Initialize; *collective*. Harmless when repeated.

    Args:
        comm: the ranks: None for all ranks of the job, a communicator (also of mpi4py), or a list
            of ranks. Ranks outside of the list get a world of their own.
        process_sets: initial process sets. You can add more at any time, with or without "dynamic".

    Raises:
        TypeError: `comm` has another type.
    """
    global _session
    if _session is not None:
        return
    sets = () if process_sets is None or isinstance(process_sets, str) else process_sets
    world = _members(comm)
    _session = HorovodContext(world, sets)
    # The same state under the public object, which programs have imported already.
    global_process_set.bind(_session.world._bound)


def _members(comm: Any) -> cc.Communicator:
    if isinstance(comm, cc.Communicator):
        return comm
    if comm is not None and not isinstance(comm, Sequence):
        return cc.init(comm)  # a communicator of mpi4py; raises for other types
    whole = cc.init()
    # The whole job in order: no new communicator is needed.
    if comm is None or list(comm) == list(range(whole.size)):
        return whole
    if not all(isinstance(rank, int) for rank in comm):
        raise TypeError(f"init: expected a communicator or ranks, got {type(comm).__name__}")
    # Each rank outside of the list gets a color of its own, hence a world of one.
    own = whole.split(0 if whole.rank in comm else whole.rank + 1)
    assert own is not None
    return own


def _current() -> HorovodContext:
    if _session is None:
        raise ValueError(NOT_INITIALIZED)
    return _session


def shutdown() -> None:
    """Wait for all ranks and close; *collective*, harmless before `init`. `init` may follow.

    Unfinished calls of other ranks fail there, with an error that names the rank that called
    `shutdown`.
    """
    global _session
    if _session is not None:
        # Cleared first, so that `init` may follow even after an error below.
        ended, _session = _session, None
        ended.close()
        # Last: names of this object may be used until the controllers have left.
        global_process_set.bind(None)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline per rank into a folder; *collective*, as `collectives.start_timeline`.

    Args:
        file_path: path of the folder.
        mark_cycles: ignored; this controller has no cycles.

    Raises:
        ValueError: only some of the processes called `init`; or as `collectives.start_timeline`.
    """
    if _current().comm.size != cc.size():
        raise ValueError(
            "start_timeline: a timeline covers all processes, expected init() by all of them, got "
            f"{_current().comm.size} of {cc.size()}; let all call collectives.start_timeline"
        )
    cc.start_timeline(file_path)


def stop_timeline() -> None:
    """Stop the timeline; *collective*, harmless without one."""
    cc.stop_timeline()


def is_initialized() -> bool:
    """Return whether `init` was called."""
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
    """Return the number of nodes that have a rank with this `local_rank`."""
    return len(_peers())


def cross_rank() -> int:
    """Return the number of this rank among the ranks with its `local_rank`."""
    return _peers().index(_current().comm.rank)


def is_homogeneous() -> bool:
    """Return whether every node has the same number of ranks."""
    # Each rank has the leader of its node; equal counts mean equal nodes.
    leaders = extend.node_leaders(_current().comm)
    return len({leaders.count(leader) for leader in leaders}) == 1


def _peers() -> list[int]:
    """Return the ranks with this rank's `local_rank`, one per node."""
    comm = _current().comm
    seen: dict[int, int] = {}
    places = []
    # Ranks of a node are numbered in the order of the world.
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
