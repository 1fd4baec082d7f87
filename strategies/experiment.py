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

_LOOK_EVERY = 1.0  # seconds between an evaluator's checks for new checkpoints


class Tasks(NamedTuple):
    """Arguments of an experiment's functions.

    Attributes:
        cluster: cluster, with this task's job and index.
        server: server of the tasks.
        preemption: open `Preemption` for sessions.
        hooks: hooks for sessions, which score new checkpoints in a cluster without evaluator.
    """

    cluster: Cluster
    server: Server
    preemption: Preemption
    hooks: Sequence[Hook]


class Experiment(Generic[B, R]):
    """Training and evaluation on all tasks of a cluster; `run` does this rank's part.

    | job | calls |
    | --- | --- |
    | chief, worker | `build`, `train` |
    | ps | `build`, then serves until the training tasks have left |
    | evaluator | `build`, then `evaluate` for every new checkpoint until the training tasks leave |

    Without an evaluator, the chief evaluates each checkpoint after writing it. When any task
    receives a stop signal, all tasks exit with status 85 (`Preemption`).

    Args:
        build: *collective* over all tasks; returns the second argument of `train` and the first of
            `evaluate`, such as a strategy with its variables.
        train: called on training tasks as `train(tasks, built)`. Pass `tasks.preemption` and
            `tasks.hooks` to its session.
        checkpoints: directory of the checkpoints, as the evaluator or the chief sees it.
        evaluate: `evaluate(built, path)` returns the scores of a checkpoint; None evaluates
            nothing.
        scores: JSON-lines file for the scores; None for "scores.jsonl" in `checkpoints`, which must
            then be a path.
        cluster: jobs; see `Cluster`.
        comm: communicator; None for all ranks of the job.
        grace_seconds: see `Preemption`.
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
        # Beside the checkpoints, so that the evaluator and a restart find it.
        self._scores = os.path.join(checkpoints, "scores.jsonl") if scores is None else scores
        self._spec, self._comm, self._grace = cluster, comm, grace_seconds

    def run(self) -> R | None:
        """Run this rank's part; *collective* over all ranks.

        Returns:
            Result of `train`; None on tasks that do not train.

        Raises:
            SystemExit: with status 85, on all ranks, if a session has stopped for a signal.
            Exception: error of this rank's part.
        """
        # Closed in reverse order: the server first, while the cluster's communicator is still open.
        with (
            Cluster(self._spec, self._comm) as cluster,
            Preemption(cluster.comm, grace_seconds=self._grace) as preemption,
            Server(cluster) as server,
        ):
            # A list, filled below: `Tasks` exists before the evaluator is known.
            hooks: list[Hook] = []
            tasks = Tasks(cluster, server, preemption, hooks)
            # On all tasks, because building variables is collective.
            built = self._build(tasks)
            evaluator = None if cluster.job == "ps" else self._evaluator(built)
            if cluster.job == "evaluator" and evaluator is not None:
                evaluator.run(lambda: _over(server), lambda: preemption.asked)
            elif cluster.job in ("evaluator", "ps"):
                # The variables of a ps are served by threads; this thread only waits for the end.
                server.join()
            else:
                # Without an evaluator task, the chief evaluates between its steps.
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
    """Return whether all training tasks have left."""
    try:
        # The timeout is the pause between two checks for new checkpoints.
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
    """Run an `Experiment` that scores every new checkpoint once; *collective*, see `run`.

    Args:
        build: see `Experiment`.
        train: see `Experiment`.
        evaluate: see `Experiment`.
        checkpoints: see `Experiment`.
        options: other arguments of `Experiment`.

    Returns:
        Result of `train`; None on tasks that do not train.
    """
    made = Experiment(build, train, checkpoints=checkpoints, evaluate=evaluate, **options)
    return made.run()
