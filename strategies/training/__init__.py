"""What surrounds the training loop: checkpoints, metrics and progress."""

from __future__ import annotations

from strategies.training.checkpoint import Checkpoint
from strategies.training.summaries import MetricsWriter, Progress, loss_curve, read_metrics

__all__ = ["Checkpoint", "MetricsWriter", "Progress", "loss_curve", "read_metrics"]
