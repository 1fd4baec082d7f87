"""Training sessions: the training loop with hooks, checkpoints and metrics."""

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
