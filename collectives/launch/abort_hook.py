"""Exception hook: aborts the job on an uncaught exception or a nonzero `sys.exit`.

Otherwise the other ranks would wait for this one forever, because the interpreter waits for them in
`MPI_Finalize`.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from collectives.core.errors import CollectiveTimeout, await_turn, page
from collectives.core.settings import Traceback
from collectives.core.tracebacks import shortened
from collectives.launch.open_mpi import is_fault_tolerant
from collectives.transport import failure_detector, liveness

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

__all__ = ["abort_on_exception", "exit_all"]

# Seconds that the lowest surviving rank waits for other ranks to fail as well, and then for the
# next one after each; ranks that do not fail learn of its end that much later.
_LEAST_WAIT, _OTHERS_END_WITHIN = 1.0, 5.0


def abort_on_exception(world: MPI.Intracomm, mode: Traceback = "short") -> None:
    """Make an uncaught exception end all ranks of the job.

    The rank prints its traceback, each line marked with `[rank/size]`, and the command that
    explains the error, and calls `MPI_Abort`; the exit status is 1. If all ranks raise the same
    error, one of them prints it. This applies to all threads. On the main thread `sys.exit` with a
    text, or a status other than 0, does the same with that text and status. Nothing changes in
    pytest and IPython, which show exceptions themselves, and in forked children. In a world of one
    only the command is added to tracebacks. "short" tracebacks hide frames of libraries
    (`collectives.core.tracebacks`).

    If a job survives the death of a rank (`is_fault_tolerant`), only this rank ends, by SIGKILL.
    The surviving ranks exit with its status once all of them have ended their programs; if all
    ranks fail, the last one exits with it. A `CollectiveTimeout` ends the whole job even there.
    """
    global _leave
    # They show exceptions themselves, and a test or cell that fails must not end the job.
    interactive = "pytest" in sys.modules or hasattr(builtins, "__IPYTHON__")
    if interactive:
        return
    if world.Get_size() == 1:
        _show_what_to_do(mode)
        return
    rank, size = world.Get_rank(), world.Get_size()
    # The hook also runs in forked children, which must not abort the parent's job.
    process = os.getpid()

    def end(text: str, status: int, error: BaseException | None = None) -> None:
        # After MPI_Finalize no rank waits any more.
        if os.getpid() != process or MPI.Is_finalized():
            return
        marked = "".join(f"[{rank}/{size}] {line}\n" for line in text.splitlines())
        # Ranks with the same error wait here; the first one ends the job before they print.
        others_follow = await_turn(error)
        # PyTorch captures what this hook writes in memory, where it would be lost.
        shown = isinstance(sys.stderr, io.StringIO) and sys.__stderr__ or sys.stderr
        # One write, so that the lines of several ranks do not mix.
        sys.stdout.flush()
        shown.write(marked)
        shown.flush()
        _end(world, status, error, others_follow)

    def abort(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        error = error or kind()
        with shortened(error, mode) as note:
            text = note + _format_traceback(kind, error, error.__traceback__ or trace)
        place = page(error)
        end(text if place is None else f"{text}what to do: {place}", 1, error)
        sys.__excepthook__(kind, error, trace)  # in a forked child, or after MPI

    def abort_thread(args: threading.ExceptHookArgs) -> None:
        # `SystemExit` ends a thread quietly, as without the hook.
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


def _show_what_to_do(mode: Traceback) -> None:
    """Append to every traceback the command that explains its error."""
    # A second `init` must not add the line twice.
    if getattr(sys.excepthook, "__module__", "") == __name__:
        return
    # Debuggers and frameworks may have installed hooks of their own.
    before, before_in_threads = sys.excepthook, threading.excepthook

    @contextlib.contextmanager
    def explained(error: BaseException, is_shown_by_python: bool) -> Iterator[None]:
        # A hook of another library may need all frames, for example to report them.
        with shortened(error, mode if is_shown_by_python else "full") as note:
            if note:
                print(note, end="", file=sys.stderr)
            yield
        place = page(error)
        if place is not None:
            print(f"what to do: {place}", file=sys.stderr, flush=True)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with explained(error, before is sys.__excepthook__):
            before(kind, error, error.__traceback__ or trace)

    def show_thread(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value or args.exc_type()
        with explained(error, before_in_threads is threading.__excepthook__):
            before_in_threads(args)

    sys.excepthook, threading.excepthook = show, show_thread


def _end(
    world: MPI.Intracomm, status: int, error: BaseException | None, others_follow: float
) -> None:
    """End this process so that the other ranks detect it."""
    # If a rank calls MPI_Abort or exits with a status, Open MPI 5.0.11 does not notify all other
    # ranks. If a signal ends it, Open MPI does, but then mpirun exits with 0. So this rank sends
    # its status to the other ranks, which exit with it. A rank that does not answer is not
    # notified: mpirun has to end it.
    if is_fault_tolerant() and not isinstance(error, CollectiveTimeout):
        # 0 would count as success, and only 8 bits of a status survive.
        status = status & 0xFF or 1
        if failure_detector.current is not None:
            # First, because the other ranks exit with this status after the death is known.
            failure_detector.current.send_failure(status)
        # The last rank ends normally: a signal would hide its status.
        if _is_last(world, others_follow):
            os._exit(status)
        # By a signal, which Open MPI reports to all ranks.
        os.kill(os.getpid(), signal.SIGKILL)
    world.Abort(status)


def _is_last(world: MPI.Intracomm, others_follow: float) -> bool:
    """Return whether all other ranks have failed or died, so that this one exits with the status.

    If other ranks also fail, the lowest one waits for them, `others_follow` seconds longer if all
    have the same error.
    """
    give_up = time.monotonic() + _LEAST_WAIT + others_follow
    before: set[int] = set()
    # Until it is clear whether another rank survives: then that one exits with the status.
    while True:
        MPI.COMM_SELF.Iprobe()  # MPI detects deaths only while it is called
        failed = world.Get_failed()
        dead = set(failed.Translate_ranks(None, world.Get_group()))
        if failure_detector.current is not None:
            dead |= failure_detector.current.failed()
        if dead != before:
            # A further death restarts the wait: ranks with the same error end one after the other.
            before, give_up = dead, time.monotonic() + _OTHERS_END_WITHIN
        living = sorted(set(range(world.Get_size())) - dead)
        if len(living) == 1:
            return True
        # Only the lowest living rank waits, so that one rank alone may be the last.
        if living[0] != world.Get_rank() or time.monotonic() > give_up:
            return False
        time.sleep(0.01)


def _exit(status: Any = None, /) -> NoReturn:
    """Raise SystemExit, as `sys.exit` does."""
    # In other threads SystemExit ends the thread only.
    main = threading.current_thread() is threading.main_thread()
    raise (_Exit if main else SystemExit)(status)


class _Exit(SystemExit):
    """Exception of `sys.exit` on the main thread; uncaught, it ends the job.

    Python has no hook for that. But it reads the `code` of an uncaught SystemExit, and then the
    attribute access has no calling Python frame.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        # Without a calling frame the interpreter itself reads `code`: the exception is uncaught.
        if name == "code" and sys._getframe().f_back is None and value not in (None, 0):
            if isinstance(value, int):
                _leave(f"sys.exit({value})", value)
            else:
                _leave(str(value), 1)
        return value


def _leave(text: str, status: int) -> None:
    """Show the text and end the job; replaced by `abort_on_exception`."""


def exit_all(status: int) -> NoReturn:
    """Exit on all ranks with the same status, without aborting the job.

    *Collective*: all ranks, with the same status. Same as `raise SystemExit(status)`: MPI is
    finalized, and `mpirun` exits with the status, even if ranks died before in a fault-tolerant
    job. In contrast, `sys.exit(status)` on one rank is a failure and aborts the job.

    Args:
        status: exit status, 0 to 255.

    Raises:
        SystemExit: with the status.
    """
    # Other ranks must not report this status as a failure.
    liveness.announce_status(status)
    raise SystemExit(status)
