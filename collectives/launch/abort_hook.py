"""Exception hook: aborts the job on an uncaught exception or a nonzero `sys.exit`.

Such an error would leave the other ranks waiting for this one for ever, because the interpreter
waits in `MPI_Finalize` for them.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from collectives.core.errors import CollectiveTimeout, await_turn, page
from collectives.launch.open_mpi import is_fault_tolerant
from collectives.transport import failure_detector, liveness

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["abort_on_exception", "exit_all"]

# Seconds in which the lowest rank expects others to fail as it does, and then the next one after
# each; those that do not fail learn of its end that much later.
_LEAST_WAIT, _OTHERS_END_WITHIN = 1.0, 5.0


def abort_on_exception(world: MPI.Intracomm) -> None:
    """From now on, let an exception that nobody catches end all ranks of the job.

    The rank prints its traceback, each line marked with `[rank/size]`, with the command that says
    what an error of its kind means, and calls `MPI_Abort`; the exit status is 1. Where all ranks
    raise the same error, one of them prints it. This holds for the main thread and all others.
    `sys.exit` on the main thread with a text, or a status other than 0, does the same, with that
    text and status. Nothing is changed inside pytest and IPython, which show exceptions themselves,
    and in forked children; in a world of one only the command is added to a traceback.

    Where a job survives the death of a rank (`is_fault_tolerant`), only this rank ends, by SIGKILL.
    The surviving ranks exit with its status once all of them have ended their programs; if all
    ranks fail, the last one exits with it. A `CollectiveTimeout` ends the job there as well.
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
        # What is kept in memory would be lost: PyTorch's hook collects there what this one writes.
        shown = isinstance(sys.stderr, io.StringIO) and sys.__stderr__ or sys.stderr
        # One write, so that the lines of several ranks do not mix.
        sys.stdout.flush()
        shown.write(marked)
        shown.flush()
        _end(world, status, error, others_follow)

    def abort(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = _format_traceback(kind, error or kind(), trace)
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


def _format_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> str:
    """Return a traceback as the interpreter prints it."""
    if sys.version_info >= (3, 12):
        return "".join(traceback.format_exception(kind, error, trace))
    # In older versions only the interpreter itself adds "Did you mean".
    shown, sys.stderr = sys.stderr, io.StringIO()
    try:
        sys.__excepthook__(kind, error, trace)
        return sys.stderr.getvalue()
    finally:
        sys.stderr = shown


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
    # others; of one that a signal has ended it does, but then mpirun's own status is 0. So this
    # rank sends its status to the others, which exit with it.
    # A rank that does not answer learns of nothing: mpirun has to end it.
    if is_fault_tolerant() and not isinstance(error, CollectiveTimeout):
        status = status & 0xFF or 1
        if failure_detector.current is not None:
            failure_detector.current.send_failure(status)
        if _is_last(world, others_follow):
            os._exit(status)
        os.kill(os.getpid(), signal.SIGKILL)
    world.Abort(status)


def _is_last(world: MPI.Intracomm, others_follow: float) -> bool:
    """Return whether all other ranks have failed or died, so that this one exits with the status.

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
        if failure_detector.current is not None:
            dead |= failure_detector.current.failed()
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


def exit_all(status: int) -> NoReturn:
    """Exit with a status that all ranks exit with, without aborting the job.

    *Collective*: all ranks, with the same status. It is `raise SystemExit(status)`: MPI is
    finalized, and `mpirun` exits with the status, also if ranks died before in a job that outlives
    them. `sys.exit(status)` on one rank is a failure instead and aborts the job.

    Args:
        status: exit status, 0 to 255.

    Raises:
        SystemExit: with the status.
    """
    liveness.announce_status(status)
    raise SystemExit(status)
