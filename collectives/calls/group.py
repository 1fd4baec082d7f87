"""State shared by the operations of one group: transport, nodes, settings, engine, plans, records.

Operations are functions of a group, and the group imports none of them. `state_of` holds the
state that an operation keeps between calls.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar, cast

from collectives.algorithms import hierarchical, node_stages
from collectives.algorithms.cost_model import RankLayout
from collectives.calls.fast_path import FastPath
from collectives.calls.group_registry import GroupRegistry, Registration
from collectives.core import settings, topology
from collectives.core.errors import CollectiveError, CollectiveTimeout, PeerFailure
from collectives.core.process_hooks import in_child
from collectives.kernels import buffer_address
from collectives.launch.open_mpi import is_fault_tolerant
from collectives.node import engine
from collectives.tracing import call_sites, peer_status, recorder, timeline
from collectives.tracing.recorder import NO_FIELDS, Record
from collectives.tracing.timeline_events import CallListener, CallTracer, GroupInfo
from collectives.transport import liveness
from collectives.transport.transport import Deadline, Transport

__all__ = ["Group", "attach_listeners_to_all"]

# UNISONO_CHECK=sample compares the first calls, because most mistakes show at the start, and then
# every 64th, because ranks may drift apart. Counted per group, so that all ranks choose alike.
_SAMPLE_FIRST = 64
_SAMPLE_EVERY = 64

# Lower limit of the time for MPI_Finalize after a failure. A short timeout of operations does not
# bound the time that the programs of the other ranks still run.
_LEAST_EXIT_SECONDS = 60.0

T = TypeVar("T")

# All groups of this process, for `fork` and for the timeline.
_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def _refuse_in_child() -> None:
    """Refuse all calls in a forked child, which is not a rank."""
    # A copy, because a group may be collected meanwhile.
    for group in list(_groups):
        group.refuse_calls("a forked child is not a rank: call it in the parent")
        # The thread of the call under way does not exist in the child, so the gate is set in any
        # case.
        group.gate = group.unusable
        group._collided = False


in_child(_refuse_in_child)


def attach_listeners_to_all() -> None:
    """Update the listeners of all groups after a timeline has started or stopped."""
    for group in list(_groups):
        group.attach_listeners()


def _make_lone_engine(group: Group) -> tuple[engine.Engine, peer_status.StatusBoard]:
    made = engine.alone(group.transport)
    name = group.transport.name([0])
    return made, peer_status.StatusBoard(made.status_entries, 0, [name])


class Group:
    """Ranks that call operations together, one call at a time.

    Args:
        transport: moves arrays between the ranks.
        leaders: one integer per rank, equal exactly for the ranks of one node.
        configuration: the settings; None reads the environment.
        name: name of the group in flight records.

    Attributes:
        rank, size, local_rank, local_size, node_rank, num_nodes: see `Communicator`.
        layout: ranks, nodes and link costs; "auto" picks algorithms by them.
        levels_by_messages: the stages in and between nodes, all by messages.
        levels: the same stages, in shared memory inside this rank's node if it has an engine.
        node_engine: engine of this rank's node; None before the first call, and without shared
            memory.
        plans: cached preparations of repeated calls (`collectives.operations.plan_cache`).
        address_reader: reads the addresses of arrays in repeated calls.
        fast_path: repeats calls in compiled code; `store` and `call_number` share its memory.
        child_count: number of groups created from this group.
        tagged_groups_made: number of groups with a tag created from this group whose first rank is
            this rank.
        registry: groups created from this group, shared with its parent group.
        unusable: reason why the group refuses calls; None if it is usable.
        gate: None if a call may start; else the call under way, an object with its name in
            `operation`, or `unusable`. A call checks the gate, then stores itself. CPython switches
            threads only at calls and backward jumps, and neither occurs between the two steps.
        listener: called when operations begin and end; None without a status board and timeline.
    """

    # `collectives.calls.fast_path` also writes these two.
    __slots__ = ("__dict__", "__weakref__", "gate", "unusable")

    gate: Any
    unusable: str | None

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
        # Replaced in the first call if the node has an engine.
        self.levels = self.levels_by_messages
        self.node_engine: engine.Engine | None = None
        self.plans: dict[object, Any] = {}
        # Until a plan is stored: compiled code is not loaded for programs that make few calls.
        self.address_reader = buffer_address.in_python
        self.fast_path = FastPath()
        self.child_count = 0
        self.tagged_groups_made = 0
        self.registry = GroupRegistry()
        self._registration: Registration | None = None
        self.unusable = None
        self.gate = None
        self._collided = False  # two threads called at once; the other ranks are not informed yet
        self.listener: CallListener | None = None
        self._tracer: CallTracer | None = None
        self._met = False  # whether the ranks of the node have tried to create an engine
        self._state: dict[Callable[..., Any], Any] = {}
        _groups.add(self)
        self.attach_listeners()

    def attach_listeners(self) -> None:
        """Choose the listener of operations: the node's status board, the timeline, or None."""
        # Without a timeline the status board alone is notified, which costs less than a tracer.
        self.listener, self._tracer = self.status, None
        if self.node_engine is not None:
            self.node_engine.enable_tracing(timeline.running is not None)
        if timeline.running is not None:
            # Without several nodes, `levels.node` has the same ranks.
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
        # A timeline needs more than compiled code records.
        self.fast_path.state.enabled = self.listener is self.status is not None

    @property
    def call_number(self) -> int:
        """Number of the last call."""
        return int(self.fast_path.state.number)

    @call_number.setter
    def call_number(self, number: int) -> None:
        self.fast_path.state.number = number

    @property
    def world_ranks(self) -> Sequence[int]:
        """The ranks of the group by their numbers in the world."""
        # An empty or missing list: the transport is the world.
        return self.transport.world or range(self.size)

    def register(self, registry: GroupRegistry, name: str) -> None:
        """Register this group, so that it is freed once all its ranks have dropped it.

        Args:
            registry: registry of the parent group.
            name: equal on all ranks; unique among the registered groups that share a rank.
        """
        self.registry = registry
        self._registration = registry.add(self, name, self.world_ranks, self.transport)

    def _unregister(self) -> None:
        if self._registration is not None:
            self.registry.remove(self._registration)

    def state_of(self, make: Callable[[Group], T]) -> T:
        """Return the state that an operation keeps between calls; the first request creates it."""
        if make not in self._state:
            self._state.setdefault(make, make(self))  # atomic, in case two threads create it
        return cast(T, self._state[make])

    def close_state_of(self, make: Callable[[Group], Any]) -> None:
        """Close the state of an operation, if it exists."""
        if make in self._state:
            self._state[make].close()

    def deadline(self, operation: str, timeout: float | None = None) -> Deadline:
        """Return a deadline that starts now; None uses the timeout of the settings."""
        limit = self.settings.timeout if timeout is None else timeout
        deadline = Deadline(operation, limit, self.settings.stall_warning, self._missing)
        # Compiled rounds and the waits of messages note their times for the tracer.
        if self._tracer is not None:
            deadline.waits = self._tracer.waits()
        return deadline

    def begin(
        self,
        operation: str,
        fields: Mapping[str, object] = NO_FIELDS,
        frame: FrameType | None = None,
    ) -> Record:
        """Record the start of an operation, and show it to the other ranks of the node.

        Arguments as `Recorder.begin`.
        """
        # Point-to-point calls have the number of the last collective call.
        record = self.recorder.begin(self.call_number, operation, fields, frame)
        if self.listener is not None:
            self.listener.enter(record)
        return record

    def end(self, record: Record, error: BaseException | None) -> None:
        """Record the end of an operation; after a missing or dead rank, write the flight record."""
        record.end(error)
        if self.listener is not None:
            self.listener.leave(record)
        # Other errors concern one call, and a flight record would not show their cause.
        if error is not None and isinstance(error, (CollectiveTimeout, PeerFailure)):
            recorder.write(f"{record.operation}: {type(error).__name__}")

    def note_cached_call(self, operation: str, fields: Mapping[str, object]) -> None:
        """Add a completed call without a record to the timeline."""
        if self._tracer is not None:
            site = call_sites.call_site(call_sites.caller())
            self._tracer.add_cached_call(operation, fields, self.call_number, site)

    def close(self) -> None:
        """Refuse later calls, and release shared resources; *collective*."""
        # First the states, whose threads may still run operations of this group.
        for state in list(self._state.values()):
            if hasattr(state, "close"):
                state.close()
        # Only now, because closing a state may make calls.
        self.refuse_calls("it was closed")
        self._unregister()
        if self.node_engine is not None:
            # The lock file of this rank shows that it has left the group.
            self.node_engine.peers.close()
        self.transport.close()
        # Plans and state refer to the group. Without these cycles its memory is free at once and
        # the next group reuses it; with them each new group cost 1 to 2 KiB.
        self.plans.clear()
        self.fast_path.clear()
        self._state.clear()

    def revoke(self, reason: str) -> None:
        """Refuse later calls, on this rank alone, and interrupt the calls of the other ranks.

        With a fault-tolerant MPI library the other ranks raise `PeerFailure` and may `shrink`. With
        any other library they wait until they detect the end of this rank's process.
        """
        # First, so that no thread of this rank begins a call that cannot end.
        self.refuse_calls(reason)
        self._unregister()
        self.transport.revoke()
        if self.node_engine is not None:
            self.node_engine.peers.close()

    def dead_here(self) -> list[int]:
        """Return the dead ranks of this node that shared memory shows."""
        return [] if self.node_engine is None else self.node_engine.peers.dead()

    def _missing(self) -> str:
        """Describe the last operation of each missing rank, as far as the status board shows it."""
        return "" if self.status is None else self.status.missing()

    def refuse_calls(self, reason: str) -> None:
        """Refuse all later calls; a call under way continues."""
        # With a call under way the gate is that call, which `Call._leave` replaces.
        free = self.gate is self.unusable
        self.unusable = reason
        if free:
            self.gate = reason

    def check_usable(self, operation: str) -> None:
        """Raise `CollectiveError` if the group is unusable."""
        if self.unusable is None:
            return
        # Only after the first thread's call, which the other ranks still take part in.
        if self._collided and self.gate is self.unusable:  # the call of the first thread is over
            self._collided = False
            # The ranks that wait for this one learn the reason instead of a timeout.
            self.transport.propagate_failure(self.rank, f"has stopped, since {self.unusable}")
            self.revoke(self.unusable)
        raise CollectiveError(
            f"{operation}: this communicator is not usable any more, since {self.unusable} "
            f"({self.transport.where})"
        )

    def check_free(self, operation: str) -> None:
        """Refuse a call after a failure, or while another thread is in a call.

        The call under way continues. Later calls are refused, because the order of the two threads'
        calls may differ between ranks. A group of one rank has no such order, so the second thread
        waits for the end of the first call.
        """
        end = time.monotonic() + self.settings.timeout
        # The caller stores its own call as the gate, without another call in between (see `gate`).
        while (under_way := self.gate) is not None:
            self.check_usable(operation)
            owner = self.fast_path.state.owner
            if owner == threading.get_ident():  # interrupted in the fast path, outside of Python
                self.mark_failed(under_way.operation, KeyboardInterrupt())
                self.fast_path.state.owner = 0
                self.check_usable(operation)
            first = self._other_thread_in(under_way, owner)
            if first is None:  # a nested call of this thread
                return
            if first and (self.size > 1 or time.monotonic() > end):
                break
            # Polled, because calls must not pay for a lock or a notification.
            time.sleep(1e-4)
        else:
            return
        second = threading.current_thread().name
        self._collided = True
        self.refuse_calls(f"threads {first} and {second} called it at the same time")
        # The program may end now, while other ranks wait for this one.
        liveness.arm(max(self.settings.timeout, _LEAST_EXIT_SECONDS))
        raise CollectiveError(
            f"{operation}: another thread ({first}) is in {under_way.operation} on this "
            f"communicator, expected one thread at a time, got a call by thread {second}; give "
            f"each thread a communicator of its own by comm.split(0) ({self.transport.where})"
        )

    def _other_thread_in(self, under_way: Any, owner: int) -> str | None:
        """Return the name of the thread that is in a call; None for this one, "" if it has ended.

        Only after a search of all threads is it known whether the call is nested. They may end this
        call and begin another one with the same plan meanwhile, which a second search finds.
        """
        number = self.call_number
        for _ in range(2):
            if first := call_sites.other_thread_in(under_way, owner):
                return first
            owner = self.fast_path.state.owner
        return None if self.gate is under_way and self.call_number == number else ""

    def shared_memory_engine(self, deadline: Deadline) -> engine.Engine | None:
        """Return the node engine if all ranks share it, None if calls need messages.

        The first call creates the engine, because all ranks take part in it even if it fails. With
        several nodes, each node has an engine for the stages inside the node.
        """
        if not self._met:
            try:
                self._meet(deadline)
            except BaseException as error:
                self.mark_failed(deadline.operation, error)
                raise
            self._met = True
        # Several nodes: the engine runs stages inside the node, and calls need messages.
        return self.node_engine if self.num_nodes == 1 else None

    def _meet(self, deadline: Deadline) -> None:
        """Create the engine of this rank's node, if it has several ranks and shared memory."""
        ranks = self.transport if self.num_nodes == 1 else self.levels.node
        # A rank that waits here has entered its first call, unlike a missing one.
        deadline.peer_has_come = False
        made = engine.start(ranks, self.settings.shared_memory, deadline)
        deadline.peer_has_come = None
        if made is not None:
            made.set_store_mode(self.settings.stores)
            # By the numbers of the group, which may differ from those on the node.
            names = [self.transport.name([ranks.parent_rank(rank)]) for rank in range(ranks.size)]
            self.node_engine = made
            self.status = peer_status.StatusBoard(made.status_entries, ranks.rank, names)
            made.peers.last_call = self.status.last
            self.levels = node_stages.in_shared_memory(self.levels, made)
            self.attach_listeners()
        if is_fault_tolerant() and self.local_rank == 0:
            engine.compile_ahead()  # after `shrink`, a smaller group may need other kernels

    def lone_engine(self) -> engine.Engine:
        """Return the engine of a group of one rank; with it the group has a status board."""
        made, status = self.state_of(_make_lone_engine)
        if self.status is not status:
            self.status = status
            self.attach_listeners()
        return made

    @property
    def uses_messages(self) -> bool:
        """Whether operations send messages; valid after the first call."""
        return self.size > 1 and not (self.num_nodes == 1 and self.node_engine)

    @property
    def verifies(self) -> bool:
        """Whether the ranks compare their descriptions of the current call by messages."""
        if self.settings.check == "sample":
            return self.call_number <= _SAMPLE_FIRST or self.call_number % _SAMPLE_EVERY == 0
        return self.settings.check == "always"

    def mark_failed(self, operation: str, error: BaseException) -> None:
        """Refuse later calls, which could receive leftover messages of the failed call.

        Also limit MPI_Finalize, which waits for the other ranks.
        """
        self.refuse_calls(f"{operation} failed: {type(error).__name__}: {error}")
        self._unregister()
        liveness.arm(max(self.settings.timeout, _LEAST_EXIT_SECONDS))
