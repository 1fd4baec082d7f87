"""What surrounds the training loop: checkpoints, metrics and progress.

`saver` takes things as they are: `things` knows what there is, `content` turns it into named arrays
and JSON, `put_back` back again. `checkpoint_manager` is for a group of ranks, `checkpoint` for one
process: `shards` holds the arrays, `manifest` says what is complete, `durable` has the order of
writing that survives a crash, `retention` which checkpoints stay, `background` writes them beside
the program, `inspection` looks at them. `summaries` is for people: metrics, the loss curve,
progress.

`recovery` trains on when ranks die, from the copies that `state` keeps in memory; `faults` lets
them die on purpose, `events` writes down what has happened.
"""

from __future__ import annotations

from strategies.training.checkpoint import Checkpoint
from strategies.training.faults import InjectedFault, inject
from strategies.training.recovery import run_elastic
from strategies.training.saver import Saver
from strategies.training.state import State
from strategies.training.summaries import MetricsWriter, Progress, loss_curve, read_metrics

__all__ = [
    "Checkpoint",
    "InjectedFault",
    "MetricsWriter",
    "Progress",
    "Saver",
    "State",
    "inject",
    "loss_curve",
    "read_metrics",
    "run_elastic",
]
