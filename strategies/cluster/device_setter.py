"""Replica device setter: variables round-robin on ps tasks, the rest on workers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

from strategies.cluster.device_spec import DeviceSpec
from strategies.cluster.scopes import DeviceFunction, PlacementRequest
from strategies.cluster.spec import ClusterSpec
from strategies.core.validation import integer

__all__ = [
    "PS_TYPES",
    "GreedyLoadBalancing",
    "RandomChoice",
    "RoundRobin",
    "replica_device_setter",
]

PS_TYPES = frozenset({"Variable", "accumulator"})
"""What lives on ps tasks unless one says otherwise."""

Choice = Callable[[PlacementRequest], int]


class RoundRobin:
    """Assign things to tasks in turn.

    Args:
        num_tasks: number of tasks.
    """

    def __init__(self, num_tasks: int) -> None:
        self._num_tasks = integer("RoundRobin", "number of tasks", num_tasks)
        self._next = 0
        self._lock = threading.Lock()

    def __call__(self, thing: PlacementRequest) -> int:
        """Return the index of the task for a thing."""
        with self._lock:
            # Variables may be created in several threads.
            task = self._next
            self._next = (task + 1) % self._num_tasks
        return task


class GreedyLoadBalancing:
    """Assign each thing to the task with the smallest load, the first one in a tie.

    Args:
        num_tasks: number of tasks.
        load: `PlacementRequest` -> its load; its bytes by default.

    Raises:
        ValueError: `num_tasks` is not positive; in a call, the shape of a thing is unknown.
    """

    def __init__(
        self, num_tasks: int, load: Callable[[PlacementRequest], float] = attrgetter("nbytes")
    ) -> None:
        integer("GreedyLoadBalancing", "number of tasks", num_tasks)
        self._loads = [0.0] * num_tasks
        self._load = load
        self._lock = threading.Lock()

    def __call__(self, thing: PlacementRequest) -> int:
        """Return the index of the task for a thing."""
        load = self._load(thing)
        # Without the lock, because the function is the caller's.
        with self._lock:
            task = self._loads.index(min(self._loads))
            self._loads[task] += load
        return task


class RandomChoice:
    """Assign things to tasks by a hash of their names, equal on all ranks and in every run.

    Args:
        num_tasks: number of tasks.
        seed: selects another assignment.
    """

    def __init__(self, num_tasks: int, seed: int = 0) -> None:
        self._num_tasks = integer("RandomChoice", "number of tasks", num_tasks)
        self._seed = seed

    def __call__(self, thing: PlacementRequest) -> int:
        """Return the index of the task for a thing."""
        # Python's `hash` of text differs per process. Not for security, so that it also works in
        # FIPS mode.
        digest = hashlib.md5(f"{thing.name}{self._seed}".encode(), usedforsecurity=False)
        return int(digest.hexdigest(), 16) % self._num_tasks


def replica_device_setter(
    ps_tasks: int = 0,
    *,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: ClusterSpec | Mapping[str, Any] | None = None,
    ps_types: Collection[str] = PS_TYPES,
    choice: Choice | None = None,
) -> DeviceFunction | None:
    """Return a device function that distributes variables over the ps tasks.

    Use it in `with device(...)`. All ranks must create their variables in the same order, so that
    they share them.

    Args:
        ps_tasks: number of tasks of the ps job.
        ps_device: device of things of `ps_types`; a task is chosen if it names a job.
        worker_device: device of all other things.
        merge_devices: True completes the devices of inner blocks; False leaves a thing with any
            device unchanged.
        cluster: specification from which the ps tasks are counted instead.
        ps_types: types that belong to ps tasks.
        choice: returns a task's index for a thing; `RoundRobin` if None.

    Returns:
        the function; None, which constrains nothing, without ps tasks.

    Raises:
        TypeError: `choice` is not a function.
        ValueError: the cluster has no job of this name.

    Example:
        >>> setter = replica_device_setter(2)
        >>> [setter(PlacementRequest(name, "Variable")) for name in "abc"]
        ['/job:ps/task:0', '/job:ps/task:1', '/job:ps/task:0']
    """
    ps, worker = DeviceSpec.from_string(ps_device), DeviceSpec.from_string(worker_device)
    if cluster is not None:
        ps_tasks = ClusterSpec(cluster).num_tasks(ps.job or "ps")
    if ps_tasks == 0:
        # As in TensorFlow, `device(None)` then ignores outer blocks.
        return None
    choose = RoundRobin(ps_tasks) if choice is None else choice
    if not callable(choose):
        raise TypeError(f"replica_device_setter: choice must be a function, got {choice!r}")

    def place(thing: PlacementRequest) -> str:
        if thing.device and not merge_devices:
            return thing.device
        # Settings of inner blocks, which take precedence below.
        own = DeviceSpec.from_string(thing.device)
        if thing.type not in ps_types:
            return worker.make_merged_spec(own).to_string()
        chosen = ps
        # A thing that names another job takes no turn, so the places of later things stay the same.
        if ps.job is not None and own.job in (None, ps.job):
            chosen = ps.replace(task=choose(thing))
        # The device of inner blocks takes precedence, also over the chosen task.
        return chosen.make_merged_spec(own).to_string()

    return place
