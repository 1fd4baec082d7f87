"""Cluster specification: jobs and their tasks."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import collectives as cc
from strategies.core.validation import integer

__all__ = ["ClusterSpec"]

_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)


class ClusterSpec:
    """The jobs of a cluster, the indices of their tasks, and the tasks' addresses.

    Specifications with equal content are equal. A specification without tasks is false.

    Args:
        cluster: job -> list of addresses, or index -> address if indices are missing, or another
            `ClusterSpec`. An address is any string: ranks connect through MPI.

    Raises:
        TypeError: another type, or an address that is not a string, or an index that is not an
            integer.
        ValueError: an index is negative or occurs twice, or a job has an invalid name.

    Example:
        >>> spec = ClusterSpec({"ps": ["a:1"], "worker": {1: "b:1", 3: "c:1"}})
        >>> spec.jobs, spec.num_tasks("worker"), spec.job_tasks("worker")
        (['ps', 'worker'], 2, [None, 'b:1', None, 'c:1'])
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise TypeError(
                f"ClusterSpec: expected a dict of jobs or a ClusterSpec, got {cluster!r}"
            )
        # Sorted by name, because the order of jobs and tasks is the order of the ranks.
        self._jobs = {job: _tasks(job, cluster[job]) for job in sorted(map(_job_name, cluster))}

    @classmethod
    def from_ranks(cls, ranks: cc.Communicator | int | None = None, **tasks: int) -> ClusterSpec:
        """Divide ranks into jobs; the remaining ranks are workers.

        Jobs take ranks in alphabetical order: chief, evaluator, ps, worker.

        Args:
            ranks: a communicator, or a number of ranks; None for all ranks of the job.
            tasks: job -> number of its tasks, such as ps=2.

        Raises:
            ValueError: there are fewer ranks than tasks, or more with worker= given.

        Example:
            >>> ClusterSpec.from_ranks(4, ps=1)
            ClusterSpec({'ps': ['rank:0'], 'worker': ['rank:1', 'rank:2', 'rank:3']})
        """
        size = _size(ranks)
        counts = {
            job: integer("from_ranks", f"number of {job}", n, least=0) for job, n in tasks.items()
        }
        # Never negative: too many tasks are reported by `_divide`, with all numbers.
        counts.setdefault("worker", max(0, size - sum(counts.values())))
        return cls._divide(counts, size)

    @classmethod
    def from_text(cls, text: str, ranks: cc.Communicator | int | None = None) -> ClusterSpec:
        """Divide ranks as `from_ranks`, by text such as `"ps:2,worker:*"`; `*` takes the rest.

        Raises:
            ValueError: the text is invalid, or does not match the ranks.

        Example:
            >>> ClusterSpec.from_text("worker:*,ps:2", 3).as_dict()
            {'ps': ['rank:0', 'rank:1'], 'worker': ['rank:2']}
        """
        counts: dict[str, int] = {}
        rest = None
        for part in text.replace(" ", "").split(","):
            job, colon, number = part.partition(":")
            known = job in counts or job == rest
            if not colon or known or not (number.isdecimal() or (number == "*" and not rest)):
                raise ValueError(
                    f"from_text: not a list of jobs, expected one such as ps:2,worker:* with each "
                    f"job once and at most one *, got {text!r}"
                )
            if number == "*":
                rest = job
            else:
                counts[job] = int(number)
        size = _size(ranks)
        if rest:
            counts[rest] = max(0, size - sum(counts.values()))
        return cls._divide(counts, size)

    @classmethod
    def _divide(cls, counts: Mapping[str, int], size: int) -> ClusterSpec:
        needed = sum(counts.values())
        if needed != size:
            listed = ",".join(f"{job}:{counts[job]}" for job in sorted(counts))
            raise ValueError(
                f"cluster: the tasks do not match the ranks, expected {needed} ranks for {listed}, "
                f"got {size}"
            )
        ranks = iter(range(size))
        return cls(
            {job: [f"rank:{next(ranks)}" for _ in range(counts[job])] for job in sorted(counts)}
        )

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, sorted."""
        return list(self._jobs)

    def num_tasks(self, job: str) -> int:
        """Return the number of a job's tasks.

        Raises:
            ValueError: the job does not exist.
        """
        return len(self._job(job))

    def task_indices(self, job: str) -> list[int]:
        """Return the indices of a job's tasks, sorted."""
        return list(self._job(job))

    def task_address(self, job: str, index: int) -> str:
        """Return a task's address.

        Raises:
            ValueError: the job or task does not exist.
        """
        tasks = self._job(job)
        if index not in tasks:
            raise ValueError(
                f"cluster: no such task of job {job!r}, expected one of "
                f"{' '.join(map(str, tasks)) or 'none'}, got {index!r}"
            )
        return tasks[index]

    def job_tasks(self, job: str) -> list[str | None]:
        """Return the addresses of a job's tasks by index, with None for missing tasks."""
        tasks = self._job(job)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return job -> list of addresses, or index -> address if indices are missing."""
        return {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def tasks(self) -> list[tuple[str, int]]:
        """Return all (job, index) pairs in the order in which ranks are assigned."""
        return [(job, index) for job, tasks in self._jobs.items() for index in tasks]

    def __bool__(self) -> bool:
        return any(self._jobs.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    def __hash__(self) -> int:
        # Without the addresses: equal objects have equal hashes, which is all that is needed.
        return hash(tuple(self.tasks()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"

    def _job(self, job: str) -> dict[int, str]:
        if job not in self._jobs:
            raise ValueError(
                f"cluster: no such job in cluster, expected one of "
                f"{' '.join(self._jobs) or 'none'}, got {job!r}"
            )
        return self._jobs[job]


def _job_name(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"ClusterSpec: the name of a job must be text, got {job!r}")
    if not _NAME.fullmatch(job):
        raise ValueError(
            f"ClusterSpec: not the name of a job, expected letters, digits and _, got {job!r}"
        )
    return job


def _tasks(job: str, tasks: Any) -> dict[int, str]:
    """Return index -> address, sorted by index."""
    if isinstance(tasks, Mapping):
        pairs = [(_index(job, index), address) for index, address in tasks.items()]
    elif isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes)):
        pairs = list(enumerate(tasks))
    else:
        raise TypeError(
            f"ClusterSpec: the tasks of a job are neither a list nor a dict, got {tasks!r} "
            f"(job: {job})"
        )
    for index, address in pairs:
        if not isinstance(address, str):
            raise TypeError(
                f"ClusterSpec: an address must be text, got {address!r} (job: {job}, task {index})"
            )
    # A mapping may have an index as a number and again as text.
    found = dict(sorted(pairs))
    if len(found) < len(pairs):
        raise ValueError(f"ClusterSpec: an index is there twice, got {list(tasks)} (job: {job})")
    return found


def _index(job: str, index: Any) -> int:
    try:
        # JSON has only text as keys, so an index of TF_CONFIG may be text.
        number = int(index) if isinstance(index, str) else operator.index(index)
    except (TypeError, ValueError):
        raise TypeError(
            f"ClusterSpec: the index of a task must be an integer, got {index!r} (job: {job})"
        ) from None
    if number < 0:
        raise ValueError(
            f"ClusterSpec: bad index of a task, expected an integer >= 0, got {index!r} "
            f"(job: {job})"
        )
    return number


def _size(ranks: cc.Communicator | int | None) -> int:
    # Only now, so that text and numbers can be used without MPI.
    if ranks is None:
        ranks = cc.init()
    return (
        integer("from_ranks", "number of ranks", ranks, least=0)
        if isinstance(ranks, int)
        else ranks.size
    )
