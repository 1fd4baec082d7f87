"""Training sessions: the training loop with hooks, checkpoints and metrics.

`session` runs the steps; `hooks` and `metrics_hook` run around them. After each step the ranks
exchange `votes`, and `stop_control` says what follows. `session_state` is what a session saves and
restores, `evaluation` scores the checkpoints, `metrics_writer` writes metrics, the loss curve and
the progress.
"""

from __future__ import annotations

from strategies.session import hooks
from strategies.session.evaluation import Evaluator
from strategies.session.metrics_hook import Summaries
from strategies.session.metrics_writer import MetricsWriter, Progress, loss_curve, read_metrics
from strategies.session.session import TrainingSession

__all__ = [
    "Evaluator",
    "MetricsWriter",
    "Progress",
    "Summaries",
    "TrainingSession",
    "hooks",
    "loss_curve",
    "read_metrics",
]
