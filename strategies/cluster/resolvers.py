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
from collectives import extend
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
    """Source of a cluster specification, and of this process's task.

    Attributes:
        task_type: job of this process; None to assign it by rank.
        task_id: index of its task there; None to assign it by rank.
    """

    task_type: str | None = None
    task_id: int | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the specification; empty if there is no cluster."""

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return a task's address, by default this process's own; "" if unknown."""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        return "" if job is None or index is None else self.cluster_spec().task_address(job, index)

    def num_accelerators(self) -> dict[str, int]:
        """Return the number of visible devices of each type except CPUs."""
        return {"GPU": len(extend.visible_gpus())}


class SimpleClusterResolver(ClusterResolver):
    """A given specification.

    Args:
        cluster_spec: the specification.
        master: address to return instead of a task's.
        task_type: job of this process.
        task_id: index of its task there.

    Raises:
        TypeError: an argument is not a `ClusterSpec` or a string.
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
        """Return the given specification."""
        return self._spec

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return the address of a named task, else the given address."""
        if task_type is not None and task_id is not None:
            return self._spec.task_address(task_type, task_id)
        return self._master


class RanksClusterResolver(ClusterResolver):
    """The ranks of an MPI job, divided by the environment variable `UNISONO_CLUSTER`.

    Without the variable all ranks are workers. Jobs take ranks in alphabetical order.

    Args:
        ranks: a communicator, or a number of ranks; None for all ranks of the job.
        environ: the environment; None for `os.environ`.
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
            ValueError: the variable is invalid, or its number of tasks is not that of ranks.
        """
        if not self._text:
            return ClusterSpec.from_ranks(self._ranks)
        try:
            return ClusterSpec.from_text(self._text, self._ranks)
        except ValueError as error:
            raise ValueError(f"UNISONO_CLUSTER: {error}") from None


class TFConfigClusterResolver(ClusterResolver):
    """The cluster of the environment variable `TF_CONFIG`.

    It holds JSON: {"cluster": {job: [address, ...]}, "task": {"type": job, "index": number},
    "rpc_layer": text, "session_master": address}; every entry is optional.

    Args:
        task_type: replaces the variable's.
        task_id: replaces the variable's.
        rpc_layer: replaces the variable's; the scheme of addresses in `master`.
        environ: the environment; None for `os.environ`.

    Raises:
        ValueError: the variable is invalid.
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
        # TensorFlow accepts the index as a number or as text.
        if index is not None and not str(index).isdecimal():
            raise ValueError(f"TF_CONFIG: the task's index must be a number >= 0, got {index!r}")
        self.task_id = None if index is None else int(index)

    def cluster_spec(self) -> ClusterSpec:
        """Return the specification; empty if the variable has none."""
        return self._spec

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return session_master if it is set, "" for a cluster of one task, else an address."""
        if self._session_master is not None:
            return str(self._session_master)
        if len(self._spec.tasks()) <= 1:
            # A single task trains locally, as in TensorFlow.
            return ""
        return with_scheme(self.rpc_layer, super().master(task_type, task_id))


class TPUClusterResolver(ClusterResolver):
    """The TPUs of this job: those that JAX finds in each rank.

    Args:
        tpu: "local", None or "". Another name, which other programs use for a remote machine, is
            stored, has no effect, and is logged.
        ranks: a communicator, or a number of ranks; None for all ranks of the job.

    Attributes:
        tpu: the argument.
    """

    def __init__(
        self, tpu: str | None = None, *, ranks: cc.Communicator | int | None = None
    ) -> None:
        self.tpu = tpu
        self._ranks = ranks
        # Programs for Cloud TPU pass a name here; they run unchanged.
        if tpu not in (None, "", "local"):
            _log.warning("TPUClusterResolver: the TPUs of this job are used, and not %r", tpu)

    def cluster_spec(self) -> ClusterSpec:
        """Return the ranks as workers."""
        return ClusterSpec.from_ranks(self._ranks)

    def devices(self) -> tuple[str, ...]:
        """Return the names of this process's TPUs, or of JAX's other devices without TPUs.

        Starts JAX, and logs if it finds no TPU.

        Raises:
            RuntimeError: JAX is not installed, or cannot start.
        """
        jax = _jax()
        try:
            found = jax.local_devices(backend="tpu")
        except RuntimeError:
            # Of JAX, for a platform that it does not find.
            found = jax.local_devices()
            _log.warning(
                "TPUClusterResolver: JAX finds no TPU; what it has takes its place: %d of kind %s",
                len(found), found[0].platform,
            )  # fmt: skip
        return tuple(f"/{device.platform}:{i}" for i, device in enumerate(found))

    def num_accelerators(self) -> dict[str, int]:
        """Return the number of JAX's devices of each type except CPUs.

        Raises:
            RuntimeError: as `devices`.
        """
        kinds = [name.split(":")[0].strip("/").upper() for name in self.devices()]
        return {kind: kinds.count(kind) for kind in kinds if kind != "CPU"}


class UnionResolver(ClusterResolver):
    """Several clusters as one.

    Tasks of the same job are appended if both jobs have all indices, else merged by index. The
    first resolver gives the task of this process.

    Args:
        resolvers: at least one.

    Raises:
        ValueError: no resolver was passed.
        TypeError: an argument is not a resolver.
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
        """Return a named task's address, else the first resolver's `master`."""
        if task_type is not None and task_id is not None:
            return self.cluster_spec().task_address(task_type, task_id)
        return self._resolvers[0].master()


def from_environment(
    ranks: cc.Communicator | int | None = None, *, environ: Mapping[str, str] | None = None
) -> ClusterResolver:
    """Return a resolver for the environment.

    `UNISONO_CLUSTER` takes precedence over a `TF_CONFIG` with a cluster. Without either all ranks
    are workers.
    """
    if not _variable(environ, "UNISONO_CLUSTER"):
        configured = TFConfigClusterResolver(environ=environ)
        if configured.cluster_spec():
            return configured  # without a cluster it describes a single process
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
    # Lists have no gaps, so the tasks of the second cluster follow those of the first.
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
    # The default may be None, which is not an instance of `kind`.
    if found is not default and not isinstance(found, kind):
        raise ValueError(f"TF_CONFIG: {name} has the wrong type, got {found!r}")
    return found
