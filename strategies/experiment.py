"""`Experiment`: one program for all tasks of a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import collectives as cc
from strategies.checkpoint.storage import Location
from strategies.cluster.cluster import Cluster
from strategies.cluster.resolvers import ClusterResolver
from strategies.cluster.spec import ClusterSpec
from strategies.elastic.preemption import Preemption
from strategies.errors import DeadlineExceededError
from strategies.rpc.server import Server
from strategies.session.evaluation import EvaluateCheckpoints, Evaluator
from strategies.session.hook_base import Hook

__all__ = ["Experiment", "Tasks", "train_and_evaluate"]

B = TypeVar("B")
R = TypeVar("R")

_LOOK_EVERY = 1.0  # seconds between two looks of an evaluator for new checkpoints


class Tasks(NamedTuple):
    """What the parts of an experiment are given.

    Attributes:
        cluster: which task this is.
        server: by which the tasks reach each other.
        preemption: for sessions; it is open.
        hooks: for sessions: they score new checkpoints where there is no evaluator.
    """

    cluster: Cluster
    server: Server
    preemption: Preemption
    hooks: Sequence[Hook]


class Experiment(Generic[B, R]):
    """Training and evaluation on all tasks of a cluster; `run` does the part of this rank.

    | job | what it does |
    | --- | --- |
    | chief, worker | `build`, `train` |
    | ps | `build`, then it serves until those that train have left |
    | evaluator | `build`, then `evaluate` for every new checkpoint, until they have left |

    Where there is no evaluator, the chief evaluates each checkpoint when it is written. When any
    task is asked to stop, all of them leave, with status 85 (`Preemption`).

    Args:
        build: *collective* over all tasks; returns what the other two are given, such as a strategy
            with its variables.
        train: on tasks that train, `train(tasks, built)`. Its session takes `tasks.preemption` and
            `tasks.hooks`.
        checkpoints: the directory to which training saves, as the evaluator, or the chief, sees it.
        evaluate: `evaluate(built, path)` returns the values of a checkpoint; None for none.
        scores: file of JSON lines for them; "scores.jsonl" in `checkpoints`, which must then be a
            path, if None.
        cluster: the jobs, as `Cluster` takes them.
        comm: the ranks; the whole job if None.
        grace_seconds: as for `Preemption`.
    """

    def __init__(
        self,
        build: Callable[[Tasks], B],
        train: Callable[[Tasks, B], R],
        *,
        checkpoints: str | os.PathLike[str],
        evaluate: Callable[[B, Location], Mapping[str, Any]] | None = None,
        scores: str | os.PathLike[str] | None = None,
        cluster: ClusterSpec | ClusterResolver | Mapping[str, Any] | None = None,
        comm: cc.Communicator | None = None,
        grace_seconds: float | None = None,
    ) -> None:
        self._build, self._train, self._evaluate = build, train, evaluate
        self._checkpoints = checkpoints
        self._scores = os.path.join(checkpoints, "scores.jsonl") if scores is None else scores
        self._spec, self._comm, self._grace = cluster, comm, grace_seconds

    def run(self) -> R | None:
        """Do this rank's part; *collective* over all of them.

        Returns:
            What `train` has returned; None on tasks that do not train.

        Raises:
            SystemExit: with status 85, on all ranks, where a session has stopped for a signal.
            Exception: what the part of this rank has raised.
        """
        with (
            Cluster(self._spec, self._comm) as cluster,
            Preemption(cluster.comm, grace_seconds=self._grace) as preemption,
            Server(cluster) as server,
        ):
            hooks: list[Hook] = []
            tasks = Tasks(cluster, server, preemption, hooks)
            built = self._build(tasks)
            if cluster.job == "ps":
                server.join()
            elif cluster.job == "evaluator":
                evaluator = self._evaluator(built)
                if evaluator is None:
                    server.join()
                else:
                    evaluator.run(lambda: _over(server), lambda: preemption.asked)
            else:
                evaluator = self._evaluator(built)
                if evaluator is not None and not cluster.ranks_of("evaluator"):
                    hooks.append(EvaluateCheckpoints(evaluator))
                return self._train(tasks, built)
            return None

    def _evaluator(self, built: B) -> Evaluator | None:
        evaluate = self._evaluate
        if evaluate is None:
            return None
        return Evaluator(self._checkpoints, lambda path: evaluate(built, path), scores=self._scores)


def _over(server: Server) -> bool:
    """Whether nobody trains any more."""
    try:
        server.join(_LOOK_EVERY)
    except DeadlineExceededError:
        return False
    return True


def train_and_evaluate(
    build: Callable[[Tasks], B],
    train: Callable[[Tasks, B], R],
    evaluate: Callable[[B, Location], Mapping[str, Any]],
    *,
    checkpoints: str | os.PathLike[str],
    **options: Any,
) -> R | None:
    """Run an `Experiment` that scores every new checkpoint once; *collective*, as `run`.

    Args:
        build: as `Experiment` takes it.
        train: likewise.
        evaluate: likewise.
        checkpoints: likewise.
        options: likewise.

    Returns:
        What `train` has returned; None on tasks that do not train.
    """
    made = Experiment(build, train, checkpoints=checkpoints, evaluate=evaluate, **options)
    return made.run()
