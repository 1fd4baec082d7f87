"""Launcher detection: how many processes were started, and whether MPI sees them.

With a launcher that does not fit the MPI library, N processes each start as a world of one, with
exit status 0 (as `srun --mpi=pmi2` with Open MPI 5). Each would train its own model.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping, Sequence

from collectives.core.errors import LaunchError

__all__ = [
    "check_is_no_child", "check_is_no_shell_of_srun", "check_world_size", "env_count",
    "foreign_library_warning", "launcher_rank", "launcher_world_size", "mark_children",
]  # fmt: skip

# The variable by which a child of a rank detects that it is not a rank: number, process and launch
# of its parent, as JSON. A child also inherits the launcher's variables, so MPI would start it in
# place of the parent.
_MARK = "UNISONO_CHILD_OF"

# Variables of PMIx and PMI that together identify one process of one job.
_PLACES = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_JOBID", "PMI_RANK", "PMI_PORT", "PMI_ID")

# Variables with the number of this process, those of inner launchers first.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")

# srun numbers its steps from 0; batch scripts, interactive steps and similar ones have numbers
# close to 2^32.
_SLURM_SPECIAL_STEPS = 0xFFFFFF00


def check_world_size(environ: Mapping[str, str], world_size: int, library: str) -> None:
    """Reject a world of one if a launcher started several processes.

    The innermost launcher counts: `mpirun -np 1` inside a large Slurm job is a world of one, and so
    is a plain `python` in a batch script, which no launcher started.

    Args:
        environ: environment of the process.
        world_size: size of `MPI_COMM_WORLD`.
        library: MPI library, as it describes itself.

    Raises:
        LaunchError: launcher and MPI contradict each other; names both and the remedy.
    """
    # Several processes form a world, so launcher and MPI fit.
    if world_size > 1:
        return
    launched = _find_launcher(environ)
    if launched is None:
        return
    variable, count, launcher, cure = launched
    # One process started by a launcher is a world of one, as expected.
    if count > 1:
        raise LaunchError(
            f"init: {launcher} started {count} processes ({variable}={count}), but MPI sees a "
            f"world of 1, so each process would train alone. The MPI library here is "
            f"{library.splitlines()[0].strip(chr(0)).strip().rstrip(',')}. {cure}"
        )


def foreign_library_warning(
    environ: Mapping[str, str], library: str, files: Sequence[str]
) -> str | None:
    """Return what may go wrong in MPI_Init, None if all fits.

    MPICH in processes of Open MPI's mpirun ends them with "unsupported PMI version PMIx", unless it
    was built for PMIx. A second library replaces functions of the first one.

    Args:
        environ: environment of the process.
        library: MPI library, as it describes itself.
        files: the MPI libraries that this process has loaded.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ and not library.startswith("Open MPI"):
        return (
            f"init: mpirun belongs to Open MPI, but Python loaded {library}. If MPI stops now, "
            "start with the mpirun of that library (see `python -m collectives info`)"
        )
    # Once, because some programs work nevertheless.
    if len(files) > 1 and launcher_rank() == 0:
        return (
            f"init: this process has loaded {len(files)} MPI libraries, {' and '.join(files)}, "
            "which may call each other's functions. Keep one: see LD_PRELOAD, LD_LIBRARY_PATH and "
            "the packages that are imported before `init`"
        )
    return None


def mark_children(rank: int, size: int) -> None:
    """Mark the environment that children of this rank inherit; no-op without a launcher."""
    # Without a launcher a child starts as a world of one, and does no harm.
    if place := _place(os.environ):
        mark = {"process": os.getpid(), "rank": rank, "size": size}
        os.environ[_MARK] = json.dumps(mark | {"place": place, "socket": _socket(os.environ)})


def check_is_no_child(environ: Mapping[str, str]) -> None:
    """Reject a child of a rank, unless it is a rank of another job.

    Raises:
        LaunchError: this process is a child; names the rank.
    """
    mark = json.loads(environ.get(_MARK, "{}"))
    # A process keeps its number in `exec`, and a rank of another job has other variables.
    if not mark or mark["process"] == os.getpid() or mark["place"] != _place(environ):
        return
    # MPICH numbers the ranks of every job from 0, but each rank has a separate socket.
    if _socket(environ) not in (None, mark["socket"]):
        return
    raise LaunchError(
        f"init: a child process cannot be a rank, expected a process of the launcher, got a child "
        f"of rank {mark['rank']} of {mark['size']} (process {mark['process']}). A worker that "
        'imports the program again must not call init: put it under `if __name__ == "__main__":`'
    )


def check_is_no_shell_of_srun(environ: Mapping[str, str]) -> None:
    """Reject a program that was typed in a shell of `srun --pty` with several tasks.

    MPI_Init would wait for the other tasks, which run shells without input.

    Raises:
        LaunchError: this process is a job of such a shell; names the remedy.
    """
    count = env_count(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_PTY_PORT" not in environ or count == 1:
        return
    # An interactive shell leads the session and starts each program in a process group of its own.
    # A rank of mpirun has another parent; a task or script of srun is in the group of the leader.
    if os.getppid() == os.getsid(0) != os.getpgrp():
        raise LaunchError(
            f"init: this shell is one of {count} tasks of `srun --pty`, and the other tasks run no "
            "program. Start ranks by mpirun; on several nodes, in a shell of `salloc`"
        )


def _place(environ: Mapping[str, str]) -> list[str]:
    """Return the launcher's variables that identify this process; empty without a launcher."""
    return [f"{name}={environ[name]}" for name in _PLACES if name in environ]


def _socket(environ: Mapping[str, str]) -> int | None:
    """Return the inode of the socket to MPICH's launcher; None without one."""
    # PMI_FD is the number of a descriptor, which may be closed or reused.
    with contextlib.suppress(ValueError, OSError):
        facts = os.fstat(int(environ.get("PMI_FD", "")))
        return facts.st_ino if stat.S_ISSOCK(facts.st_mode) else None
    return None


def launcher_world_size() -> int:
    """Return the number of processes that the launcher started, 1 without a launcher.

    Reads the environment variables of `mpirun`, `srun` and other launchers; MPI is not started.
    """
    launched = _find_launcher(os.environ)
    return 1 if launched is None else launched[1]


def launcher_rank() -> int:
    """Return the number that the launcher gave this process, 0 without a launcher.

    For errors before MPI starts: a child of a rank inherits the number.
    """
    text = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    return int(text) if text.isdigit() else 0


def _find_launcher(environ: Mapping[str, str]) -> tuple[str, int, str, str] | None:
    """Return (variable, processes, launcher, remedy) of the innermost launcher, or None."""
    mixed = (
        "The launcher probably belongs to another MPI than the one Python loaded: start with the "
        "mpirun of that library (see `python -m collectives info`)"
    )
    own = "OMPI_COMM_WORLD_SIZE"
    # Open MPI's variable is the innermost: its mpirun may run inside a Slurm step.
    if own in environ:
        return own, env_count(environ[own]), "mpirun of Open MPI", mixed
    # torchrun sets WORLD_SIZE and starts processes without MPI.
    if "TORCHELASTIC_RUN_ID" in environ:
        cure = "torchrun starts no MPI: start with `mpirun -np N python train.py`, or `srun`"
        return "WORLD_SIZE", env_count(environ.get("WORLD_SIZE", "1")), "torchrun", cure
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        step = env_count(environ.get("SLURM_STEP_ID", "0"))
        count = env_count(environ["SLURM_STEP_NUM_TASKS"])
        # A batch script is a step of its own, with a special number.
        if step < _SLURM_SPECIAL_STEPS:
            cure = (
                "`srun --mpi=pmi2` and `srun --mpi=none` do this with Open MPI 5, without an "
                "error: use mpirun inside the batch script (slurm/train.sbatch), or "
                "`srun --mpi=pmix`"
            )
            return "SLURM_STEP_NUM_TASKS", count, "srun", cure
    if "PMI_SIZE" in environ:
        name = "Intel MPI" if "I_MPI_HYDRA_UUID" in environ else "MPICH"
        return "PMI_SIZE", env_count(environ["PMI_SIZE"]), f"mpirun of {name}", mixed
    return None


def env_count(text: str) -> int:
    """Return the number in a launcher's variable; 1 if it is not a number."""
    return int(text) if text.isdigit() else 1
