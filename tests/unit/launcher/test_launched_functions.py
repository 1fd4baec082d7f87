"""`strategies.launch`: functions of this process on new ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import collectives as cc
import strategies
from launcher import ROOT, environment
from limits import Limit
from strategies import errors
from strategies.horovod.runner import run


def test_results_are_in_rank_order_and_output_comes_here(capsys):
    class Weights:
        def __init__(self, values):
            self.values = values

    large = np.arange(2**20, dtype=np.float64)  # 8 MiB

    def train(weights, *, scale):
        comm = cc.init()
        print(f"rank {comm.rank}")
        print("progress", file=sys.stderr)
        total = comm.allreduce(large * scale, op=cc.SUM)
        return comm.rank, Weights(weights.values + total)

    results = strategies.launch(train, 3, args=(Weights(large),), kwargs={"scale": 2})
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, weights in results:
        assert type(weights) is Weights
        assert (weights.values == 7 * large).all()
    output = capsys.readouterr()
    assert sorted(output.out.splitlines()) == ["rank 0", "rank 1", "rank 2"]
    assert output.err.count("progress") == 3


def test_horovods_run_is_the_same():
    assert run(lambda x, y: x + y, (1,), {"y": 2}, np=2, use_mpi=True, verbose=2) == [3, 3]
    with pytest.raises(ValueError, match="run: expected ranks of this machine, got hosts"):
        run(print, num_proc=2, hosts="a:1,b:1")


def raises():
    comm = cc.init()
    if comm.rank == 1:
        raise KeyError("no such layer")  # the line of the user
    comm.barrier()


def leaves():
    if cc.init().rank == 1:
        sys.exit("no data")
    time.sleep(60)


def dies():
    if cc.init().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def returns_a_thread_lock():
    import threading

    return threading.Lock()


FAILURES = [
    (raises, ["rank 1 of 2 raised KeyError: 'no such layer'", "# the line of the user"], KeyError),
    (leaves, ["rank 1 of 2 raised SystemExit: no data"], SystemExit),
    (dies, ["ended without a result", "exit status 137 of mpirun"], None),
    (returns_a_thread_lock, ["of 2 raised TypeError: cannot pickle"], TypeError),
]


@pytest.mark.parametrize(
    ("function", "facts", "cause"), FAILURES, ids=[case[0].__name__ for case in FAILURES]
)
def test_a_rank_that_fails_ends_the_job_with_its_error(function, facts, cause):
    with pytest.raises(errors.RankError) as caught:
        strategies.launch(function, 2)
    for fact in ["launch: ", *facts]:
        assert fact in str(caught.value)
    assert isinstance(caught.value.__cause__, cause or type(None))


def test_a_rank_that_hangs_is_named_with_its_line(tmp_path):
    def waits():
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(600)

    with pytest.raises(errors.DeadlineExceededError, match="rank 1 of 2 not done") as caught:
        strategies.launch(waits, 2, timeout=20)
    assert "in waits" in str(caught.value)


def test_a_world_of_one_may_launch_and_one_of_several_ranks_may_not():
    def nested(ranks):
        return strategies.launch(lambda: cc.init().size, ranks)

    assert strategies.launch(nested, 1, args=(2,)) == [[2, 2]]
    with pytest.raises(errors.RankError, match="this process is a rank already") as caught:
        strategies.launch(nested, 2, args=(1,))
    assert isinstance(caught.value.__cause__, errors.FailedPreconditionError)


@pytest.mark.parametrize(
    ("ranks", "absent", "kind", "fact"),
    [
        (0, "", ValueError, "bad number of ranks, expected an integer >= 1, got 0"),
        (2, "mpirun", errors.NotFoundError, "no mpirun beside python and none on PATH"),
        (2, "cloudpickle", errors.NotFoundError, "pip install cloudpickle"),
    ],
)
def test_it_refuses_before_it_starts_ranks(monkeypatch, tmp_path, ranks, absent, kind, fact):
    if absent == "mpirun":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    elif absent:
        monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(kind, match=fact):
        strategies.launch(print, ranks)


SCRIPT = """
import os, pathlib, sys, time
import strategies

def hang(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    strategies.launch(hang, 2, args=(pathlib.Path(sys.argv[1]),))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_ranks_end_with_the_program(tmp_path, number):
    folder = tmp_path / "ranks"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script, folder], env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        limit = Limit(60)
        while len(ranks := list(folder.iterdir())) < 2:
            assert limit.left(), "no ranks have started"
            time.sleep(0.05)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        while any(Path("/proc", rank.name).exists() for rank in ranks):
            assert limit.left(), f"ranks are left after signal {number}"
            time.sleep(0.05)
    finally:
        process.kill()
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in output) == (number == signal.SIGINT)
