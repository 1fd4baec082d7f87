"""Start programs under mpirun with a wall-clock limit, for tests that must not share a world."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from limits import ROOT, Limit, output_of

# Ranks of the worlds of a run of all tests.
WORLD_SIZES = (1, 2, 3, 4)

# Files of the conformance tests that run once more with a way of storing that is forced: what ranks
# of a node make for each other.
STORING = tuple(
    f"test_{name}.py"
    for name in (
        "operations", "out_rows", "grouped_rows", "buckets_calls", "compressed",
        "compression_calls", "several_nodes", "planned",
    )
)  # fmt: skip

# More ranks than cores, as root or not; other MPI libraries ignore all of these.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # A second less for each program that starts MPI by itself; see `launch/open_mpi.py`.
    "OMPI_MCA_btl": "^ofi",
    "UNISONO_RECORDER_DIR": str(ROOT / "out" / "recorder"),
    "PYTHONFAULTHANDLER": "1",  # a job that hangs shows where; see `show_stacks`
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # What JAX compiles is kept: half of what a short program of it takes.
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "out" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

# What an outer mpirun or srun leaves behind; a program started here is not part of it.
_FOREIGN = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "SLURM_", "PRTE_", "OMPI_MCA_")


class Result(NamedTuple):
    """How a program ended."""

    status: int
    stdout: str
    stderr: str

    def checked(self) -> Result:
        """Assert that the program has succeeded."""
        assert self.status == 0, self
        return self


def environment(**extra: str) -> dict[str, str]:
    """The variables for a program that is a world of its own."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    return {**own, **MPI_ENVIRONMENT, **extra}


def mpirun_path(python: str = sys.executable) -> str:
    """The launcher of the MPI library that mpi4py uses: beside the interpreter, else on PATH."""
    beside = Path(python).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside the interpreter and none on PATH"
    return found


def library_beside(name: str) -> tuple[Path, dict[str, str]] | None:
    """Another MPI library, "mpich" or "impi", that `make` puts into the environment.

    Its launcher, and the variables by which mpi4py loads it; None where it is not.
    """
    home = Path(sys.prefix) / name
    launcher = home / "bin" / "mpiexec"
    found_by = {"MPI4PY_LIBMPI": str(home / "lib" / "libmpi.so.12")}
    return (launcher, found_by) if launcher.exists() else None


def run(command: list[str], *, timeout: float, cwd: Path = ROOT, **extra: str) -> Result:
    """Run a command in a process group of its own; past `timeout` seconds all of it is killed.

    Time for compiling does not count: `timeout` is enough for the job with a full code cache on a
    busy machine.
    """
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(**extra), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = output_of(process, timeout, extra.get("NUMBA_CACHE_DIR"))
    except subprocess.TimeoutExpired as error:
        ranks = show_stacks(process)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(
            f"{' '.join(command)} did not end within {timeout} s, with {ranks} processes left\n"
            f"{stdout}\n{stderr}"
        ) from error
    return Result(process.returncode, stdout, stderr)


def show_stacks(launcher: subprocess.Popen[str], seconds: float = 2.0) -> int:
    """Make the ranks of a job in a session of its own write their stacks and end; count them."""
    ranks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            pid, facts = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
            if int(facts[3]) == launcher.pid != pid:
                os.kill(pid, signal.SIGABRT)
                ranks += 1
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(seconds)
    return ranks


def mpirun(
    size: int, *arguments: str | Path, timeout: float = 60, cwd: Path = ROOT,
    options: tuple[str, ...] = (), **extra: str,
) -> Result:  # fmt: skip
    """Run `python arguments...` on `size` ranks."""
    command = [mpirun_path(), *options, "-np", str(size), sys.executable, *map(str, arguments)]
    return run(command, timeout=timeout, cwd=cwd, **extra)


def written(folder: Path, *parts: str) -> Path:
    """Write a program that several texts make up, whatever each is indented by."""
    program = folder / "program.py"
    program.write_text("".join(textwrap.dedent(part) for part in parts))
    return program


def complaints(result: Result) -> list[str]:
    """The lines on stderr, without the notice that loops are being compiled."""
    return [s for s in result.stderr.splitlines() if not s.startswith("compiling loops ")]


def lines(result: Result) -> list[str]:
    """What each rank has printed of itself, `rank 1: ...`, in the order of the ranks."""
    return sorted(line for line in result.stdout.splitlines() if line.startswith("rank "))


def newest_step(checkpoints: Path) -> int:
    """The step of the newest checkpoint in a directory, -1 before the first.

    A program may have deleted an older one between two looks: only the newest is waited for.
    """
    try:
        return int((checkpoints / "latest").read_text().strip().removeprefix("step-"))
    except FileNotFoundError:
        return -1


def asked_to_stop(
    size: int, *arguments: str | Path, saves: Path, step: int = 0, timeout: float = 60,
    options: tuple[str, ...] = (), **extra: str,
) -> Result:  # fmt: skip
    """Run `python arguments...` on `size` ranks; send mpirun SIGUSR1 once it saved `step`."""
    process = subprocess.Popen(
        [mpirun_path(), *options, "-np", str(size), sys.executable, *map(str, arguments)],
        cwd=ROOT, env=environment(**extra), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        limit = Limit(timeout, extra.get("NUMBA_CACHE_DIR"))
        while (newest := newest_step(saves)) < step:
            assert limit.left(), f"newest in {saves} after {timeout} s: {newest}, expected {step}"
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        stdout, stderr = output_of(process, timeout, extra.get("NUMBA_CACHE_DIR"))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Result(process.returncode, stdout, stderr)


# Runs commands of `python -m collectives`, and ends with what they returned. What is measured is
# not looked at, so that a row may take less time than one that is to be believed.
_COMMANDS = """
import json, sys
from collectives import __main__
from collectives.tools import bench
bench.ROW_SECONDS = 0.05
print([__main__.main(command) for command in json.loads(sys.argv[1])], flush=True)
"""


def commands(size: int, *lists: list[str | Path]) -> Result:
    """Run several commands in one world, whose start takes longest; all must succeed."""
    words = json.dumps([list(map(str, command)) for command in lists])
    result = mpirun(size, "-c", _COMMANDS, words, timeout=110).checked()
    assert result.stdout.count(str([0] * len(lists))) == size, result.stdout + result.stderr
    return result
