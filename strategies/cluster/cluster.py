"""`Cluster`: the task and the devices of every rank.

| job | tasks | number |
| --- | --- | --- |
| chief | train, and do one-time work; without a chief, worker 0 does that | 0 or 1 |
| worker | train | any |
| ps | hold variables for other tasks | any |
| evaluator | evaluates checkpoints, independently of other tasks | 0 or 1 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import collectives as cc
from collectives import extend
from strategies.cluster import resolvers
from strategies.cluster.device_spec import DeviceSpec
from strategies.cluster.placement import Placer, devices_of
from strategies.cluster.resolvers import ClusterResolver, TPUClusterResolver
from strategies.cluster.scopes import PlacementRequest
from strategies.cluster.spec import ClusterSpec
from strategies.core import agreement
from strategies.core.process_group import ProcessGroup
from strategies.core.validation import integer

__all__ = ["Cluster"]

_JOBS = ("chief", "evaluator", "ps", "worker")


class _TaskInfo(NamedTuple):
    """A rank's own task, as it reports it to the other ranks."""

    job: str | None
    task: int | None
    cpus: int
    gpus: int
    others: Mapping[str, int]


class Cluster:
    """The tasks of a cluster, one per rank; open it with `with` on all ranks.

    *Collective*: construction and closing. Ranks take the tasks in the order of job names and
    indices, unless their resolver assigns the tasks.

    Args:
        spec: the jobs, from a resolver, a `ClusterSpec` or a dict; None for the environment:
            `UNISONO_CLUSTER`, else `TF_CONFIG`, else all ranks are workers.
        comm: one rank per task; the whole job if None.
        cpus: number of CPU devices of this task; any number, because they are names for threads.
        gpus: number of its GPU devices; None for the visible ones.
        others: type, such as "TPU" -> number of its devices; None for those of a
            `TPUClusterResolver`.
        soft_placement: place things on another device of the same task if theirs does not exist.
        log_device_placement: log the device of each thing at level INFO.

    Raises:
        ValueError: an unknown job, more than one chief or evaluator, or a number of ranks other
            than that of tasks; on all ranks.
        TypeError: `spec` is not a cluster specification; on all ranks.
        MismatchError: the ranks have different specifications; on all ranks.

    Attributes:
        comm: all ranks.
        spec: the jobs.
        job: job of this rank's task.
        task_index: index of this rank's task in its job.
        workers: communicator of the chief and the workers, in this order; None on other ranks.
        placer: rules of placement, and all devices.

    Example:
        >>> with Cluster({"worker": ["rank:0"]}) as cluster:
        ...     cluster.job, cluster.task_index, cluster.is_chief, cluster.rank_of("worker", 0)
        ('worker', 0, True, 0)
    """

    def __init__(
        self,
        spec: ClusterSpec | ClusterResolver | Mapping[str, Any] | None = None,
        comm: cc.Communicator | None = None,
        *,
        cpus: int = 1,
        gpus: int | None = None,
        others: Mapping[str, int] | None = None,
        soft_placement: bool = False,
        log_device_placement: bool = False,
    ) -> None:
        self.comm = extend.comm_or_world(comm, "Cluster")
        ranks = ProcessGroup(self.comm)
        # Reads the environment, which may be invalid on one rank alone.
        found, card = ranks.run_then_agree(
            "Cluster", lambda: _own_task(spec, self.comm, cpus, gpus, others)
        )
        # Compared as text with the addresses, so that an error shows the first task that differs.
        tasks = [f"{job}:{i} at {found.task_address(job, i)}" for job, i in found.tasks()]
        facts = [*tasks, f"soft_placement={soft_placement}"]
        agreement.compare(self.comm, "Cluster", lambda: (None, facts))
        self.spec = found
        cards = self.comm.allgather_object(card)
        # Every rank has the same cards, so every rank computes the same tasks.
        self._tasks = _tasks(found, cards)
        self._ranks = {task: rank for rank, task in enumerate(self._tasks)}
        self.job, self.task_index = self._tasks[self.comm.rank]
        # Devices may differ per rank: each rank has reported its own, and all ranks place alike.
        own = {task: cards[self._ranks[task]] for task in found.tasks()}
        self.placer = Placer(
            {task: devices_of(card.cpus, card.gpus, card.others) for task, card in own.items()},
            soft_placement=soft_placement,
            log_device_placement=log_device_placement,
        )
        # Last, because all ranks take part: an error above has been raised on all of them.
        self.workers = self.comm.group(self.training_ranks)

    @property
    def training_ranks(self) -> list[int]:
        """Ranks of the chief and the workers, in this order."""
        return [rank for task, rank in sorted(self._ranks.items()) if task[0] in _TRAINING]

    @property
    def is_chief(self) -> bool:
        """Whether this rank does one-time work: it is the chief, or worker 0 without a chief."""
        return self.workers is not None and self.workers.rank == 0

    def rank_of(self, job: str, task: int) -> int:
        """Return the rank of a task.

        Raises:
            ValueError: the job or task does not exist.
        """
        # Only for its error, which lists the tasks that exist.
        self.spec.task_address(job, task)
        return self._ranks[job, task]

    def task_of(self, rank: int) -> tuple[str, int]:
        """Return job and index of a rank's task.

        Raises:
            ValueError: the rank does not exist.
        """
        if not 0 <= rank < len(self._tasks):
            raise ValueError(
                f"cluster: no such rank, expected 0 .. {len(self._tasks) - 1}, got {rank}"
            )
        return self._tasks[rank]

    def device_of(self, rank: int) -> str:
        """Return the device string of a rank's task, such as /job:worker/task:1."""
        job, index = self.task_of(rank)
        return f"/job:{job}/task:{index}"

    def ranks_of(self, job: str) -> list[int]:
        """Return the ranks of a job's tasks by index; empty if the job does not exist."""
        return [rank for task, rank in sorted(self._ranks.items()) if task[0] == job]

    def devices(self) -> list[str]:
        """Return the names of all devices of all tasks."""
        return [device.to_string() for device in self.placer.devices()]

    def place(self, thing: PlacementRequest) -> DeviceSpec:
        """Return the device of a thing, from its own device and the enclosing `device` blocks.

        Raises:
            InvalidArgumentError: the device does not exist, or cannot hold the thing.
        """
        return self.placer.place(thing)

    def locate(self, thing: PlacementRequest) -> int:
        """Return the rank of a thing's task; arguments and errors as `place`."""
        return self.find(thing)[0]

    def find(self, thing: PlacementRequest) -> tuple[int, DeviceSpec]:
        """Return the rank of a thing's task, and its device; arguments and errors as `place`."""
        device = self.place(thing)
        assert device.job is not None
        assert device.task is not None
        return self._ranks[device.job, device.task], device

    def close(self) -> None:
        """Release `workers`; *collective* over them. Closing twice is harmless."""
        if self.workers is not None:
            self.workers.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            # After an error other ranks may not arrive, and closing would wait for them.
            self.close()

    def __repr__(self) -> str:
        return f"Cluster({self.device_of(self.comm.rank)} of {self.spec})"


_TRAINING = ("chief", "worker")  # a chief sorts first and so is rank 0 of `workers`


def _own_task(
    spec: ClusterSpec | ClusterResolver | Mapping[str, Any] | None,
    comm: cc.Communicator,
    cpus: int,
    gpu_count: int | None,
    others: Mapping[str, int] | None,
) -> tuple[ClusterSpec, _TaskInfo]:
    """Return the specification, and this rank's own task."""
    resolver = resolvers.from_environment(comm) if spec is None else spec
    known = resolver if isinstance(resolver, ClusterResolver) else None
    found = ClusterSpec(known.cluster_spec() if known else resolver)  # type: ignore[arg-type]
    _check_roles(found)
    tasks = found.tasks()
    if len(tasks) != comm.size:
        raise ValueError(
            f"Cluster: expected a rank for each of {len(tasks)} tasks, got {comm.size} ranks "
            f"({found})"
        )
    job, index = (known.task_type, known.task_id) if known else (None, None)
    if job is not None and index is not None:
        # A resolver may name a task outside of its own specification.
        found.task_address(job, index)
    elif job is not None or index is not None:
        raise ValueError(
            f"cluster: the task of this process is unknown, expected a job and an index, got "
            f"job {job!r} and index {index!r}"
        )
    # Counted without starting CUDA, which a task that only serves never needs.
    count = len(extend.visible_gpus()) if gpu_count is None else gpu_count
    integer("Cluster", "cpus", cpus)
    integer("Cluster", "gpus", count, least=0)
    if others is None:
        # Only this resolver: counting accelerators starts JAX, which other programs may not use.
        others = known.num_accelerators() if isinstance(known, TPUClusterResolver) else {}
        others = {kind: n for kind, n in others.items() if kind not in ("CPU", "GPU")}
    for kind, number in others.items():
        integer("Cluster", kind, number, least=0)
    return found, _TaskInfo(job, index, cpus, count, dict(others))


def _check_roles(spec: ClusterSpec) -> None:
    """Reject unknown jobs, and more than one chief or evaluator."""
    for job in spec.jobs:
        if job not in _JOBS:
            raise ValueError(
                f"cluster: a job without a role, expected one of {' '.join(_JOBS)}, got {job!r}"
            )
        if job in ("chief", "evaluator") and spec.num_tasks(job) > 1:
            raise ValueError(f"cluster: expected at most one {job}, got {spec.num_tasks(job)}")


def _tasks(spec: ClusterSpec, cards: list[_TaskInfo]) -> list[tuple[str, int]]:
    """Return each rank's task."""
    said = [(card.job, card.task) for card in cards if card.job is not None]
    if not said:
        return spec.tasks()
    # Also catches a rank without a task of its own beside ranks that have one.
    if sorted(said) != sorted(spec.tasks()):
        raise ValueError(
            f"Cluster: expected a rank for each task of {spec.tasks()}, got, by rank, "
            f"{[(card.job, card.task) for card in cards]}"
        )
    return [(str(job), int(index or 0)) for job, index in said]
