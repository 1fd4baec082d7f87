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
    """Scores checkpoints in the order in which they were written; used by one process.

    The file of scores records which checkpoints were scored, so a restarted evaluator continues
    with the new ones. A checkpoint that is deleted before its turn is skipped.

    Args:
        checkpoints: directory of checkpoints, a path or URL that this process can read.
        evaluate: called with the path of a checkpoint; returns values by name, such as an accuracy.
        scores: file of JSON lines, with the step and the values of each checkpoint. Its own "step"
            and "sequence" replace values of these names.

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
        """Score all checkpoints that were not scored yet; return their number.

        Args:
            stop: called before each checkpoint; returns whether to stop here.

        Raises:
            OpError: a checkpoint or the file of scores cannot be read.
            Exception: the error of `evaluate`.
        """
        count = 0
        while not stop() and (found := self._next()) is not None:
            place, step, sequence = found
            try:
                values = self._evaluate(place)
            except errors.OpError as error:
                # A deleted checkpoint is not listed any more. If it still is listed, the error has
                # another cause.
                following = self._next()
                if following is not None and following[2] == sequence:
                    raise
                _log.warning("evaluate: a checkpoint was deleted before its turn: %s", error)
                continue
            # Keep all lines, because training may have returned to an earlier step.
            own = {"step": step, "sequence": sequence}
            with MetricsWriter(self.scores, resume_step=_LAST_STEP) as writer:
                # Once for its place in the line, once to replace scores of the same names.
                writer.write(**{**own, **values, **own})
            count += 1
        return count

    def run(self, finished: Callable[[], bool], stop: Callable[[], bool] = lambda: False) -> None:
        """Score checkpoints as they are written, until training has finished.

        Args:
            finished: returns whether training has finished; may wait a moment before it returns
                False.
            stop: returns whether to stop at once, such as `Preemption.asked`.
        """
        over = False
        while not over and not stop():
            over = finished()  # asked first, so that checkpoints from before the end are scored
            self.score_new(stop)

    def _next(self) -> tuple[Location, int, int] | None:
        """Return path, step and sequence number of the next checkpoint to score."""
        # Read each time: the file is the only memory of an evaluator that may be restarted.
        lines = read_metrics(self.scores) if self.scores.exists() else []
        last = max((int(line["sequence"]) for line in lines), default=0)
        if checkpoint_listing.latest(self._root) is None:
            return None
        new = [item for item in checkpoint_listing.complete(self._root) if item[1].sequence > last]
        if not new:
            return None
        # By sequence number, not by step: training may have returned to an earlier step.
        place, plan = min(new, key=lambda item: item[1].sequence)
        return place, plan.step, plan.sequence


_LAST_STEP = 1 << 60  # beyond all steps


class EvaluateCheckpoints(Hook):
    """Score each checkpoint of a session on the chief, while the other ranks wait.

    A checkpoint written in the background is scored at the next save, or at the end.

    Args:
        evaluator: evaluator of the checkpoints.
    """

    order = 75

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def after_save(self, session: Session, path: Location) -> None:
        """Score the checkpoints written so far."""
        self._evaluator.score_new()

    def end(self, session: Session) -> None:
        """Score the last checkpoint, which the background may have completed only now."""
        if session.is_chief:
            self._evaluator.score_new()
