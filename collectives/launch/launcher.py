"""Launcher detection: how many processes were started, and whether MPI sees them.

A launcher that does not fit the MPI library starts N processes that each believe to be alone
(`srun --mpi=pmi2` with Open MPI 5 does, with exit status 0): each would train its own model.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping

from collectives.core.errors import LaunchError

__all__ = [
    "check_is_no_child", "check_world_size", "launcher_world_size", "mark_children", "env_count",
]  # fmt: skip

# The variable by which a child of a rank recognizes that it is not a rank: number, process and
# launch of its parent as JSON. A child also inherits the launcher's variables, so MPI would start
# it in the place of the parent.
_MARK = "UNISONO_CHILD_OF"

# Variables of PMIx and PMI that together identify one process of one job.
_PLACES = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_JOBID", "PMI_RANK", "PMI_PORT", "PMI_ID")

# Slurm numbers the steps that srun starts from 0; the batch script, an interactive step and the
# like have numbers close to 2^32.
_SLURM_SPECIAL_STEPS = 0xFFFFFF00


def check_world_size(environ: Mapping[str, str], world_size: int, library: str) -> None:
    """Refuse a world of one where a launcher started several processes.

    The innermost launcher's word counts: `mpirun -np 1` inside a large Slurm job is a world of one,
    and so is a plain `python` in a batch script, which no launcher started.

    Args:
        environ: the process's environment.
        world_size: the size of `MPI_COMM_WORLD`.
        library: the MPI library's own description.

    Raises:
        LaunchError: they contradict each other; says who started how many, and what to do.
    """
    if world_size > 1:
        return
    launched = _find_launcher(environ)
    if launched is None:
        return
    variable, count, launcher, cure = launched
    if count > 1:
        raise LaunchError(
            f"init: {launcher} started {count} processes ({variable}={count}), but MPI sees a "
            f"world of 1, so each process would train alone. The MPI library here is "
            f"{library.splitlines()[0].strip(chr(0)).strip().rstrip(',')}. {cure}"
        )


def mark_children(rank: int, size: int) -> None:
    """Mark the environment that children of this rank inherit; does nothing without a launcher."""
    if place := _place(os.environ):
        mark = {"process": os.getpid(), "rank": rank, "size": size}
        os.environ[_MARK] = json.dumps(mark | {"place": place, "socket": _socket(os.environ)})


def check_is_no_child(environ: Mapping[str, str]) -> None:
    """Refuse a child of a rank, unless it is a rank of another job.

    Raises:
        LaunchError: this process is a child; names the rank.
    """
    mark = json.loads(environ.get(_MARK, "{}"))
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


def _place(environ: Mapping[str, str]) -> list[str]:
    """Return the launcher's variables that identify this process; empty without a launcher."""
    return [f"{name}={environ[name]}" for name in _PLACES if name in environ]


def _socket(environ: Mapping[str, str]) -> int | None:
    """Return the inode of the socket to MPICH's launcher, None if there is none."""
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


def _find_launcher(environ: Mapping[str, str]) -> tuple[str, int, str, str] | None:
    """Return (variable, processes, launcher, cure) of the innermost launcher that left a trace."""
    mixed = (
        "The launcher probably belongs to another MPI than the one Python loaded: start with the "
        "mpirun of that library (see `python -m collectives info`)"
    )
    own = "OMPI_COMM_WORLD_SIZE"
    if own in environ:
        return own, env_count(environ[own]), "mpirun of Open MPI", mixed
    if "TORCHELASTIC_RUN_ID" in environ:
        cure = "torchrun starts no MPI: start with `mpirun -np N python train.py`, or `srun`"
        return "WORLD_SIZE", env_count(environ.get("WORLD_SIZE", "1")), "torchrun", cure
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        step = env_count(environ.get("SLURM_STEP_ID", "0"))
        count = env_count(environ["SLURM_STEP_NUM_TASKS"])
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
    """Return the number in a variable of a launcher, 1 where there is none."""
    return int(text) if text.isdigit() else 1
