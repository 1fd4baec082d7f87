"""Evaluation of every new checkpoint, by a separate task or between steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strategies import errors
from strategies.checkpoint import checkpoint_listing
from strategies.checkpoint.storage import Location, resolve
from strategies.session.hook_base import Hook, Session
from strategies.session.metrics_writer import MetricsWriter, read_metrics

__all__ = ["Evaluator", "EvaluateCheckpoints"]

_log = logging.getLogger(__name__)


class Evaluator:
    """Scores checkpoints in the order in which they were written; in one process.

    What was scored is known by the file of scores, so that an evaluator that is started again goes
    on with what is new. A checkpoint that is deleted before its turn is passed over.

    Args:
        checkpoints: the directory of checkpoints, a path or URL, which this process can read.
        evaluate: given the place of a checkpoint, returns values by name, such as an accuracy.
        scores: file of JSON lines, with the step and the values of each checkpoint.

    Example:
        >>> import tempfile, numpy as np
        >>> from strategies.checkpoint import checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> evaluator = Evaluator(
        ...     folder,
        ...     lambda path: {"sum": checkpoint.restore(path).tensors["w"].sum()},
        ...     scores=f"{folder}/scores.jsonl",
        ... )
        >>> path = checkpoint.save(folder, {"w": np.ones(3)}, step=5)
        >>> evaluator.score_new(), evaluator.score_new()
        (1, 0)
        >>> [(line["step"], line["sum"]) for line in read_metrics(evaluator.scores)]
        [(5, 3.0)]
    """

    def __init__(
        self,
        checkpoints: str | os.PathLike[str],
        evaluate: Callable[[Location], Mapping[str, Any]],
        *,
        scores: str | os.PathLike[str],
    ) -> None:
        self._root = resolve(checkpoints)
        self._evaluate = evaluate
        self.scores = Path(scores)

    def score_new(self, stop: Callable[[], bool] = lambda: False) -> int:
        """Score all checkpoints that are there and were not scored; returns how many those were.

        Args:
            stop: says between two of them whether to leave the others for the next time.

        Raises:
            OpError: a checkpoint or the file of scores cannot be read.
            Exception: what `evaluate` has raised.
        """
        count = 0
        while not stop() and (found := self._next()) is not None:
            place, step, sequence = found
            try:
                values = self._evaluate(place)
            except errors.OpError as error:
                following = self._next()
                if following is not None and following[2] == sequence:
                    raise
                _log.warning("evaluate: a checkpoint was deleted before its turn: %s", error)
                continue
            # No line is dropped: training may have gone back to an earlier step.
            with MetricsWriter(self.scores, resume_step=_LAST_STEP) as writer:
                writer.write(step=step, sequence=sequence, **values)
            count += 1
        return count

    def run(self, finished: Callable[[], bool], stop: Callable[[], bool] = lambda: False) -> None:
        """Score checkpoints as they come, until training has finished and all are scored.

        Args:
            finished: whether no more of them will come; waits for a moment before it says no.
            stop: whether to leave at once, as `Preemption` says.
        """
        over = False
        while not over and not stop():
            over = finished()  # first: what was written before the end is scored after it
            self.score_new(stop)

    def _next(self) -> tuple[Location, int, int] | None:
        """Return the place, the step and the sequence of the next one to score."""
        lines = read_metrics(self.scores) if self.scores.exists() else []
        last = max((int(line["sequence"]) for line in lines), default=0)
        if checkpoint_listing.latest(self._root) is None:
            return None
        new = [item for item in checkpoint_listing.complete(self._root) if item[1].sequence > last]
        if not new:
            return None
        place, plan = min(new, key=lambda item: item[1].sequence)
        return place, plan.step, plan.sequence


_LAST_STEP = 1 << 60  # beyond all steps


class EvaluateCheckpoints(Hook):
    """Score each checkpoint of a session when it is written, on the chief; others wait for it.

    One that is written in the background is scored at the next save, or at the end.

    Args:
        evaluator: that scores them.
    """

    order = 75

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def after_save(self, session: Session, path: Location) -> None:
        """Score what is there."""
        self._evaluator.score_new()

    def end(self, session: Session) -> None:
        """Score the last one, which may have been on its way."""
        if session.is_chief:
            self._evaluator.score_new()
