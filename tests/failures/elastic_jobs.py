"""Jobs whose ranks die on purpose, under `mpirun --with-ft ulfm`, and what they say of it."""

from victims import FAULT_TOLERANT

from launcher import ROOT, mpirun, written
from strategies.elastic import event_log

DIGITS = ROOT / "examples" / "elastic_digits.py"


def start(tmp_path, program, faults, *arguments, size=3, options=FAULT_TOLERANT, **extra):
    """Run a program, or `HEAD` and its text, with faults; returns how it ended, and its events."""
    if not hasattr(program, "suffix"):
        program = written(tmp_path, HEAD, program)
    result = mpirun(
        size, program, *arguments, options=options, timeout=110, UNISONO_FAULT=faults,
        UNISONO_EVENTS=str(tmp_path / "events"), UNISONO_RECORDER_DIR=str(tmp_path), **extra,
    )  # fmt: skip
    return result, event_log.read(tmp_path / "events")


def epochs_after(step):
    """Epochs with which `DIGITS` trains on after a step: 48 of 1,250 rows in each."""
    return 48 * step // 1250 + 2


def of_kind(told, event):
    """The events of one kind."""
    return [line for line in told if line["event"] == event]


# Commits after every step; the weights after n steps are n, whoever has died.
HEAD = """
    import sys
    import numpy as np
    import collectives as cc
    import strategies
    from strategies import elastic
    comm = cc.init()
    weights = np.zeros(1000)
    state = elastic.State(comm, weights=weights, step=0)

    def train(state):
        for step in range(state["step"], 12):
            elastic.inject(step, [weights])
            weights[:] += state.comm.allreduce(np.ones(1000))
            state.commit(step=step + 1, verify="verify" in sys.argv)
        return state["step"]
"""
