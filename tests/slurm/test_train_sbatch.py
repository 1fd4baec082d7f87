"""slurm/train.sbatch on a real Slurm of two nodes, and what its launch guard catches there."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import POLL_SECONDS, Ending, SlurmCluster, namespaces_allowed
from launcher import ROOT, library_beside
from requirements import require

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("machines")]

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "slurm" / "train.sbatch"
VENV = Path(sys.prefix)
JOB_SECONDS = 60.0  # one takes 2 to 4 s; the machine may be busy

# Library that Python loads, beside the first one -> launchers of its ranks.
LAUNCHERS = [(None, "mpirun"), (None, "srun --mpi=pmix"), ("impi", "srun --mpi=pmi2")]
# For what Slurm does and the library does not see.
BOTH = pytest.mark.parametrize("launcher", ["mpirun", "srun --mpi=pmix"])

# Every program writes a rank's line in one call, so that lines of several ranks do not mix.
REPORT = """
import json, os, platform, sys
import numpy as np
import collectives as cc

comm = cc.init()
facts = {
    "rank": comm.rank,
    "size": comm.size,
    "sum": float(comm.allreduce(np.full(3, comm.rank + 1.0), op=cc.SUM)[2]),
    "local_rank": comm.local_rank,
    "local_size": comm.local_size,
    "node_rank": comm.node_rank,
    "num_nodes": comm.num_nodes,
    "host": platform.node(),
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "arguments": sys.argv[1:],
}
os.write(1, (json.dumps(facts) + "\\n").encode())
"""

FAIL_ON_LAST_RANK = """
from mpi4py import MPI

raise SystemExit(7 if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1 else 0)
"""

FAIL_BEFORE_MPI = """
import os

if os.environ["SLURM_PROCID"] == "3":
    raise ImportError("no such module")
import collectives as cc
cc.init()
"""

WAIT_FOR_USR1 = """
import os, signal

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # before MPI starts threads
from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    os.write(1, b"all wait\\n")
info = signal.sigtimedwait([signal.SIGUSR1], 60)
os.write(1, f"rank {MPI.COMM_WORLD.rank} got {info and info.si_signo}\\n".encode())
MPI.COMM_WORLD.Barrier()  # the first that ends with a status takes the others along
raise SystemExit(5 if info else 1)
"""

WAIT_UNLESS_RESUMED = """
import os, signal, sys
from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    os.write(1, f"arguments {sys.argv[1:]}\\n".encode())
if "--resume" not in sys.argv:
    signal.alarm(60)
    signal.pause()
"""


STOP_ON_USR1 = """
import os, signal, sys

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # before MPI starts threads
from mpi4py import MPI

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank that exits ends the others
if "--resume" in sys.argv:
    os.write(1, b"resumed\\n")
    raise SystemExit(0)
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    os.write(1, b"all wait\\n")
info = signal.sigtimedwait([signal.SIGUSR1], 60)
MPI.COMM_WORLD.Barrier()
raise SystemExit(85 if info else 1)
"""


TRAIN_UNTIL_ASKED = """
import os, sys, time
import collectives as cc
from strategies.session import TrainingSession

comm = cc.init()
if "--resume" in sys.argv:
    os.write(1, b"resumed\\n")
    raise SystemExit(0)
with TrainingSession(comm=comm) as session:
    if comm.rank == 0:
        os.write(1, b"all train\\n")
    limit = time.monotonic() + 60
    while not session.should_stop():
        session.run(lambda: time.sleep(0.01))
        if comm.allreduce(time.monotonic() > limit, op=cc.MAX):
            raise SystemExit(1)
"""


RECORD_ON_USR2 = """
import os, time
from pathlib import Path
import collectives as cc

comm = cc.init()
comm.barrier()
if comm.rank == 0:
    os.write(1, b"all wait\\n")
mine = Path(os.environ["UNISONO_RECORDER_DIR"]) / f"rank-{comm.rank}.json"
limit = time.monotonic() + 60
while not mine.exists() and time.monotonic() < limit:
    time.sleep(0.02)
comm.barrier()
raise SystemExit(0 if mine.exists() else 1)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A file for the program that a test writes."""
    return tmp_path / "program.py"


def environment(program: Path) -> dict[str, str]:
    return {"UNISONO_VENV": str(VENV), "UNISONO_PROGRAM": str(program)}


def reports(output: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


@pytest.mark.parametrize(("library", "launcher"), LAUNCHERS)
def test_nodes_and_ranks_are_one_world(
    slurm_cluster: SlurmCluster, program: Path, library: str | None, launcher: str
) -> None:
    program.write_text(REPORT)
    given = environment(program) | {"UNISONO_LAUNCHER": launcher}
    if library is not None:
        found = library_beside(library)
        if found is None:
            require(library, f"no {library} is beside the first MPI library")
        given |= found[1]
    job = slurm_cluster.submit(
        SCRIPT, "--steps", "two words", "", nodes=2, ntasks_per_node=2, cpus_per_task=2, env=given,
    )  # fmt: skip
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    output = slurm_cluster.output(job)
    assert ending == Ending("COMPLETED", 0), output

    ranks = reports(output)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    assert [rank["node_rank"] for rank in ranks] == [0, 0, 1, 1]
    assert [rank["local_rank"] for rank in ranks] == [0, 1, 0, 1]
    everywhere = {"size": 4, "sum": 10.0, "num_nodes": 2, "local_size": 2, "threads": "2"}
    assert all(everywhere.items() <= rank.items() for rank in ranks), ranks
    assert all(rank["arguments"] == ["--steps", "two words", ""] for rank in ranks)
    if slurm_cluster.namespaces:
        assert [rank["host"] for rank in ranks] == ["n1", "n1", "n2", "n2"]

    header = output.splitlines()[0]
    assert header.startswith(f"train.sbatch: job {job}, nodes 2 (n[1-2]), ranks 4, ")
    assert header.endswith(f"program {program}")
    if launcher == "mpirun" and (VENV / "bin" / "mpirun").exists():
        launcher = str(VENV / "bin" / "mpirun")
    assert f", launcher {launcher}" in header


def test_defaults_of_the_script(slurm_cluster: SlurmCluster, program: Path) -> None:
    program.write_text(REPORT)
    job = slurm_cluster.submit(SCRIPT, env=environment(program))
    assert slurm_cluster.wait(job, JOB_SECONDS).exit_code == 0, slurm_cluster.output(job)
    ranks = reports(slurm_cluster.output(job))
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["size"] == 2 and rank["threads"] == "1" for rank in ranks)
    assert all(rank["arguments"] == [] for rank in ranks)


def test_status_of_a_failing_rank_is_that_of_the_job(
    slurm_cluster: SlurmCluster, program: Path
) -> None:
    program.write_text(FAIL_ON_LAST_RANK)
    job = slurm_cluster.submit(SCRIPT, nodes=2, ntasks_per_node=2, env=environment(program))
    assert slurm_cluster.wait(job, JOB_SECONDS) == Ending("FAILED", 7), slurm_cluster.output(job)


def test_a_rank_that_fails_before_mpi_starts_ends_a_step_of_srun(
    slurm_cluster: SlurmCluster, program: Path
) -> None:
    """The others wait for it in MPI_Init; the status is the highest, which may be theirs."""
    program.write_text(FAIL_BEFORE_MPI)
    given = environment(program) | {"UNISONO_LAUNCHER": "srun --mpi=pmix"}
    job = slurm_cluster.submit(SCRIPT, nodes=2, ntasks_per_node=2, env=given)
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    assert ending.state == "FAILED", slurm_cluster.output(job)
    assert "ImportError: no such module" in slurm_cluster.output(job)


def test_usr1_reaches_every_rank_and_their_status_the_job(
    slurm_cluster: SlurmCluster, program: Path
) -> None:
    program.write_text(WAIT_FOR_USR1)
    job = slurm_cluster.submit(SCRIPT, nodes=2, ntasks_per_node=2, env=environment(program))
    slurm_cluster.wait_output(job, "all wait", JOB_SECONDS)
    # What --signal=B:USR1@120 makes Slurm do two minutes before the time limit.
    slurm_cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    assert slurm_cluster.wait(job, JOB_SECONDS) == Ending("FAILED", 5), slurm_cluster.output(job)
    for rank in range(4):
        assert f"rank {rank} got 10\n" in slurm_cluster.output(job)


def test_usr2_makes_every_rank_write_a_flight_record_and_the_job_goes_on(
    slurm_cluster: SlurmCluster, program: Path, tmp_path: Path
) -> None:
    program.write_text(RECORD_ON_USR2)
    records = tmp_path / "records"
    job = slurm_cluster.submit(
        SCRIPT, nodes=2, ntasks_per_node=2,
        env={**environment(program), "UNISONO_RECORDER_DIR": str(records)},
    )  # fmt: skip
    slurm_cluster.wait_output(job, "all wait", JOB_SECONDS)
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", str(job))
    assert slurm_cluster.wait(job, JOB_SECONDS) == Ending("COMPLETED", 0), slurm_cluster.output(job)
    for rank in range(4):
        assert json.loads((records / f"rank-{rank}.json").read_text())["reason"] == "SIGUSR2"


def test_a_requeued_job_resumes(slurm_cluster: SlurmCluster, program: Path) -> None:
    program.write_text(WAIT_UNLESS_RESUMED)
    job = slurm_cluster.submit(
        SCRIPT, "--steps", "9", nodes=2, ntasks_per_node=1, env=environment(program)
    )
    slurm_cluster.wait_output(job, "arguments ['--steps', '9']", JOB_SECONDS)
    slurm_cluster.run("scontrol", "requeue", str(job))
    slurm_cluster.wait_field(job, "JobState", "PENDING", JOB_SECONDS)
    # Else Slurm waits two minutes.
    slurm_cluster.start_again(job)
    assert slurm_cluster.wait(job, JOB_SECONDS) == Ending("COMPLETED", 0), slurm_cluster.output(job)
    output = slurm_cluster.output(job)
    assert "arguments ['--steps', '9']\n" in output, "the output of the first run is kept"
    assert f"program {program}, restart 1\n" in output
    assert "arguments ['--steps', '9', '--resume']\n" in output


@BOTH
def test_a_job_that_is_asked_to_stop_goes_back_to_the_queue_and_resumes(
    slurm_cluster: SlurmCluster, program: Path, launcher: str
) -> None:
    program.write_text(STOP_ON_USR1)
    given = environment(program) | {"UNISONO_LAUNCHER": launcher}
    job = slurm_cluster.submit(SCRIPT, nodes=2, ntasks_per_node=1, env=given)
    slurm_cluster.wait_output(job, "all wait", JOB_SECONDS)
    slurm_cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    slurm_cluster.wait_field(job, "JobState", "PENDING", JOB_SECONDS)
    slurm_cluster.start_again(job)
    assert slurm_cluster.wait(job, JOB_SECONDS) == Ending("COMPLETED", 0), slurm_cluster.output(job)
    output = slurm_cluster.output(job)
    assert f"train.sbatch: job {job} stopped on request, back to the queue\n" in output
    assert "resumed\n" in output


@BOTH
def test_a_job_that_makes_room_for_another_goes_back_to_the_queue_and_resumes(
    slurm_cluster: SlurmCluster, program: Path, tmp_path: Path, launcher: str
) -> None:
    program.write_text(TRAIN_UNTIL_ASKED)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\nexit 0\n")
    given = environment(program) | {"UNISONO_LAUNCHER": launcher}
    job = slurm_cluster.submit(SCRIPT, nodes=2, ntasks_per_node=2, env=given)
    slurm_cluster.wait_output(job, "all train", JOB_SECONDS)
    other = slurm_cluster.submit(urgent, partition="urgent", nodes=2, exclusive=True)
    slurm_cluster.wait_field(job, "JobState", "PENDING", JOB_SECONDS)
    assert slurm_cluster.wait(other, JOB_SECONDS) == Ending("COMPLETED", 0)
    slurm_cluster.start_again(job)
    assert slurm_cluster.wait(job, JOB_SECONDS) == Ending("COMPLETED", 0), slurm_cluster.output(job)
    output = slurm_cluster.output(job)
    assert f"train.sbatch: job {job} stopped on request, back to the queue\n" in output
    assert "resumed\n" in output


def test_checkout_with_spaces_in_its_path(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    checkout = tmp_path / "my own checkout"
    (checkout / "slurm").mkdir(parents=True)
    (checkout / "examples").mkdir()
    shutil.copy(SCRIPT, checkout / "slurm")
    (checkout / "examples" / "train_digits.py").write_text(REPORT)
    (checkout / ".venv").symlink_to(VENV)
    job = slurm_cluster.submit("slurm/train.sbatch", nodes=2, ntasks_per_node=1, cwd=checkout)
    assert slurm_cluster.wait(job, JOB_SECONDS).exit_code == 0, slurm_cluster.output(job)
    assert [rank["sum"] for rank in reports(slurm_cluster.output(job))] == [3.0, 3.0]

    job = slurm_cluster.submit(
        checkout / "slurm" / "train.sbatch", cwd=tmp_path, env={"UNISONO_CHECKOUT": str(checkout)}
    )
    assert slurm_cluster.wait(job, JOB_SECONDS).exit_code == 0, slurm_cluster.output(job)


def test_mistakes_are_named(slurm_cluster: SlurmCluster, tmp_path: Path, program: Path) -> None:
    empty = tmp_path / "checkout"
    (empty / "slurm").mkdir(parents=True)
    shutil.copy(SCRIPT, empty / "slurm")
    cases = {
        f"no checkout of Unisono, expected slurm/train.sbatch in it, got '{tmp_path}'": {},
        f"no virtual environment, expected bin/python in it, got '{empty}/.venv'": {
            "UNISONO_CHECKOUT": str(empty)
        },
        f"no training program at '{program}'": environment(program),
    }
    jobs = [slurm_cluster.submit(SCRIPT, cwd=tmp_path, env=env) for env in cases.values()]
    for job, message in zip(jobs, cases, strict=True):
        assert slurm_cluster.wait(job, JOB_SECONDS) == Ending("FAILED", 2)
        assert f"train.sbatch: {message}" in slurm_cluster.output(job)

    bare = subprocess.run(
        ["bash", SCRIPT], capture_output=True, text=True, env=slurm_cluster.environment()
    )
    assert bare.returncode != 0
    assert "submit this file with sbatch" in bare.stderr


def test_srun_with_pmi2_is_refused(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Open MPI 5 makes four worlds of one of this, and ends with status 0."""
    (tmp_path / "program.py").write_text("import collectives as cc\ncc.init()\n")
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun --mpi=pmi2 '{VENV}/bin/python' program.py\n")
    job = slurm_cluster.submit(script, nodes=2, ntasks_per_node=2, cwd=tmp_path)
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    output = slurm_cluster.output(job)
    assert ending.exit_code != 0, output
    assert "LaunchError" in output
    assert "--mpi=pmi2" in output


def test_plain_python_in_a_job_is_a_world_of_one(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A batch script has SLURM_NTASKS=4 and SLURM_PROCID=0, and yet no launcher started this."""
    (tmp_path / "program.py").write_text(
        "import collectives as cc\nprint('size', cc.init().size)\n"
    )
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n'{VENV}/bin/python' program.py\n")
    job = slurm_cluster.submit(script, nodes=2, ntasks_per_node=2, cwd=tmp_path)
    assert slurm_cluster.wait(job, JOB_SECONDS) == Ending("COMPLETED", 0), slurm_cluster.output(job)
    assert "size 1\n" in slurm_cluster.output(job)


def test_main_job_on_two_nodes(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    results = tmp_path / "results of the job"
    job = slurm_cluster.submit(
        SCRIPT, "--data-dir", tmp_path / "data", "--output-dir", results,
        nodes=2, ntasks_per_node=1, cwd=CHECKOUT, env={"UNISONO_VENV": str(VENV)},
    )  # fmt: skip
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    output = slurm_cluster.output(job)
    assert ending == Ending("COMPLETED", 0), output
    assert not slurm_cluster.namespaces or "2 ranks on 2 nodes" in output, output
    accuracy = re.search(r"accuracy\D*([\d.]+\d)\s*(%?)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) / (100 if accuracy[2] else 1) >= 0.96
    for kind in ("*.png", "*.safetensors", "*.jsonl"):
        assert list(results.rglob(kind)), f"no {kind} in {results}\n{output}"


def test_a_wait_that_is_too_short_shows_job_and_daemons(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    job = slurm_cluster.submit(script, hold=True)
    with pytest.raises(TimeoutError, match=rf"no the end of job {job} after 0 s") as error:
        slurm_cluster.wait(job, timeout=0)
    assert "JobHeldUser" in str(error.value)
    assert "--- slurmctld\n" in str(error.value)
    slurm_cluster.run("scancel", str(job))
    assert slurm_cluster.wait(job, JOB_SECONDS).state == "CANCELLED"


CLUSTER_OF_KILLED_TESTS = """
import sys
from cluster import SlurmCluster

with SlurmCluster(namespaces=sys.argv[1] == "True") as cluster:
    job = cluster.submit(sys.argv[2])
    cluster.wait_output(job, "locked", 60)
    print(cluster.directory, flush=True)
    input()
"""


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.usefixtures("slurm_cluster")  # for its skip
def test_killed_tests_leave_nothing_behind(namespaces: bool, tmp_path: Path) -> None:
    if namespaces and not namespaces_allowed():
        require("netns", "namespaces are forbidden here")
    script = tmp_path / "job.sh"  # alive as long as the lock is held
    script.write_text(f"#!/bin/bash\nexec 9>'{tmp_path}/lock'; flock 9; echo locked; sleep 300\n")
    tests = subprocess.Popen(
        [sys.executable, "-c", CLUSTER_OF_KILLED_TESTS, str(namespaces), script],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with tests:
        assert tests.stdout is not None
        directory = Path(tests.stdout.readline().strip())
        assert (directory / "slurm.conf").exists()
        tests.kill()
    deadline = time.monotonic() + JOB_SECONDS
    while directory.exists():  # removed after the last daemon has ended
        assert time.monotonic() < deadline, f"{directory} is still there"
        time.sleep(POLL_SECONDS)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
