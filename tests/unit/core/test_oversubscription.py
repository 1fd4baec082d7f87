"""More threads than cores: what counts, and who says so."""

import os
import sys
from types import SimpleNamespace

import pytest

from collectives.core import oversubscription
from launcher import mpirun

PROGRAM = """
import os, sys
from mpi4py import MPI
import collectives as cc
cores = sorted(os.sched_getaffinity(0))
if sys.argv[1] == "bound":
    os.sched_setaffinity(0, {cores[MPI.COMM_WORLD.rank % len(cores)]})
cc.init()
cc.init()
"""
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OPENBLAS_NUM_THREADS": " 2 "}, 2),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": ""}, 8),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"MKL_NUM_THREADS": "all"}, 8),
        ({"MKL_NUM_THREADS": "9" * 5000}, 8),
    ],
)
def test_the_variables_decide_and_else_there_is_a_thread_for_each_core(environ, expected):
    assert oversubscription.thread_count(environ, 8) == expected


MPI = SimpleNamespace(COMM_TYPE_SHARED=0, IN_PLACE="in place", SUM="sum", BOR="or")


class Node:
    """So many ranks of a node on the same cores, which start so many threads; this is the first."""

    def __init__(self, ranks, started):
        self.ranks, self.started = ranks, started

    def Split_type(self, kind, key):
        return self

    def Get_rank(self):
        return 0

    def Get_size(self):
        return self.ranks

    def Reduce(self, send, receive, op):
        if op == MPI.SUM:
            receive[:] = self.started

    def Free(self):
        pass


@pytest.mark.parametrize(
    ("ranks", "started", "cores", "remedy"),
    [
        (1, 8, 2, None),
        (2, 2, 2, None),
        (4, 4, 2, None),  # as was asked for
        (2, 4, 4, None),
        (2, 4, 2, "OMP_NUM_THREADS=1"),
        (4, 64, 16, "OMP_NUM_THREADS=4"),
        (4, 8, 2, "OMP_NUM_THREADS=1"),
    ],
)
def test_a_warning_says_how_many_threads_would_fit(ranks, started, cores, remedy, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=MPI))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    text = oversubscription.warning_for(Node(ranks, started), {})
    if remedy is None:
        assert text is None
    else:
        assert text is not None
        assert f"{ranks} ranks on this node start {started} threads for {cores} cores" in text
        assert f"Set {remedy} before the start" in text


def warnings(tmp_path, how, **extra):
    """What two ranks have logged that start with these variables and no others."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    unset = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "")
    result = mpirun(2, program, how, **{**unset, **extra}).checked()
    return [line for line in result.stderr.splitlines() if "threads" in line]


def test_too_many_threads_are_told_once_for_a_node(tmp_path):
    (line,) = warnings(tmp_path, "unbound", OPENBLAS_NUM_THREADS="9999")
    assert line.startswith("[0/2] init: ")
    assert f"2 ranks on this node start 19998 threads for {CORES} cores" in line


@pytest.mark.parametrize("how", ["unbound", "bound"])
def test_ranks_that_are_bound_to_cores_of_their_own_are_no_crowd(tmp_path, how):
    lines = warnings(tmp_path, how)
    assert len(lines) == (how == "unbound" and CORES > 1)


def test_one_thread_for_each_rank_is_no_crowd(tmp_path):
    assert warnings(tmp_path, "unbound", OMP_NUM_THREADS="1") == []


def test_a_slip_in_the_name_of_a_setting_is_told_once(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = mpirun(2, program, "unbound", UNISONO_TIMOUT="5").checked()
    assert result.stderr.count("UNISONO_TIMOUT is not read, expected UNISONO_TIMEOUT") == 1
