"""Cluster resolver for Slurm steps.

A step has *ranks*, numbered node by node; the ranks on a node are its tasks. Jobs take the ranks in
alphabetical order.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

import collectives as cc
from collectives import extend
from strategies.cluster.resolvers import ClusterResolver, with_scheme
from strategies.cluster.spec import ClusterSpec
from strategies.core.process_group import ProcessGroup

__all__ = ["SlurmClusterResolver", "expand_hostlist", "expand_tasks_per_node"]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_MOST = 1 << 20  # nodes or tasks: a larger number is a mistake, and would exhaust memory


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's short form of node names; leading zeros are kept.

    Raises:
        ValueError: the text is invalid.

    Example:
        >>> expand_hostlist("n[1-2],m5,o[03-04,6]")
        ['n1', 'n2', 'm5', 'o03', 'o04', 'o6']
    """
    names: list[str] = []
    # Commas separate nodes only outside of brackets. A character that fits nowhere is a part of its
    # own, and fails below.
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|.", text):
        if part == ",":
            continue
        # Text and brackets alternate: even pieces are text, odd ones ranges.
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if any(c in "[]," for piece in pieces[::2] for c in piece):
            raise ValueError(f"expand_hostlist: not a list of nodes, got {text!r}")
        found = [pieces[0].strip()]
        for ranges, after in zip(pieces[1::2], pieces[2::2], strict=True):
            found = [before + n + after for before in found for n in _numbers(ranges, text)]
            # Checked while expanding, because each bracket multiplies the number of names.
            _check_bound(len(found) + len(names), text)
        names += found
    if not text.strip() or "" in names or ",," in text or text.strip(",") != text:
        raise ValueError(f"expand_hostlist: not a list of nodes, got {text!r}")
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of a bracket, with their leading zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f"expand_hostlist: not a range of numbers, got {part!r} (nodes: {text})"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        _check_bound(last - first + len(numbers), text)
        # Padded to the width of the first number: Slurm writes o[03-10] for o03 .. o10.
        numbers += [f"{n:0{len(match[1])}d}" for n in range(first, last + 1)]
    return numbers


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form of the number of tasks of every node.

    Raises:
        ValueError: the text is invalid.

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
    """This rank, and for every rank its node and local rank."""

    rank: int
    places: list[tuple[str, int]]


class SlurmClusterResolver(ClusterResolver):
    """The tasks of the Slurm step of this process, with or without GPUs.

    The tasks of a node divide its GPUs. A task that sees fewer GPUs than its step has on the node
    keeps them, because Slurm has bound them to the task (`srun --gpus-per-task`, `--gpu-bind`).

    Args:
        jobs: job -> number of tasks; None for workers only.
        comm: ranks that mpirun started inside a Slurm job; MPI gives their nodes, and the
            constructor is *collective*. None: a step started by srun, described by Slurm.
        port_base: port of a node's first task in addresses.
        gpus_per_node: None for the visible GPUs.
        gpus_per_task: None to divide a node's GPUs by the number of tasks of the fullest node.
        tasks_per_node: a maximum for all nodes, a sequence in node order, or a dict by name; None
            for Slurm's numbers.
        auto_set_gpu: restrict this process to its own GPUs by CUDA_VISIBLE_DEVICES.
        rpc_layer: scheme of addresses in `master`.
        environ: environment to read, and to set CUDA_VISIBLE_DEVICES in; None for `os.environ`.

    Raises:
        RuntimeError: this is not a Slurm step, or it has fewer or more tasks or GPUs than
            requested.
        ValueError: a variable of Slurm is invalid.
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
            bound = comm is None and _is_bound(env, gpus_per_node)
            return _share(env, layout, gpus_per_node, gpus_per_task, bound=bound)

        if comm is None:
            self._gpus = prepare()
        else:
            # Outside of `prepare`, which must not communicate: it may raise on one rank alone.
            nodes = comm.allgather_object(env.get("SLURMD_NODENAME") or platform.node())
            self._gpus = ProcessGroup(comm).run_then_agree("SlurmClusterResolver", prepare)
        if auto_set_gpu and self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)

    def cluster_spec(self) -> ClusterSpec:
        """Return the specification of the step."""
        return self._spec

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return a task's address, by default that of the first task."""
        if task_type is None or task_id is None:
            task_type, task_id = self._spec.tasks()[0]
        return with_scheme(self.rpc_layer, self._spec.task_address(task_type, task_id))

    def num_accelerators(self) -> dict[str, int]:
        """Return the number of this task's own GPUs."""
        return {"GPU": len(self._gpus)}


def _of_mpi(comm: cc.Communicator, nodes: Sequence[str]) -> _Layout:
    # The local rank is the number of lower ranks on the node.
    places = [(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)]
    return _Layout(comm.rank, places)


def _of_slurm(
    env: Mapping[str, str], tasks_per_node: int | Sequence[int] | Mapping[str, int] | None
) -> _Layout:
    # Slurm's variables then describe the daemons of mpirun, one per node, not the ranks.
    if "OMPI_COMM_WORLD_SIZE" in env:
        raise RuntimeError(
            "SlurmClusterResolver: this rank was started by mpirun, which Slurm does not know, "
            "expected srun, or comm= with the communicator of all ranks"
        )
    rank, size = _number(env, "PROCID"), _number(env, "STEP_NUM_TASKS")
    hosts = expand_hostlist(_variable(env, "STEP_NODELIST"))
    # Block distribution, Slurm's default: the ranks fill one node after the other.
    counts = _counts(env, hosts, tasks_per_node)
    places = [(host, i) for host, n in zip(hosts, counts, strict=True) for i in range(n)]
    distribution = re.split("[:,]", env.get("SLURM_DISTRIBUTION", "block"))[0].lower()
    if distribution == "cyclic":
        places = sorted(places, key=lambda place: place[1])  # stable: ties keep the order of nodes
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
    # `tasks_per_node` may allow more tasks than the step has.
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
    # In the order in which `ClusterSpec` assigns ranks.
    names = [(job, i) for job in sorted(wanted) for i in range(wanted[job])]
    tasks: dict[str, list[str]] = {job: [] for job in wanted}
    for (job, _), (host, local) in zip(names, layout.places, strict=True):
        # Addresses only have to differ: ranks connect through MPI.
        tasks[job].append(f"{host}:{port_base + local}")
    return ClusterSpec(tasks), *names[layout.rank]


def _is_bound(env: Mapping[str, str], per_node: int | None) -> bool:
    """Return whether this task sees only its own GPUs, as with `srun --gpus-per-task`."""
    if "CUDA_VISIBLE_DEVICES" not in env:
        return False
    # Slurm counts the GPUs of the step on this node, including those of other tasks.
    on_node = _number(env, "GPUS_ON_NODE") if "SLURM_GPUS_ON_NODE" in env else per_node or 0
    return 0 < len(extend.visible_gpus(env)) < on_node


def _share(
    env: Mapping[str, str],
    layout: _Layout,
    per_node: int | None,
    per_task: int | None,
    *,
    bound: bool,
) -> list[str]:
    """Return this rank's own GPUs."""
    seen = extend.visible_gpus(env)
    available = len(seen) if per_node is None else per_node
    local = layout.places[layout.rank][1]
    # Tasks of the fullest node, so that every task gets the same number of GPUs.
    most = 1 + max(local for _, local in layout.places)
    if bound:
        # As on a node of its own: other tasks have no share in the visible GPUs.
        available, local, most = len(seen), 0, 1
    each = available // most if per_task is None else per_task
    if each * most > available:
        raise RuntimeError(
            f"SlurmClusterResolver: requested more GPUs per node than available, expected at "
            f"most {available}, got {each} for each of {most} tasks"
        )
    # If fewer are visible than `gpus_per_node` says, devices are numbered instead.
    listed = seen if len(seen) >= available else [str(i) for i in range(available)]
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
    # `int` would also accept digits of other scripts, signs and underscores.
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
