"""Hook for metrics, TensorBoard and progress."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from strategies.core import atomic_io
from strategies.session.hook_base import Hook, Session, Timer
from strategies.session.metrics_writer import MetricsWriter, Progress

__all__ = ["Summaries"]


class Summaries(Hook):
    """Write the values of steps on the chief: JSON lines, TensorBoard events, a progress bar.

    A run that resumes from a checkpoint drops the values of later steps. The file has the number of
    the step instead of a value named "step"; the bar shows no value named "n".

    Args:
        metrics: file of JSON lines, see `MetricsWriter`; None writes none.
        tensorboard: folder of event files, or an object with `add_scalar(name, value, step)`; None
            writes none. A folder needs the package tensorboardX.
        progress: description of the progress bar, a word such as "epochs"; the bar also shows the
            first value. None shows no bar.
        every_steps: number of steps between two writes.

    Raises:
        ImportError: tensorboardX is missing; raised when the session begins.
    """

    order = 60

    def __init__(
        self,
        *,
        metrics: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
        progress: str | None = None,
        every_steps: int = 1,
    ) -> None:
        self._path, self._tensorboard, self._description = metrics, tensorboard, progress
        self._timer = Timer("Summaries", steps=every_steps)
        self._files = ExitStack()
        self._metrics: MetricsWriter | None = None
        self._events: Any = None
        self._progress: Progress | None = None
        self._shown = 0

    def after_create(self, session: Session) -> None:
        """Open the files, or return to this step in them."""
        if not session.is_chief:
            return
        step = session.step
        self._timer.reset()
        self._files.close()
        # Opened again after a recovery, which drops the values of later steps.
        if self._path is not None:
            # Step 0 is a new run, which replaces the file.
            writer = MetricsWriter(self._path, resume_step=step or None)
            self._metrics = self._files.enter_context(writer)
        if isinstance(self._tensorboard, (str, os.PathLike)):
            self._events = _event_writer(Path(self._tensorboard), resume_step=step or None)
            self._files.callback(self._events.close)
        else:
            # An object of the caller, who also closes it.
            self._events = self._tensorboard
        # The bar continues after a recovery; it would be drawn twice otherwise.
        if self._description is not None and self._progress is None:
            last, name = session.last_step, self._description
            total = None if last is None else max(last, step)
            self._progress = Progress(total, description=name, initial=step)
            self._shown = step

    def after_run(self, session: Session, values: Mapping[str, Any]) -> None:
        """Write the values of this step."""
        step = session.step
        # After a return to an earlier step, the bar waits until that step is passed.
        if self._progress is not None and step > self._shown:
            first = dict(itertools.islice(values.items(), 1))
            # In one dict, because a value may have the name of the argument.
            self._progress.update(**{**first, "n": step - self._shown})
            self._shown = step
        if (self._metrics is None and self._events is None) or not self._timer.due(step):
            return
        self._timer.done(step)
        if self._metrics is not None:
            self._metrics.write(**{**values, "step": step})
        if self._events is not None:
            for name, value in values.items():
                # TensorBoard's scalars are numbers; JSON lines also take text.
                if not isinstance(value, str):
                    self._events.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Close everything, also after an error; harmless when repeated."""
        with self._files:
            if self._progress is not None:
                self._progress.close()


def _event_writer(folder: Path, *, resume_step: int | None = None) -> Any:
    """Open an event file; TensorBoard hides older events after `resume_step`."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "Summaries: tensorboardX is missing; install it by `pip install tensorboardX`"
        ) from error
    with atomic_io.translate_errors("Summaries", folder):
        # TensorBoard hides events from this step on.
        purge = None if resume_step is None else resume_step + 1
        return SummaryWriter(str(folder), purge_step=purge)
