"""Hook for metrics, TensorBoard and progress."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strategies.core import atomic_io
from strategies.session.hook_base import Hook, Session, Timer
from strategies.session.metrics_writer import MetricsWriter, Progress

__all__ = ["Summaries"]


class Summaries(Hook):
    """Write the values of steps, on the chief: as JSON lines, for TensorBoard, as a progress bar.

    A run that goes on from a checkpoint drops what was written of later steps.

    Args:
        metrics: file of JSON lines, see `MetricsWriter`; None for none.
        tensorboard: folder of event files, or an object with `add_scalar(name, value, step)`; None
            for neither. A folder needs the package tensorboardX.
        progress: what the progress counts, in a word such as "epochs", with the first of the values
            beside it; None for none.
        every_steps: how many steps lie between two that are written.

    Raises:
        ImportError: tensorboardX is missing; where the session begins.
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
        self._metrics: MetricsWriter | None = None
        self._events: Any = None
        self._progress: Progress | None = None
        self._shown = 0

    def after_create(self, session: Session) -> None:
        """Open the files, or go back in them."""
        if not session.is_chief:
            return
        step = session.step
        self._timer.reset()
        self._close()
        if self._path is not None:
            self._metrics = MetricsWriter(self._path, resume_step=step or None)
        if isinstance(self._tensorboard, (str, os.PathLike)):
            self._events = _event_writer(Path(self._tensorboard), resume_step=step or None)
        else:
            self._events = self._tensorboard
        if self._description is not None and self._progress is None:
            last, name = session.last_step, self._description
            total = None if last is None else max(last, step)
            self._progress = Progress(total, description=name, initial=step)
            self._shown = step

    def after_run(self, session: Session, values: Mapping[str, Any]) -> None:
        """Write the values of this step."""
        step = session.step
        if self._progress is not None and step > self._shown:
            self._progress.update(step - self._shown, **dict(itertools.islice(values.items(), 1)))
            self._shown = step
        if (self._metrics is None and self._events is None) or not self._timer.due(step):
            return
        self._timer.done(step)
        if self._metrics is not None:
            self._metrics.write(step=step, **values)
        if self._events is not None:
            for name, value in values.items():
                if not isinstance(value, str):
                    self._events.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Close everything, also after an error; harmless when repeated."""
        self._close()
        if self._progress is not None:
            self._progress.close()

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._events is not None and self._events is not self._tensorboard:
            self._events.close()


def _event_writer(folder: Path, *, resume_step: int | None = None) -> Any:
    """Open a file of events; TensorBoard hides what older files have after `resume_step`."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "Summaries: tensorboardX is missing; install it by `pip install tensorboardX`"
        ) from error
    with atomic_io.translate_errors("Summaries", folder):
        purge = None if resume_step is None else resume_step + 1
        return SummaryWriter(str(folder), purge_step=purge)
