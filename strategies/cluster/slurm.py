"""Cluster resolver for Slurm steps.

Words: a step has *ranks*, numbered node by node; as many as a node has of them are its tasks. Jobs
take the ranks in alphabetical order.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

import collectives as cc
from strategies.cluster import gpus
from strategies.cluster.resolvers import ClusterResolver, with_scheme
from strategies.cluster.spec import ClusterSpec
from strategies.core.process_group import ProcessGroup

__all__ = ["SlurmClusterResolver", "expand_hostlist", "expand_tasks_per_node"]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_MOST = 1 << 20  # nodes or tasks in a text: more is a mistake that would fill the memory


def expand_hostlist(text: str) -> list[str]:
    """Return the names of nodes from Slurm's short form; zeros in front are kept.

    Raises:
        ValueError: it is not of this form.

    Example:
        >>> expand_hostlist("n[1-2],m5,o[03-04,6]")
        ['n1', 'n2', 'm5', 'o03', 'o04', 'o6']
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|.", text):
        if part == ",":
            continue
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if any(c in "[]," for piece in pieces[::2] for c in piece):
            raise ValueError(f"expand_hostlist: not a list of nodes, got {text!r}")
        found = [pieces[0].strip()]
        for ranges, after in zip(pieces[1::2], pieces[2::2], strict=True):
            found = [before + n + after for before in found for n in _numbers(ranges, text)]
            _check_bound(len(found) + len(names), text)
        names += found
    if not text.strip() or "" in names or ",," in text or text.strip(",") != text:
        raise ValueError(f"expand_hostlist: not a list of nodes, got {text!r}")
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of what stands in brackets, as wide as they are written."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f"expand_hostlist: not a range of numbers, got {part!r} (nodes: {text})"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        _check_bound(last - first + len(numbers), text)
        numbers += [f"{n:0{len(match[1])}d}" for n in range(first, last + 1)]
    return numbers


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of every node from Slurm's short form.

    Raises:
        ValueError: it is not of this form.

    Example:
        >>> expand_tasks_per_node("3(x2),2,11(x4)")
        [3, 3, 2, 11, 11, 11, 11]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"expand_tasks_per_node: expected as 3(x2),2, got {text!r}")
        times = int(match[2] or 1)
        _check_bound(times + len(counts), text)
        counts += [int(match[1])] * times
    return counts


def _check_bound(count: int, text: str) -> None:
    if count > _MOST:
        raise ValueError(f"slurm: expected at most {_MOST} nodes, got {text!r}")


class _Layout(NamedTuple):
    """Which rank this is, and for every rank its node and its number there."""

    rank: int
    places: list[tuple[str, int]]


class SlurmClusterResolver(ClusterResolver):
    """The tasks of the Slurm step that this process belongs to, with or without GPUs.

    Args:
        jobs: job -> number of tasks; None for workers alone.
        comm: ranks that mpirun has started inside of a Slurm job: MPI is asked where they are, and
            making the resolver is *collective*. None: Slurm is asked, for a step that srun has
            started.
        port_base: port of a node's first task in addresses.
        gpus_per_node: None for those that this process sees.
        gpus_per_task: None to divide a node's GPUs among as many tasks as the fullest node has.
        tasks_per_node: at most, for all nodes, in the order of nodes, or by name; None to ask
            Slurm.
        auto_set_gpu: show this process its own GPUs only, by CUDA_VISIBLE_DEVICES.
        rpc_layer: scheme of addresses in `master`.
        environ: to read, and to write CUDA_VISIBLE_DEVICES to; `os.environ` if None.

    Raises:
        RuntimeError: this is not a Slurm step, or the step has other numbers of tasks or GPUs than
            are asked for.
        ValueError: what Slurm says cannot be read.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        *,
        comm: cc.Communicator | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Sequence[int] | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        env = os.environ if environ is None else environ
        self.rpc_layer = rpc_layer

        def prepare() -> list[str]:
            layout = _of_slurm(env, tasks_per_node) if comm is None else _of_mpi(comm, nodes)
            self._spec, self.task_type, self.task_id = _name(layout, jobs, port_base)
            return _share(env, layout, gpus_per_node, gpus_per_task)

        if comm is None:
            self._gpus = prepare()
        else:
            nodes = comm.allgather_object(env.get("SLURMD_NODENAME") or platform.node())
            self._gpus = ProcessGroup(comm).run_then_agree("SlurmClusterResolver", prepare)
        if auto_set_gpu and self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)

    def cluster_spec(self) -> ClusterSpec:
        """Return the specification of the step."""
        return self._spec

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return a task's address, that of the first task if none is named."""
        if task_type is None or task_id is None:
            task_type, task_id = self._spec.tasks()[0]
        return with_scheme(self.rpc_layer, self._spec.task_address(task_type, task_id))

    def num_accelerators(self) -> dict[str, int]:
        """Return how many GPUs this task has of its own."""
        return {"GPU": len(self._gpus)}


def _of_mpi(comm: cc.Communicator, nodes: Sequence[str]) -> _Layout:
    places = [(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)]
    return _Layout(comm.rank, places)


def _of_slurm(
    env: Mapping[str, str], tasks_per_node: int | Sequence[int] | Mapping[str, int] | None
) -> _Layout:
    if "OMPI_COMM_WORLD_SIZE" in env:
        raise RuntimeError(
            "SlurmClusterResolver: this rank was started by mpirun, of which Slurm knows nothing, "
            "expected srun, or comm= with the communicator of all ranks"
        )
    rank, size = _number(env, "PROCID"), _number(env, "STEP_NUM_TASKS")
    hosts = expand_hostlist(_variable(env, "STEP_NODELIST"))
    counts = _counts(env, hosts, tasks_per_node)
    places = [(host, i) for host, n in zip(hosts, counts, strict=True) for i in range(n)]
    distribution = re.split("[:,]", env.get("SLURM_DISTRIBUTION", "block"))[0].lower()
    if distribution == "cyclic":
        places = sorted(places, key=lambda place: place[1])  # of equals the order of nodes
    elif distribution in ("plane", "arbitrary") and len(hosts) > 1:
        raise RuntimeError(
            f"SlurmClusterResolver: it is not known which rank is on which node, expected "
            f"--distribution block or cyclic, got {distribution}"
        )
    if not rank < size <= len(places):
        raise RuntimeError(
            f"SlurmClusterResolver: expected places for all tasks of the step, {size}, got "
            f"{len(places)} (tasks per node: {counts}, rank {rank})"
        )
    return _Layout(rank, places[:size])


def _name(
    layout: _Layout, jobs: Mapping[str, int] | None, port_base: int
) -> tuple[ClusterSpec, str, int]:
    """Return the specification, and job and index of this rank."""
    size = len(layout.places)
    wanted = {"worker": size} if jobs is None else dict(jobs)
    asked = sum(wanted.values())
    if asked > size:
        raise RuntimeError(
            f"SlurmClusterResolver: requested {asked} tasks but only {size} were assigned"
        )
    if asked < size:
        raise RuntimeError(
            f"SlurmClusterResolver: requested {asked} tasks of the {size} that were assigned, "
            f"expected a job for each"
        )
    names = [(job, i) for job in sorted(wanted) for i in range(wanted[job])]
    tasks: dict[str, list[str]] = {job: [] for job in wanted}
    for (job, _), (host, local) in zip(names, layout.places, strict=True):
        tasks[job].append(f"{host}:{port_base + local}")
    return ClusterSpec(tasks), *names[layout.rank]


def _share(
    env: Mapping[str, str], layout: _Layout, per_node: int | None, per_task: int | None
) -> list[str]:
    """Return this rank's own GPUs."""
    seen = gpus.visible(env)
    available = len(seen) if per_node is None else per_node
    most = 1 + max(local for _, local in layout.places)
    each = available // most if per_task is None else per_task
    if each * most > available:
        raise RuntimeError(
            f"SlurmClusterResolver: requested more GPUs per node than available, expected at "
            f"most {available}, got {each} for each of {most} tasks"
        )
    listed = seen if len(seen) >= available else [str(i) for i in range(available)]
    local = layout.places[layout.rank][1]
    return listed[local * each : (local + 1) * each]


def _variable(env: Mapping[str, str], name: str) -> str:
    found = env.get(f"SLURM_{name}", "").strip()
    if not found:
        raise RuntimeError(
            f"SlurmClusterResolver: SLURM_{name} is not set, expected a process that srun has "
            f"started"
        )
    return found


def _number(env: Mapping[str, str], name: str) -> int:
    text = _variable(env, name)
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"SlurmClusterResolver: SLURM_{name} must be a number >= 0, got {text!r}")
    return int(text)


def _counts(
    env: Mapping[str, str],
    hosts: Sequence[str],
    given: int | Sequence[int] | Mapping[str, int] | None,
) -> list[int]:
    """Return the number of tasks of every node."""
    if given is None:
        counts = expand_tasks_per_node(_variable(env, "STEP_TASKS_PER_NODE"))
    elif isinstance(given, int):
        counts = [given] * len(hosts)
    elif isinstance(given, Mapping):
        counts = [given.get(host, 0) for host in hosts]
    else:
        counts = list(given)
    if len(counts) != len(hosts):
        raise RuntimeError(
            f"SlurmClusterResolver: expected a number of tasks for each of {len(hosts)} nodes, "
            f"got {counts}"
        )
    return counts
