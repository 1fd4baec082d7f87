"""What surrounds the training loop: sessions, checkpoints, metrics and progress.

`session` carries a loop from its beginning, or its last checkpoint, to its end; `hooks` and
`reporting` are what it does around the steps, `wishes` what its ranks agree on after each,
`stopping` what follows from it, and `preemption` how they hear that the batch system wants the job
to stop. `evaluation` scores
what they save.

`saver` takes things as they are: `things` knows what there is, `content` turns it into named arrays
and JSON, `put_back` back again. `checkpoint_manager` is for a group of ranks: `slices` are parts of
arrays, `sharing` says who writes which, `together` how all ranks write at once, `reading` who reads
what. `checkpoint` is for one process: `shards` holds the arrays, `manifest` says what is complete,
`directory` which of them are there, `location` whether that is a directory or a URL, `writing` how
one gets there completely or not at all, `durable` the order of writing that survives a crash,
`retention` which stay, `background` writes them beside the program, `inspection` looks at them.
`summaries` is for people: metrics, the loss curve, progress.

`recovery` trains on when ranks die, with the `survivors`, from what `state` keeps in memory as
`copies`; `members` are the ranks that train and those that are spare, `places` says who is which;
`faults` lets them die on purpose, `events` writes down what has happened.
"""

from __future__ import annotations

from strategies.training import hooks
from strategies.training.checkpoint import Checkpoint
from strategies.training.evaluation import Evaluator
from strategies.training.faults import InjectedFault, inject
from strategies.training.preemption import STOPPED_EARLY, Preemption
from strategies.training.recovery import run_elastic
from strategies.training.reporting import Summaries
from strategies.training.saver import Saver
from strategies.training.session import TrainingSession
from strategies.training.slices import Box, Slice
from strategies.training.state import State
from strategies.training.summaries import MetricsWriter, Progress, loss_curve, read_metrics

__all__ = [
    "STOPPED_EARLY",
    "Box",
    "Checkpoint",
    "Evaluator",
    "InjectedFault",
    "MetricsWriter",
    "Preemption",
    "Progress",
    "Saver",
    "Slice",
    "State",
    "Summaries",
    "TrainingSession",
    "hooks",
    "inject",
    "loss_curve",
    "read_metrics",
    "run_elastic",
]
