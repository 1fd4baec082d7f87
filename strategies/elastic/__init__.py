"""Elastic training: survives dead ranks and preemption."""

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
