"""State shared by the operations of one group: transport, nodes, settings, engine, plans, records.

Operations are functions of a group. It knows none of them: what one keeps between its calls, the
group holds for it (`state_of`).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar, cast

from collectives.algorithms import hierarchical, node_stages
from collectives.algorithms.cost_model import RankLayout
from collectives.calls.group_registry import GroupRegistry, Registration
from collectives.core import settings, topology
from collectives.core.errors import CollectiveError, CollectiveTimeout, PeerFailure
from collectives.kernels import buffer_address
from collectives.launch.open_mpi import is_fault_tolerant
from collectives.node import engine
from collectives.tracing import call_sites, peer_status, recorder, timeline
from collectives.tracing.recorder import NO_FIELDS, Record
from collectives.tracing.timeline_events import CallListener, CallTracer, GroupInfo
from collectives.transport import liveness
from collectives.transport.transport import Deadline, Transport

__all__ = ["Group", "attach_listeners_to_all"]

# UNISONO_CHECK=sample compares the first calls, where programs are wrong from the start, and then
# every so many, where ranks drift apart. Counted per group, so that all ranks choose alike.
_SAMPLE_FIRST = 64
_SAMPLE_EVERY = 64

# After a failure MPI may take as long to end as an operation may wait, but not less than this: a
# short limit of operations says nothing about how long the other ranks' programs go on.
_LEAST_EXIT_SECONDS = 60.0

T = TypeVar("T")

# All groups of this process.
_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def _refuse_in_child() -> None:
    """Refuse all calls in a forked child, which is not a rank."""
    for group in list(_groups):
        group.refuse_calls("a forked child is not a rank: call it in the parent")
        group.gate = group.unusable
        group._collided = False


os.register_at_fork(after_in_child=_refuse_in_child)


def attach_listeners_to_all() -> None:
    """Let all groups find out that there is a timeline, or none any more."""
    for group in list(_groups):
        group.attach_listeners()


class Group:
    """The ranks that call operations together, one call after the other.

    Args:
        transport: moves arrays between the ranks.
        leaders: for every rank an integer that is the same exactly for the ranks of one node.
        configuration: the settings, from the environment if None.
        name: in flight records.

    Attributes:
        rank, size, local_rank, local_size, node_rank, num_nodes: see `Communicator`.
        layout: what "auto" goes by.
        levels_by_messages: the stages in and between nodes, all of them by messages.
        levels: the same, in shared memory inside this rank's node where the ranks meet there.
        node_engine: where the ranks of this node meet; None before the first call, and where they
            share no memory.
        plans: what calls need that are like earlier ones (`collectives.operations.plan_cache`).
        address_reader: reads the addresses of the arrays of such calls.
        call_number: of the last call.
        child_count: how many groups were made of this one.
        tagged_groups_made: how many groups with a tag were made of this one, with this rank first.
        registry: the groups made of this one, shared with the group that this one was made of.
        unusable: why there can be no more calls; None if there can.
        gate: None if a call may begin; the call under way, an object with its name in `operation`;
            or `unusable`. A call checks it, and then stores itself there. CPython switches threads
            at calls and backward jumps only, and there are none in between.
        listener: is told as operations begin and end; None if nobody is.
    """

    def __init__(
        self,
        transport: Transport,
        leaders: Sequence[int],
        configuration: settings.Settings | None = None,
        name: str = "world",
    ) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.leaders = list(leaders)
        nodes = topology.nodes(self.leaders, self.rank)
        self.local_rank, self.local_size, self.node_rank, self.num_nodes = nodes
        self.settings = configuration or settings.from_environment()
        self.recorder = recorder.Recorder(name, transport.rank, transport.size)
        self.status: peer_status.StatusBoard | None = None
        machine = self.settings.links.machine
        self.layout = RankLayout(self.size, self.num_nodes, machine)
        self.levels_by_messages = hierarchical.levels(transport, self.leaders, machine)
        self.levels = self.levels_by_messages
        self.node_engine: engine.Engine | None = None
        self.plans: dict[object, Any] = {}
        self.address_reader = buffer_address.in_python
        self.call_number = 0
        self.child_count = 0
        self.tagged_groups_made = 0
        self.registry = GroupRegistry()
        self._registration: Registration | None = None
        self.unusable: str | None = None
        self.gate: Any = None
        self._collided = False  # two threads called at once; the other ranks are not informed yet
        self.listener: CallListener | None = None
        self._tracer: CallTracer | None = None
        self._met = False  # whether the ranks of a node have tried to make an engine
        self._state: dict[Callable[..., Any], Any] = {}
        _groups.add(self)
        self.attach_listeners()

    def attach_listeners(self) -> None:
        """Find out who is to be told of operations: other ranks of the node, and a timeline."""
        self.listener, self._tracer = self.status, None
        if self.node_engine is not None:
            self.node_engine.enable_tracing(timeline.running is not None)
        if timeline.running is not None:
            ranks = self.transport if self.num_nodes == 1 else self.levels.node
            world = self.world_ranks
            members = GroupInfo(
                self.recorder.name, world, self.leaders, self.rank, self.num_nodes == 1
            )
            here = [world[ranks.parent_rank(rank)] for rank in range(ranks.size)]
            self._tracer = CallTracer(
                timeline.running, members, self.status, self.node_engine, here
            )
            self.listener = self._tracer

    @property
    def world_ranks(self) -> Sequence[int]:
        """The numbers of the group's ranks in the world."""
        return self.transport.world or range(self.size)

    def register(self, registry: GroupRegistry, name: str) -> None:
        """Let this group be freed once all its ranks have dropped it.

        Args:
            registry: of the group that this one was made of.
            name: equal on all ranks; unique among the registered groups that share a rank.
        """
        self.registry = registry
        self._registration = registry.add(self, name, self.world_ranks, self.transport)

    def _unregister(self) -> None:
        if self._registration is not None:
            self.registry.remove(self._registration)

    def state_of(self, make: Callable[[Group], T]) -> T:
        """Return what an operation keeps between its calls, made when it is first asked for."""
        if make not in self._state:
            self._state.setdefault(make, make(self))  # by one of two threads
        return cast(T, self._state[make])

    def close_state_of(self, make: Callable[[Group], Any]) -> None:
        """Close the object that `state_of(make)` has made, if there is one."""
        if make in self._state:
            self._state[make].close()

    def deadline(self, operation: str, timeout: float | None = None) -> Deadline:
        """Return a deadline that begins now; the timeout of the settings if None."""
        limit = self.settings.timeout if timeout is None else timeout
        deadline = Deadline(operation, limit, self.settings.stall_warning, self._missing)
        if self._tracer is not None:
            deadline.waits = self._tracer.waits()
        return deadline

    def begin(
        self,
        operation: str,
        fields: Mapping[str, object] = NO_FIELDS,
        frame: FrameType | None = None,
    ) -> Record:
        """Record that an operation begins, where other ranks of the node can see it.

        Arguments as `Recorder.begin`.
        """
        record = self.recorder.begin(self.call_number, operation, fields, frame)
        if self.listener is not None:
            self.listener.enter(record)
        return record

    def end(self, record: Record, error: BaseException | None) -> None:
        """Record that it ends; write all records to a file if a rank was missing or dead."""
        record.end(error)
        if self.listener is not None:
            self.listener.leave(record)
        if error is not None and isinstance(error, (CollectiveTimeout, PeerFailure)):
            recorder.write(f"{record.operation}: {type(error).__name__}")

    def note_cached_call(self, operation: str, fields: Mapping[str, object]) -> None:
        """Tell the timeline of a call that is over and was not recorded."""
        if self._tracer is not None:
            site = call_sites.call_site(call_sites.caller())
            self._tracer.add_cached_call(operation, fields, self.call_number, site)

    def close(self) -> None:
        """Refuse later calls, and release what the ranks share; *collective*."""
        for state in list(self._state.values()):
            if hasattr(state, "close"):
                state.close()
        self.refuse_calls("it was closed")
        self._unregister()
        if self.node_engine is not None:
            self.node_engine.peers.close()
        self.transport.close()
        # These refer to the group. Without the cycles its memory is free at once, and serves the
        # next group: a program that makes many groups grew by 1 to 2 KiB for each.
        self.plans.clear()
        self._state.clear()

    def revoke(self, reason: str) -> None:
        """Refuse later calls for a reason, alone, and let the other ranks leave theirs.

        Where the MPI library outlives its ranks, they get `PeerFailure`, and may `shrink`; where it
        does not, they wait for this rank until they see that it has ended.
        """
        self.refuse_calls(reason)
        self._unregister()
        self.transport.revoke()
        if self.node_engine is not None:
            self.node_engine.peers.close()

    def dead_here(self) -> list[int]:
        """Return the ranks of this node that have died, as far as shared memory tells."""
        return [] if self.node_engine is None else self.node_engine.peers.dead()

    def _missing(self) -> str:
        """Say what the ranks that have not come did last, where that is known."""
        return "" if self.status is None else self.status.missing()

    def refuse_calls(self, reason: str) -> None:
        """Refuse all calls that begin from now on; a call under way continues."""
        free = self.gate is self.unusable
        self.unusable = reason
        if free:
            self.gate = reason

    def check_usable(self, operation: str) -> None:
        """Refuse to go on after a failure."""
        if self.unusable is None:
            return
        if self._collided and self.gate is self.unusable:  # the call of the first thread is over
            self._collided = False
            self.transport.propagate_failure(self.rank, f"has stopped, since {self.unusable}")
            self.revoke(self.unusable)
        raise CollectiveError(
            f"{operation}: this communicator is not usable any more, since {self.unusable} "
            f"({self.transport.where})"
        )

    def check_free(self, operation: str) -> None:
        """Refuse a call after a failure, and while another thread is in a call.

        The call under way continues. Later calls are refused, because the order of the two threads'
        calls may differ among ranks. In a group of one rank it cannot, so the second thread waits
        until the call of the first has ended.
        """
        self.check_usable(operation)
        under_way = self.gate
        first = None if under_way is None else call_sites.other_thread_in(under_way)
        if first is None:  # a nested call of this thread
            return
        if self.size == 1 and self._wait_until_free(operation):
            return
        second = threading.current_thread().name
        self._collided = True
        self.refuse_calls(f"threads {first} and {second} called it at the same time")
        liveness.arm(max(self.settings.timeout, _LEAST_EXIT_SECONDS))
        raise CollectiveError(
            f"{operation}: another thread ({first}) is in {under_way.operation} on this "
            f"communicator, expected one thread at a time, got a call by thread {second}; give "
            f"each thread a communicator of its own by comm.split(0) ({self.transport.where})"
        )

    def _wait_until_free(self, operation: str) -> bool:
        """Wait until no thread is in a call; False if one still is after the timeout.

        The caller stores its own call as the gate with no other call in between, as `gate` demands.
        """
        end = time.monotonic() + self.settings.timeout
        while self.gate is not None:
            self.check_usable(operation)
            if time.monotonic() > end:
                return False
            time.sleep(1e-4)
        return True

    def shared_memory_engine(self, deadline: Deadline) -> engine.Engine | None:
        """Return the node engine if all ranks meet there, None where messages have to serve.

        It is made in the first call, in which all ranks take part, however it ends. Where there are
        several nodes, each has its own, for the stages inside it.
        """
        if not self._met:
            try:
                self._meet(deadline)
            except BaseException as error:
                self.mark_failed(deadline.operation, error)
                raise
            self._met = True
        return self.node_engine if self.num_nodes == 1 else None

    def _meet(self, deadline: Deadline) -> None:
        """Make the engine of this rank's node, where it has company and memory to share."""
        ranks = self.transport if self.num_nodes == 1 else self.levels.node
        deadline.peer_has_come = False
        made = engine.start(ranks, self.settings.shared_memory, deadline)
        deadline.peer_has_come = None
        if made is not None:
            made.set_store_mode(self.settings.stores)
            names = [self.transport.name([ranks.parent_rank(rank)]) for rank in range(ranks.size)]
            self.node_engine = made
            self.status = peer_status.StatusBoard(made.status_entries, ranks.rank, names)
            made.peers.last_call = self.status.last
            self.levels = node_stages.in_shared_memory(self.levels, made)
            self.attach_listeners()
        if is_fault_tolerant() and self.local_rank == 0:
            engine.compile_ahead()  # a smaller group may make calls of other kinds

    @property
    def uses_messages(self) -> bool:
        """Whether the ranks send messages in their operations; known after the first call."""
        return self.size > 1 and not (self.num_nodes == 1 and self.node_engine)

    @property
    def verifies(self) -> bool:
        """Whether the ranks compare their descriptions of the current call by messages."""
        if self.settings.check == "sample":
            return self.call_number <= _SAMPLE_FIRST or self.call_number % _SAMPLE_EVERY == 0
        return self.settings.check == "always"

    def mark_failed(self, operation: str, error: BaseException) -> None:
        """Refuse later calls, which would meet what is left of this one.

        The end of MPI is one more wait for the others, and gets a limit, too.
        """
        self.refuse_calls(f"{operation} failed: {type(error).__name__}: {error}")
        self._unregister()
        liveness.arm(max(self.settings.timeout, _LEAST_EXIT_SECONDS))
