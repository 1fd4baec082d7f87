"""Spare ranks on a machine of their own take the places of the ranks of another one that fails."""

import re

import pytest

from launcher import written
from strategies.elastic import event_log

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("machines")]

# Sums of random numbers of those that train, of generators that are not alike: bits that depend on
# who has which.
PROGRAM = """
import platform, sys, zlib
import numpy as np
import collectives as cc
from strategies import elastic

comm = cc.init()
weights, rng = np.zeros(1000), np.random.default_rng(comm.rank)
state = elastic.State(comm, weights=weights, rng=rng, step=0)
machines = []

def train(state):
    machines[:] = state.comm.allgather_object(platform.node())
    for step in range(state["step"], 14):
        elastic.inject(step)
        weights[:] += state.comm.allreduce(rng.random(1000), op=cc.SUM, algorithm="ring")
        if step % 3 == 2:
            state.commit(step=step + 1)

elastic.run_elastic(train, state, max_ranks=4)
print("rank", comm.rank, zlib.crc32(weights), *machines, flush=True)
"""


def started(cluster, folder, faults):
    """Run on three machines of two ranks, of which the last two ranks are spare."""
    result = cluster.run(
        2, written(folder, PROGRAM), timeout=100, options=("--with-ft", "ulfm"),
        UNISONO_FAULT=faults, UNISONO_EVENTS=str(folder / "events"),
        UNISONO_RECORDER_DIR=str(folder),
    )  # fmt: skip
    assert result.status == 0, result
    return re.findall(r"rank \d (\d+)(.*)", result.stdout)


def test_spare_ranks_of_another_machine_train_in_the_places_of_dead_ones(three_machines, tmp_path):
    """Both ranks of m2 are killed at once."""
    undisturbed = started(three_machines, tmp_path, "")
    assert len(undisturbed) == 6
    faults = "step=7,rank=2,kind=kill;step=7,rank=3,kind=kill"
    said = started(three_machines, tmp_path, faults)
    assert len(said) == 4
    assert {bits for bits, _ in said} == {bits for bits, _ in undisturbed}
    assert {machines.strip() for _, machines in said} == {"m1 m1 m3 m3"}
    told = event_log.read(tmp_path / "events")
    admitted = [(line["rank"], line["place"]) for line in told if line["event"] == "admitted"]
    assert sorted(admitted) == [(4, 2), (5, 3)]
