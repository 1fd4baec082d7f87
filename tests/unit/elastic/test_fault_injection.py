"""Faults on purpose, and what is written down of them."""

import json
import sys

import pytest

from launcher import mpirun, run, written
from strategies.elastic import event_log, fault_injection
from strategies.elastic.fault_injection import Fault


def test_faults_are_read():
    text = " step=12,rank=2,kind=kill; rank=0, step=3, kind=slow:0.5 ;"
    assert fault_injection.parse(text) == [Fault(12, 2, "kill"), Fault(3, 0, "slow", 0.5)]
    assert fault_injection.parse("") == []


@pytest.mark.parametrize(
    "text",
    ["kill", "step=1,rank=2", "step=1,rank=2,kind=die", "step=x,rank=0,kind=kill",
     "step=1,rank=0,kind=slow", "step=1,rank=0,kind=kill:3", "step=1,rank=0,kind=stop,who=me",
     "step=1,rank=0,kind=slow:-1", "step=1,rank=0,kind=slow:nan", "step=1,rank=0,kind=slow:inf",
     "step=1,step=2,rank=0,kind=kill"],
)  # fmt: skip
def test_what_is_no_fault_is_an_error_that_says_what_is(text):
    with pytest.raises(
        ValueError, match=r"UNISONO_FAULT: not a fault, expected step=12,rank=2"
    ) as e:
        fault_injection.parse(f"step=1,rank=0,kind=kill;{text}")
    assert repr(text) in str(e.value)


PROGRAM = """
import sys, time
import numpy as np
from strategies import elastic
weights, slept = [np.zeros(0), np.ones(3)], []
time.sleep = slept.append
for step in [0, 1, 2, 1, 2]:  # the second time nothing happens
    slept.clear()
    try:
        elastic.inject(step, weights)
    except elastic.InjectedFault as error:
        print("error", error)
    print(step, weights[1].tolist(), slept)
"""


def test_each_fault_happens_once_at_its_step(tmp_path):
    wanted = "step=2,rank=0,kind=corrupt;step=1,rank=0,kind=slow:0.2;step=2,rank=0,kind=exception"
    wanted += ";step=0,rank=1,kind=kill"  # another rank
    command = [sys.executable, "-c", PROGRAM]
    result = run(command, timeout=60, UNISONO_FAULT=wanted, UNISONO_EVENTS=str(tmp_path / "log"))
    one, other = "[1.0, 1.0, 1.0]", "[inf, 1.0, 1.0]"
    assert result.stdout.splitlines() == [
        f"0 {one} []",
        f"1 {one} [0.2]",
        "error a fault that UNISONO_FAULT asked for (step: 2)",
        f"2 {other} []",
        f"1 {other} []",
        f"2 {other} []",
    ], result
    told = [(e["event"], e["rank"], e["step"], e["kind"]) for e in event_log.read(tmp_path / "log")]
    assert told == [
        ("fault", 0, 1, "slow"),
        ("fault", 0, 2, "corrupt"),
        ("fault", 0, 2, "exception"),
    ]


CUT = """
import resource, signal, sys
from strategies.elastic import event_log

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100 * int(sys.argv[1]), resource.RLIM_INFINITY))
event_log.write("spare")
event_log.write("failure", error="x" * 100)
event_log.write("end")  # the file is given up after the line that was cut
"""


def test_a_cut_line_costs_only_its_own_event(tmp_path):
    folder = tmp_path / "log"
    program = str(written(tmp_path, CUT))
    for started in (1, 2):
        command = [sys.executable, program, str(started)]
        result = run(command, timeout=60, UNISONO_EVENTS=str(folder))
        assert result.status == 0, result
        assert "writes no more events" in result.stderr
        assert [event["event"] for event in event_log.read(folder)] == ["spare"] * started


SESSION = """
import sys
import numpy as np
import strategies
from strategies.checkpoint import Saver
from strategies.elastic import InjectedFault
from strategies.session import TrainingSession, hooks
weights = [np.zeros(0), np.ones(3)]
saver = Saver(strategies.CheckpointManager(sys.argv[1]), step=0, weights=weights)
try:
    with TrainingSession(saver, hooks=[hooks.StopAtStep(9)]) as session:
        while not session.should_stop():
            session.run(lambda: print(session.step, weights[1].tolist()))
except InjectedFault as error:
    print(error)
"""


def test_sessions_let_faults_happen(tmp_path):
    command = [sys.executable, "-c", SESSION, str(tmp_path)]
    faults = "step=1,rank=0,kind=corrupt;step=2,rank=0,kind=exception"
    result = run(command, timeout=60, UNISONO_FAULT=faults)
    assert result.stdout.splitlines() == [
        "0 [1.0, 1.0, 1.0]",
        "1 [inf, 1.0, 1.0]",
        "a fault that UNISONO_FAULT asked for (step: 2)",
    ], result


def test_a_full_disk_ends_the_log_and_not_the_program(tmp_path):
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    command = [sys.executable, "-c", PROGRAM]
    faults = "step=1,rank=0,kind=slow:0.2;step=2,rank=0,kind=exception"
    result = run(command, timeout=60, UNISONO_FAULT=faults, UNISONO_EVENTS=str(tmp_path))
    assert result.status == 0, result
    assert "error a fault that UNISONO_FAULT asked for (step: 2)" in result.stdout
    assert result.stderr.count("No space left on device") == 1, result


BEFORE_INIT = """
from strategies import elastic
from strategies.elastic import event_log
import collectives as cc

elastic.inject(0)
event_log.write("spare")
comm = cc.init()
event_log.write("end")
elastic.inject(1)
"""


def test_the_number_of_a_rank_is_that_of_init(tmp_path):
    faults = "step=1,rank=0,kind=slow:0;step=1,rank=1,kind=slow:0"
    program = written(tmp_path, BEFORE_INIT)
    result = mpirun(
        2, program, timeout=60, UNISONO_FAULT=faults, UNISONO_EVENTS=str(tmp_path / "log")
    )
    assert result.status == 0, result
    told = [(event["event"], event["rank"]) for event in event_log.read(tmp_path / "log")]
    assert sorted(told) == [
        ("end", 0), ("end", 1), ("fault", 0), ("fault", 1), ("spare", 0), ("spare", 0)
    ]  # fmt: skip


def test_a_killed_process_leaves_whole_lines(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    result = run(
        command, timeout=60, UNISONO_FAULT="step=1,rank=0,kind=kill", UNISONO_EVENTS=str(tmp_path)
    )
    assert result.status == -9
    (line,) = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "kill"
    with open(tmp_path / "rank-0.jsonl", "a") as file:
        file.write('{"event": "cut sho')
    assert [event["kind"] for event in event_log.read(tmp_path)] == ["kill"]
