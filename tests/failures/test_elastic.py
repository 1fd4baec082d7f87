"""Ranks die while they train, and those that live train on from the last commit."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

from launcher import ROOT, mpirun, mpirun_path, run
from pairwise import also
from requirements import needs, require
from strategies.training import events

FAULT_TOLERANT = ("--with-ft", "ulfm")
DIGITS = ROOT / "examples" / "elastic_digits.py"


@pytest.fixture(scope="module", autouse=True)
def _fault_tolerant_mpi():
    version = run([mpirun_path(), "--version"], timeout=30).stdout
    if not re.search(r"Open MPI.* (?:[5-9]|\d\d)\.", version):
        require("ulfm", "fault tolerance needs Open MPI 5")


def start(tmp_path, program, faults, *arguments, size=3, options=FAULT_TOLERANT, **extra):
    if not hasattr(program, "suffix"):
        text, program = program, tmp_path / "program.py"
        program.write_text(textwrap.dedent(HEAD) + textwrap.dedent(text))
    result = mpirun(
        size, program, *arguments, options=options, timeout=110, UNISONO_FAULT=faults,
        UNISONO_EVENTS=str(tmp_path / "events"), UNISONO_RECORDER_DIR=str(tmp_path), **extra,
    )  # fmt: skip
    return result, events.read(tmp_path / "events")


def of_kind(told, event):
    return [line for line in told if line["event"] == event]


# Commits after every step; the weights after n steps are n, whoever has died.
HEAD = """
    import sys
    import numpy as np
    import collectives as cc
    from strategies import training
    comm = cc.init()
    weights = np.zeros(1000)
    state = training.State(comm, weights=weights, step=0)

    def train(state):
        for step in range(state["step"], 12):
            training.inject(step, [weights])
            weights[:] += state.comm.allreduce(np.ones(1000))
            state.commit(step=step + 1, verify="verify" in sys.argv)
        return state["step"]
"""

TRAIN = """
    steps = training.run_elastic(train, state, min_ranks=int(sys.argv[1]))
    assert (weights == 12).all()
    print("done", steps, state.comm.size, flush=True)
"""


@pytest.mark.parametrize(
    ("victims", "memory"),
    [pytest.param([(40, 0), (41, 2)], "/dev/shm"),
     *[pytest.param(victims, memory, marks=pytest.mark.long) for victims, memory in
       [([(40, 1), (40, 3)], "off"), ([(0, 2)], "off"), ([(305, 1)], "/dev/shm")]]],
)  # fmt: skip
def test_the_digits_are_learnt_whoever_dies(tmp_path, victims, memory):
    needs("sklearn")
    faults = ";".join(f"step={step},rank={rank},kind=kill" for step, rank in victims)
    arguments = ("--epochs", "12", "--commit-steps", "5")
    result, told = start(tmp_path, DIGITS, faults, *arguments, size=4, UNISONO_SHARED_MEMORY=memory)
    said = re.search(
        rf"{4 - len(victims)} of 4 ranks; each row was used 12 to 12 times; accuracy .*: (\S+)",
        result.stdout,
    )
    assert said, result
    assert float(said[1]) >= 0.96
    assert result.status == 0
    assert {(e["step"], e["rank"]) for e in of_kind(told, "fault")} == set(victims)
    for event in of_kind(told, "recovered"):
        lost = max(step for step, _ in victims) - 5 * event["commit"]
        assert lost < 10, told
        assert event["seconds"] < 10


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_randomly_killed_jobs_end_trained(first):
    needs("sklearn")
    program = ROOT / "benchmarks" / "recovery.py"
    command = [sys.executable, program, "kills", "--jobs", "10", "--first", str(first)]
    result = run(list(map(str, command)), timeout=580)
    assert "10 of 10 jobs of 4 ranks trained" in result.stdout, result
    assert result.status == 0


def test_those_that_live_go_on_from_the_last_commit(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=0,kind=kill", "2")
    assert result.stdout.count("done 12 2") == 2, result
    found = of_kind(told, "recovered")
    assert [(event["rank"], event["size"], event["commit"]) for event in found] in (
        [(1, 2, 7), (2, 2, 7)],
        [(2, 2, 7), (1, 2, 7)],
    )
    assert len(of_kind(told, "end")) == 2


def test_fewer_than_wanted_do_not_go_on(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=kill", "3")
    assert "too few ranks live, expected at least 3, got 2" in result.stderr, result
    assert result.status != 0
    assert "done" not in result.stdout
    assert of_kind(told, "recovered") == []


def test_an_error_of_the_program_is_not_tried_again(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=exception", "1")
    assert result.status != 0
    assert "done" not in result.stdout
    assert "InjectedFault: a fault that UNISONO_FAULT asked for (step: 7)" in result.stderr, result
    assert [event["rank"] for event in of_kind(told, "error")] == [1]
    assert of_kind(told, "recovered") == []
    assert max(event["commit"] for event in of_kind(told, "commit")) == 7


@pytest.mark.parametrize("kind", ["corrupt", also("stop")])
def test_what_no_rank_dies_of_ends_the_job(tmp_path, kind):
    faults = f"step=7,rank=1,kind={kind}"
    result, told = start(tmp_path, TRAIN, faults, "1", "verify", UNISONO_TIMEOUT="4")
    words = {
        "corrupt": "MismatchError: commit: ranks differ, weights: checksum",
        "stop": "CollectiveTimeout: allreduce: no answer within 4 s, still waiting for rank 1",
    }
    assert words[kind] in result.stderr, result
    assert result.status != 0
    assert of_kind(told, "recovered") == []


def test_a_slow_rank_is_waited_for(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=slow:1", "3")
    assert result.stdout.count("done 12 3") == 3, result
    assert result.status == 0
    assert of_kind(told, "failure") == []


def test_where_a_death_ends_the_job_it_ends(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=kill", "1", options=())
    assert result.status != 0
    assert "done" not in result.stdout
    assert of_kind(told, "recovered") == []
