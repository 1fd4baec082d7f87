"""The launch guard and Open MPI's settings, from environments written down here."""

import re
import subprocess
import sys

import pytest

import collectives as cc
from collectives.launch import launcher, open_mpi
from launcher import ROOT, environment

OPEN_MPI = "Open MPI v5.0.11, package: x, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."

# What Slurm sets in a batch script, which it runs once, for a job of 4 tasks.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
# What srun adds for each task of a step.
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}


@pytest.mark.parametrize(
    ("environ", "library", "words"),
    [
        (STEP, OPEN_MPI, ["srun started 4", "SLURM_STEP_NUM_TASKS=4", "--mpi=pmi2", "Open MPI v5"]),
        ({**STEP, "PMI_SIZE": "4"}, OPEN_MPI, ["srun started 4", "--mpi=pmi2"]),
        (
            {**STEP, "TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "8"},
            OPEN_MPI,
            ["torchrun started 8", "WORLD_SIZE=8", "mpirun -np N"],
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1"},
            OPEN_MPI,
            ["mpirun of MPICH started 2", "another MPI"],
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1", "I_MPI_HYDRA_UUID": "a9170000"},
            OPEN_MPI,
            ["mpirun of Intel MPI started 2", "another MPI"],
        ),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, MPICH, ["mpirun of Open MPI started 3", "MPICH Version"]),
    ],
)
def test_several_processes_that_are_each_alone_are_refused(environ, library, words):
    with pytest.raises(cc.LaunchError) as caught:
        launcher.check_world_size(environ, 1, library)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "world_size"),
    [
        ({}, 1),
        (BATCH, 1),
        ({**BATCH, "OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({**STEP, "OMPI_COMM_WORLD_SIZE": "1"}, 1),  # mpirun -np 1 inside a step
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({**STEP, "SLURM_STEP_ID": "4294967290"}, 1),  # the step of an interactive salloc
        ({"PMI_SIZE": "1"}, 1),
        (STEP, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
    ],
)
def test_a_good_launch_is_let_through(environ, world_size):
    launcher.check_world_size(environ, world_size, OPEN_MPI)


@pytest.mark.parametrize(
    ("environ", "library", "files", "words"),
    [
        ({}, OPEN_MPI, ["/a/libmpi.so.40"], None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, OPEN_MPI, ["/a/libmpi.so.40"], None),
        ({"PMI_SIZE": "2"}, MPICH, ["/b/libmpi.so.12"], None),
        ({}, MPICH, ["/b/libmpi.so.12"], None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, MPICH, [], "mpirun belongs to Open MPI, but .* MPICH"),
        ({}, OPEN_MPI, ["/a/libmpi.so.40", "/b/libmpi.so.12"], "2 MPI libraries, /a/.* and /b/"),
    ],
)
def test_a_library_that_does_not_fit_is_named_before_mpi_starts(environ, library, files, words):
    warning = launcher.foreign_library_warning(environ, library, files)
    assert (warning is None) if words is None else re.search(words, warning)


PTY = {**STEP, "SLURM_PTY_PORT": "40123"}
CHECK = """
import os
from collectives.launch import launcher
launcher.check_is_no_shell_of_srun(os.environ)
"""
# The leader of a session, as slurmstepd starts it; a shell gives each program its own group.
LEADER = f"""
import os, subprocess, sys
group = os.setpgrp if sys.argv[1] == "shell" else None
sys.exit(subprocess.call([sys.executable, "-c", {CHECK!r}], preexec_fn=group))
"""


@pytest.mark.parametrize(
    ("leader", "environ", "refused"),
    [
        ("shell", PTY, True),
        ("script", PTY, False),
        ("shell", STEP, False),
        ("shell", {**PTY, "SLURM_STEP_NUM_TASKS": "1"}, False),
    ],
)
def test_a_program_in_a_shell_of_srun_is_refused(leader, environ, refused):
    done = subprocess.run(
        [sys.executable, "-c", LEADER, leader], env=environment(**environ), cwd=ROOT,
        start_new_session=True, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode == 1) == refused, done
    assert ("this shell is one of 4 tasks of `srun --pty`" in done.stderr) == refused


def test_settings_are_given_only_where_the_user_made_none():
    plain = open_mpi.recommended_settings({}, cores=8)
    assert set(plain) == {
        "OMPI_MCA_osc",
        "OMPI_MCA_btl",
        "OMPI_MCA_btl_tcp_links",
        "OMPI_MCA_btl_tcp_eager_limit",
    }
    own = dict.fromkeys(plain, "mine")
    assert open_mpi.recommended_settings(own, 8) == {}
    assert open_mpi.recommended_settings({"OMPI_COMM_WORLD_LOCAL_SIZE": "many"}, cores=8) == plain
    full = open_mpi.recommended_settings({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, cores=8)
    assert full["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_settings_that_come_too_late_for_lines_between_nodes_are_named_on_the_first_rank():
    def warned(rank="0", ranks="4", of_node="2", **own):
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
        environ = dict(zip(names, (rank, ranks, of_node), strict=True)) | own
        return open_mpi.late_settings_warning(
            environ, open_mpi.recommended_settings(environ, cores=8)
        )

    assert "Call init first, or set OMPI_MCA_btl_tcp_links=2 OMPI_MCA_btl_tcp_eager" in warned()
    assert "links" not in warned(OMPI_MCA_btl_tcp_links="4")
    assert warned(rank="1") is None
    assert warned(of_node="4") is None
    assert warned(OMPI_MCA_btl_tcp_links="4", OMPI_MCA_btl_tcp_eager_limit="1") is None
    assert open_mpi.late_settings_warning({}, open_mpi.recommended_settings({}, cores=8)) is None


def test_a_world_of_one_works_without_a_launcher():
    comm = cc.init()
    assert cc.init() is comm
    assert (comm.rank, comm.size, comm.local_rank, comm.num_nodes) == (0, 1, 0, 1)
    assert (cc.rank(), cc.size(), cc.local_rank(), cc.local_size()) == (0, 1, 0, 1)
    assert cc.allreduce([1.0, 2.0]).tolist() == [1.0, 2.0]
    cc.shutdown()
    cc.shutdown()
    assert not cc.is_initialized()
    with pytest.raises(RuntimeError, match=r"call collectives\.init\(\) first"):
        cc.rank()
    assert cc.init().size == 1
