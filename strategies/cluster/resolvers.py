"""Cluster resolvers: where the cluster specification comes from.

| source | specification | this process |
| --- | --- | --- |
| `SimpleClusterResolver` | given | given, or by rank |
| `RanksClusterResolver` | the ranks, divided by `UNISONO_CLUSTER=ps:2,worker:*` | by rank |
| `TFConfigClusterResolver` | the environment variable `TF_CONFIG` | the same |
| `SlurmClusterResolver` | the Slurm step | the same |
| `TPUClusterResolver` | the ranks, all workers | by rank |
| `UnionResolver` | several others together | that of the first one |
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import collectives as cc
from strategies.cluster import gpus
from strategies.cluster.spec import ClusterSpec

__all__ = [
    "ClusterResolver",
    "RanksClusterResolver",
    "SimpleClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
    "from_environment",
    "with_scheme",
]


_log = logging.getLogger(__name__)


class ClusterResolver(ABC):
    """Knows a cluster, and which task of it this process is.

    Attributes:
        task_type: the job of this process; None to leave it to the ranks.
        task_id: its index there, or None.
    """

    task_type: str | None = None
    task_id: int | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the specification; empty if there is no cluster."""

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return a task's address, this process's own if it is not named; "" if that is unknown."""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        return "" if job is None or index is None else self.cluster_spec().task_address(job, index)

    def num_accelerators(self) -> dict[str, int]:
        """Return how many devices of each type, besides CPUs, this process sees."""
        return {"GPU": len(gpus.visible())}


class SimpleClusterResolver(ClusterResolver):
    """A specification that is known already.

    Args:
        cluster_spec: of the cluster.
        master: address to name instead of a task's.
        task_type: the job of this process.
        task_id: its index there.

    Raises:
        TypeError: something else than a `ClusterSpec` and text.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        *,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"SimpleClusterResolver: expected a ClusterSpec, got {cluster_spec!r}")
        if not isinstance(master, str):
            raise TypeError(f"SimpleClusterResolver: master must be text, got {master!r}")
        self._spec = cluster_spec
        self._master = master
        self.task_type = task_type
        self.task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the specification that was given."""
        return self._spec

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return the address of a task that is named here, else the one that was given."""
        if task_type is not None and task_id is not None:
            return self._spec.task_address(task_type, task_id)
        return self._master


class RanksClusterResolver(ClusterResolver):
    """The ranks of an MPI job, divided by the environment variable `UNISONO_CLUSTER`.

    Without it all ranks are workers. Ranks are given to the jobs in alphabetical order.

    Args:
        ranks: a communicator, or how many ranks there are; None for all ranks of the job.
        environ: to read, `os.environ` if None.
    """

    def __init__(
        self,
        ranks: cc.Communicator | int | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._ranks = ranks
        self._text = _variable(environ, "UNISONO_CLUSTER")

    def cluster_spec(self) -> ClusterSpec:
        """Return the specification.

        Raises:
            ValueError: the variable cannot be read, or names more or fewer tasks than ranks.
        """
        if not self._text:
            return ClusterSpec.from_ranks(self._ranks)
        try:
            return ClusterSpec.from_text(self._text, self._ranks)
        except ValueError as error:
            raise ValueError(f"UNISONO_CLUSTER: {error}") from None


class TFConfigClusterResolver(ClusterResolver):
    """What the environment variable `TF_CONFIG` says.

    It holds JSON: {"cluster": {job: [address, ...]}, "task": {"type": job, "index": number},
    "rpc_layer": text, "session_master": address}, all of which may be missing.

    Args:
        task_type: instead of the variable's.
        task_id: instead of the variable's.
        rpc_layer: instead of the variable's; the scheme of addresses in `master`.
        environ: to read, `os.environ` if None.

    Raises:
        ValueError: the variable is not of this form.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        config = _config(_variable(environ, "TF_CONFIG"))
        task = _part(config, "task", dict, {})
        self._spec = ClusterSpec(_part(config, "cluster", dict, {}))
        self._session_master = _part(config, "session_master", str, None)
        self.rpc_layer = rpc_layer or _part(config, "rpc_layer", str, None)
        self.task_type = _part(task, "type", str, None) if task_type is None else task_type
        index = task.get("index") if task_id is None else task_id
        if index is not None and not str(index).isdecimal():
            raise ValueError(f"TF_CONFIG: the task's index must be a number >= 0, got {index!r}")
        self.task_id = None if index is None else int(index)

    def cluster_spec(self) -> ClusterSpec:
        """Return the specification; an empty one if the variable has none."""
        return self._spec

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return session_master if it is set, "" for a cluster of one task, else an address."""
        if self._session_master is not None:
            return str(self._session_master)
        if len(self._spec.tasks()) <= 1:
            return ""
        return with_scheme(self.rpc_layer, super().master(task_type, task_id))


class TPUClusterResolver(ClusterResolver):
    """The TPUs of this job: those that JAX finds in each of its ranks.

    Args:
        tpu: "local", or None or "" for the same. Another name, such as other programs have for a
            machine somewhere else, is kept, of no effect, and told in the log.
        ranks: a communicator, or how many ranks there are; None for all ranks of the job.

    Attributes:
        tpu: as given.
    """

    def __init__(
        self, tpu: str | None = None, *, ranks: cc.Communicator | int | None = None
    ) -> None:
        self.tpu = tpu
        self._ranks = ranks
        if tpu not in (None, "", "local"):
            _log.warning("TPUClusterResolver: the TPUs of this job are used, and not %r", tpu)

    def cluster_spec(self) -> ClusterSpec:
        """Return the ranks as workers."""
        return ClusterSpec.from_ranks(self._ranks)

    def devices(self) -> tuple[str, ...]:
        """Return the names of this process's TPUs, or of whatever devices JAX has instead.

        JAX is started for that; the log tells if it finds no TPU.

        Raises:
            RuntimeError: JAX is not installed, or cannot start.
        """
        jax = _jax()
        try:
            found = jax.local_devices(backend="tpu")
        except RuntimeError:
            found = jax.local_devices()
            _log.warning(
                "TPUClusterResolver: JAX finds no TPU; what it has takes its place: %d of kind %s",
                len(found), found[0].platform,
            )  # fmt: skip
        return tuple(f"/{device.platform}:{i}" for i, device in enumerate(found))

    def num_accelerators(self) -> dict[str, int]:
        """Return how many devices of each type, besides CPUs, this process has for JAX.

        Raises:
            RuntimeError: as `devices`.
        """
        kinds = [name.split(":")[0].strip("/").upper() for name in self.devices()]
        return {kind: kinds.count(kind) for kind in kinds if kind != "CPU"}


class UnionResolver(ClusterResolver):
    """Several clusters as one.

    Tasks of the same job are appended where all indices are there, else joined by index. This
    process is the task that the first of the resolvers says.

    Args:
        resolvers: at least one.

    Raises:
        ValueError: there is none.
        TypeError: something else than a resolver.
    """

    def __init__(self, *resolvers: ClusterResolver) -> None:
        if not resolvers:
            raise ValueError("UnionResolver: expected at least one resolver, got none")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"UnionResolver: expected resolvers, got {resolver!r}")
        self._resolvers = resolvers
        self.task_type = resolvers[0].task_type
        self.task_id = resolvers[0].task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the joined specification.

        Raises:
            KeyError: two sparse jobs have a task of the same index.
        """
        jobs: dict[str, Any] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                jobs[job] = _join(job, jobs[job], tasks) if job in jobs else tasks
        return ClusterSpec(jobs)

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return a named task's address, else what the first resolver says."""
        if task_type is not None and task_id is not None:
            return self.cluster_spec().task_address(task_type, task_id)
        return self._resolvers[0].master()


def from_environment(
    ranks: cc.Communicator | int | None = None, *, environ: Mapping[str, str] | None = None
) -> ClusterResolver:
    """Return a resolver of what the environment says.

    `UNISONO_CLUSTER` counts first, then a `TF_CONFIG` with a cluster. Without them all ranks are
    workers.
    """
    if not _variable(environ, "UNISONO_CLUSTER"):
        configured = TFConfigClusterResolver(environ=environ)
        if configured.cluster_spec():
            return configured
    return RanksClusterResolver(ranks, environ=environ)


def with_scheme(rpc_layer: str | None, address: str) -> str:
    """Return an address as a URL, if there is a scheme."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def _jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise RuntimeError(
            "TPUClusterResolver: TPUs are reached through JAX, which is not installed: "
            "`pip install jax optax`, and for TPUs `jax[tpu]`"
        ) from error
    return jax


def _join(job: str, some: Any, others: Any) -> Any:
    if isinstance(some, list) and isinstance(others, list):
        return some + others
    joined = dict(enumerate(some)) if isinstance(some, list) else dict(some)
    for index, address in enumerate(others) if isinstance(others, list) else others.items():
        if index in joined:
            raise KeyError(
                f"UnionResolver: two clusters have this task, expected different indices, got "
                f"{index} (job: {job})"
            )
        joined[index] = address
    return joined


def _variable(environ: Mapping[str, str] | None, name: str) -> str:
    return (os.environ if environ is None else environ).get(name, "").strip()


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text) if text else {}
    except ValueError as error:
        raise ValueError(f"TF_CONFIG: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"TF_CONFIG: expected an object, got {text[:80]!r}")
    return config


def _part(config: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    found = config.get(name, default)
    if found is not default and not isinstance(found, kind):
        raise ValueError(f"TF_CONFIG: {name} has the wrong type, got {found!r}")
    return found
