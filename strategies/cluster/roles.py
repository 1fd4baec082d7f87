"""What the jobs of a cluster are for.

| job | what its tasks do | how many |
| --- | --- | --- |
| chief | trains, and does what is done once; worker 0 does that where there is none | 0 or 1 |
| worker | trains | any number |
| ps | holds variables for the others | any number |
| evaluator | looks at what has been trained, apart from all others | 0 or 1 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.cluster.spec import ClusterSpec

__all__ = ["check", "collective_leader", "id_in_cluster", "is_chief", "normalised", "worker_count"]

_JOBS = ("chief", "evaluator", "ps", "worker")


def normalised(cluster: ClusterSpec | Mapping[str, Any]) -> ClusterSpec:
    """Return a cluster's specification whose jobs have roles.

    Raises:
        ValueError: another job than chief, evaluator, ps and worker, or more than one chief or
            evaluator.
        TypeError: neither a dict nor a `ClusterSpec`.
    """
    spec = ClusterSpec(cluster)
    for job in spec.jobs:
        if job not in _JOBS:
            raise ValueError(
                f"cluster: a job without a role, expected one of {' '.join(_JOBS)}, got {job!r}"
            )
        if job in ("chief", "evaluator") and spec.num_tasks(job) > 1:
            raise ValueError(f"cluster: expected at most one {job}, got {spec.num_tasks(job)}")
    return spec


def check(
    cluster: ClusterSpec | Mapping[str, Any], job: str | None, index: int | None
) -> ClusterSpec:
    """Return the specification in which this task is.

    Raises:
        ValueError: no job or index is given, or the cluster has no such task.
    """
    spec = normalised(cluster)
    if job is None or index is None:
        raise ValueError(
            f"cluster: which task this is has not been said, expected a job and an index, got "
            f"job {job!r} and index {index!r}"
        )
    spec.task_address(job, index)
    return spec


def is_chief(cluster: ClusterSpec | Mapping[str, Any], job: str, index: int) -> bool:
    """Tell whether a task does what is done once; the evaluator does so in its own cluster."""
    spec = check(cluster, job, index)
    if job == "worker":
        return not _count(spec, "chief") and index == spec.task_indices("worker")[0]
    return job in ("chief", "evaluator")


def collective_leader(cluster: ClusterSpec | Mapping[str, Any], job: str, index: int) -> str:
    """Return the device string of the task that leads those that train; "" if there is none.

    Example:
        >>> collective_leader({"worker": ["a:1", "b:1"]}, "worker", 1)
        '/job:worker/task:0'
    """
    spec = check(cluster, job, index)
    if job == "evaluator":
        return ""
    leader = "chief" if _count(spec, "chief") else "worker"
    if not _count(spec, leader):
        return ""
    return f"/job:{leader}/task:{spec.task_indices(leader)[0]}"


def worker_count(cluster: ClusterSpec | Mapping[str, Any], job: str) -> int:
    """Return how many tasks train with one of this job: chief and workers, or the evaluator.

    Raises:
        ValueError: the job does not train.
    """
    spec = normalised(cluster)
    if job == "evaluator" and _count(spec, "evaluator"):
        return 1
    if job not in ("chief", "worker") or not _count(spec, job):
        raise ValueError(
            f"worker_count: expected a job of the cluster that trains or evaluates, got {job!r}"
        )
    return _count(spec, "chief") + _count(spec, "worker")


def id_in_cluster(cluster: ClusterSpec | Mapping[str, Any], job: str, index: int) -> int:
    """Return a task's number among those that train together: the chief's is 0.

    Raises:
        ValueError: there is no such task, or its job does not train.
    """
    spec = check(cluster, job, index)
    if job in ("chief", "evaluator"):
        return 0
    if job != "worker":
        raise ValueError(f"id_in_cluster: expected a job that trains or evaluates, got {job!r}")
    return _count(spec, "chief") + spec.task_indices("worker").index(index)


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0
