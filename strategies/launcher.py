"""`launch`: run a function on new ranks of this machine, from a script or notebook.

    this process          writes the function and its arguments into a temporary folder
    mpirun -np P python   each rank reads them, calls the function, and writes its result or error
    this process          forwards output meanwhile, and reads the results

Functions travel by value (cloudpickle): they may come from a cell or the `__main__` of a script.
"""

from __future__ import annotations

import codecs
import contextlib
import faulthandler
import io
import json
import linecache
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import IO, Any, NamedTuple, TypeVar

from collectives import extend
from strategies import errors
from strategies.core import mpirun, validation

__all__ = ["launch", "run_rank"]

T = TypeVar("T")

# Seconds between SIGTERM and SIGKILL: mpirun needs about one to end its ranks.
_GRACE = 10.0

# Seconds between two looks at the files of the ranks.
_INTERVAL = 0.1

# Seconds in which output still arrives after the end of the job.
_LAST_OUTPUT = 0.5

# Ends with this process even if SIGKILL ends it, as the restart of a notebook's kernel does.
_DIES_WITH_PARENT = (
    "import ctypes, os, sys\n"
    f"ctypes.CDLL(None).prctl(1, {signal.SIGTERM.value})  # PR_SET_PDEATHSIG\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)

# Modules are found as in this process. The list travels as text, because it is needed first.
_RANK = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[2])\n"
    "from strategies.launcher import run_rank\n"
    "run_rank(sys.argv[1])"
)


class _Failure(NamedTuple):
    """Error of a rank.

    Attributes:
        at: time in ns since the epoch.
        rank: its rank.
        summary: class and text of the exception.
        trace: its traceback, as Python prints it.
        pickled: the exception; b"" if it cannot be pickled.
    """

    at: int
    rank: int
    summary: str
    trace: str
    pickled: bytes


def launch(
    function: Callable[..., T],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Call a function on new MPI ranks of this machine, and return the results in rank order.

    As if each rank were a program that `mpirun -np RANKS` starts, with the modules, the environment
    and the working directory of this process. The ranks' output appears here while they run. They
    end when this call ends: after an error, at Ctrl-C, and if this process is killed.

    Args:
        function: called as `function(*args, **kwargs)` on each rank. It may be defined anywhere,
            also in a notebook, and calls `collectives.init()` itself.
        ranks: number of ranks.
        args: positional arguments, equal on all ranks.
        kwargs: keyword arguments, equal on all ranks.
        timeout: seconds for all of it; None for no limit.

    Returns:
        copies of the ranks' results, by pickle.

    Raises:
        RankError: a rank raised an exception, or ended without a result. The text has the rank's
            traceback. The cause is the exception itself, if pickle can copy it.
        DeadlineExceededError: the ranks have not returned within `timeout`; names their lines.
        FailedPreconditionError: this process is one of several ranks.
        NotFoundError: mpirun or the package cloudpickle is missing.
        ValueError: fewer than one rank.

    Cost: a second to start; args and results once through files in the directory of `tempfile`.
    """
    validation.integer("launch", "number of ranks", ranks)
    if extend.launcher_world_size() > 1:
        raise errors.FailedPreconditionError(
            "launch: this process is a rank already, expected a program without a launcher, got "
            f"one of {extend.launcher_world_size()} (rank {extend.launcher_rank()})"
        )
    path = mpirun.find_mpirun("launch")
    deadline = float("inf") if timeout is None else time.time() + timeout
    with tempfile.TemporaryDirectory(prefix="unisono-launch-") as name:
        folder = Path(name)
        call = (_sources_of_cells(), deadline, function, tuple(args), dict(kwargs or {}))
        with (folder / "call").open("wb") as file:
            _pickler(file).dump(call)
        command = [sys.executable, "-c", _DIES_WITH_PARENT, path, "-np", str(ranks)]
        process = subprocess.Popen(
            [*command, sys.executable, "-u", "-c", _RANK, name, json.dumps(sys.path)],
            env=mpirun.job_environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # Ctrl-C must not reach mpirun: a second signal would make it leave its ranks behind.
            start_new_session=True,
        )  # fmt: skip
        try:
            _forward_output(process, folder, deadline)
        finally:
            _end(process)
        _raise_failure(folder, ranks, process.returncode, time.time() > deadline)
        return [_read(folder / f"{rank}.result") for rank in range(ranks)]


def run_rank(name: str) -> None:
    """Call the function of `launch` as one of its ranks; mpirun starts this.

    Args:
        name: path of the folder of the call.
    """
    folder, rank = Path(name), extend.launcher_rank()
    sys.argv = [""]
    try:
        sources, deadline, function, args, kwargs = _read(folder / "call")
        for cell, lines in sources.items():
            linecache.cache[cell] = (sum(map(len, lines)), None, lines, cell)
        if deadline != float("inf"):
            stack = (folder / f"{rank}.stack").open("w")
            faulthandler.dump_traceback_later(max(deadline - time.time(), 0.001), file=stack)
        result = function(*args, **kwargs)
        _write(folder / f"{rank}.result", result)
        faulthandler.cancel_dump_traceback_later()
    except BaseException as error:
        _write(folder / f"{rank}.failure", _failure_of(rank, error))
        sys.stdout.flush()
        # `launch` ends the job, silently; if this rank exited, mpirun would report it.
        time.sleep(_GRACE)
        os._exit(1)


def _failure_of(rank: int, error: BaseException) -> _Failure:
    at = time.time_ns()
    pickled = io.BytesIO()
    try:
        _pickler(pickled).dump(error)
    except Exception:
        pickled = io.BytesIO()
    # Without the frame of `run_rank`.
    trace = error.__traceback__
    shown = traceback.format_exception(error.with_traceback(trace and (trace.tb_next or trace)))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    return _Failure(at, rank, summary, "".join(shown), pickled.getvalue())


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


def _write(path: Path, value: Any) -> None:
    """Write a file that is complete once it has its name."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        _pickler(file).dump(value)
    unfinished.replace(path)


def _raise_failure(folder: Path, ranks: int, status: int, is_late: bool) -> None:
    """Raise the error of the job, if it failed."""
    first = min((_read(path) for path in folder.glob("*.failure")), default=None)
    if first is not None:
        raise errors.RankError(
            f"launch: rank {first.rank} of {ranks} raised {first.summary}\n\n{first.trace}"
        ) from _unpickled(first.pickled)
    missing = [rank for rank in range(ranks) if not (folder / f"{rank}.result").exists()]
    if missing and is_late:
        raise errors.DeadlineExceededError(
            f"launch: {_ranks(missing)} of {ranks} not done within the timeout"
            + "".join(f"\n\nrank {rank}: {_stack(folder, rank)}" for rank in missing)
        )
    if missing:
        raise errors.RankError(
            f"launch: {_ranks(missing)} of {ranks} ended without a result, expected a return of "
            f"the function, got exit status {status} of mpirun; its output names the cause"
        )
    if status != 0:
        raise errors.RankError(
            f"launch: all {ranks} ranks returned, but mpirun ended with status {status}; its "
            "output names the cause"
        )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {' '.join(map(str, numbers))}"


def _stack(folder: Path, rank: int) -> str:
    """Return the frames of a rank's main thread at the deadline, the innermost first."""
    path = folder / f"{rank}.stack"
    text = path.read_text() if path.exists() else ""
    # `faulthandler` writes the main thread last.
    frames = [s for s in text.rpartition("\nThread ")[2].splitlines() if s.startswith("  File ")]
    # Without `run_rank` and its caller.
    return "\n".join(["", *frames[:-2]]) if frames else "not started"


def _unpickled(pickled: bytes) -> BaseException | None:
    """Return an exception; None if it cannot be unpickled."""
    try:
        error: BaseException = pickle.loads(pickled)
    except Exception:
        return None
    return error


def _pickler(file: IO[bytes]) -> pickle.Pickler:
    """Return a pickler that copies functions, with the names of their files for tracebacks."""
    try:
        import cloudpickle
    except ImportError as error:
        raise errors.NotFoundError(
            "launch: the package cloudpickle, which copies functions, is missing; "
            "pip install cloudpickle"
        ) from error
    reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduce(code: CodeType) -> tuple[Any, ...]:
        return _code, (*reduce_code(code), code.co_filename)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        # cloudpickle 3.1.3 drops the name of the file.
        dispatch_table = ChainMap({CodeType: reduce}, cloudpickle.Pickler.dispatch_table)

    made: pickle.Pickler = Pickler(file)
    return made


def _code(make: Callable[..., CodeType], args: tuple[Any, ...], filename: str) -> CodeType:
    return make(*args).replace(co_filename=filename)


def _sources_of_cells() -> dict[str, list[str]]:
    """Return the lines of code without a file, by name: cells of a notebook or prompt."""
    return {
        name: entry[2]
        for name, entry in linecache.cache.items()
        # An entry of one element is a source that is not loaded yet.
        if len(entry) > 1 and not os.path.exists(name)
    }


def _forward_output(process: subprocess.Popen[bytes], folder: Path, deadline: float) -> None:
    """Copy the output of the ranks to this program's streams until the job is over.

    Over means: mpirun has ended, a rank has failed, or the deadline has passed.
    """
    decoder = codecs.getincrementaldecoder("utf-8")
    last = float("inf")  # when to stop reading
    with selectors.DefaultSelector() as selector:
        # Streams of Python, not descriptors: a notebook shows the former below the cell.
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ, (stream, decoder("replace")))
        while selector.get_map() and time.time() < last:
            for key, _ in selector.select(_INTERVAL):
                stream, decode = key.data
                chunk = os.read(key.fd, 1 << 16)
                stream.write(decode.decode(chunk, final=not chunk))
                stream.flush()
                if not chunk:
                    selector.unregister(key.fileobj)
            # Output of before the end is on its way, and a child of a rank may keep the pipes open.
            over = process.poll() is not None or any(folder.glob("*.failure"))
            if last == float("inf") and (over or time.time() > deadline):
                last = time.time() + _LAST_OUTPUT
        if not selector.get_map():  # mpirun is ending: a signal now would change its status
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun and its ranks, and wait for them."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also at a second Ctrl-C
        for pid in _session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # The name before ")" may contain blanks.
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(stat.parent.name))
    return found
