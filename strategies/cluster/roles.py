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

__all__ = ["check", "normalised"]

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
