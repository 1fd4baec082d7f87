"""Elastic training: survives dead ranks and preemption.

`recovery` repeats the training function on the `surviving_ranks`, from what `elastic_state` keeps
in memory as `commit_buffers`. `elastic_group` has the ranks that train and those that are spare,
`assignment` says which is which. `preemption` shares the signal of the batch system among ranks,
`fault_injection` kills ranks on purpose, `event_log` writes down what has happened.
"""

from __future__ import annotations

from strategies.elastic.elastic_state import State
from strategies.elastic.fault_injection import InjectedFault, inject
from strategies.elastic.preemption import STOPPED_EARLY, Preemption
from strategies.elastic.recovery import run_elastic

__all__ = [
    "STOPPED_EARLY",
    "InjectedFault",
    "Preemption",
    "State",
    "inject",
    "run_elastic",
]
