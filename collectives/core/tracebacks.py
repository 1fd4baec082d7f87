"""Short tracebacks: errors of these packages without the frames of libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType, TracebackType

from collectives.core.errors import counted, is_library_error
from collectives.core.settings import Traceback

__all__ = ["shortened"]

# Packages whose frames a reader of an error does not need: this project's, the libraries that call
# it on behalf of the program, and the modules that start programs and threads.
_HIDDEN = frozenset(
    ("collectives", "strategies", "unisono_torch", "jax", "mpi4py", "optax", "torch")
    + ("runpy", "threading")
)


@contextlib.contextmanager
def shortened(error: BaseException, mode: Traceback = "short") -> Iterator[str]:
    """Remove the frames of libraries from an error and its causes, until the context ends.

    Errors of other classes keep all frames, because they may be bugs of this library. An error
    without a frame of the program also keeps them. The frames return afterwards, for debuggers. The
    mode "full" removes none.

    Yields:
        A line that says how many frames are hidden; "" without any.
    """
    whole = [(one, one.__traceback__) for one in _chain(error)]
    hidden = 0
    for one, trace in whole:
        if mode == "short" and is_library_error(one):
            short = _without_libraries(trace)
            hidden += len(_entries(trace)) - len(_entries(short))
            one.__traceback__ = short
    try:
        text = f"{counted(hidden, 'frame')} of libraries hidden; UNISONO_TRACEBACK=full shows all\n"
        yield text if hidden else ""
    finally:
        for one, trace in whole:
            one.__traceback__ = trace


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and the errors that Python prints before it."""
    chain: list[BaseException] = []
    while error is not None and not any(error is one for one in chain):
        chain.append(error)
        cause, context = error.__cause__, error.__context__
        error = context if cause is None and not error.__suppress_context__ else cause
    return chain


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _without_libraries(trace: TracebackType | None) -> TracebackType | None:
    """Return a copy of a traceback with the program's frames; the original without any."""
    kept: TracebackType | None = None
    for entry in reversed(_entries(trace)):
        if _package(entry.tb_frame) not in _HIDDEN:
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept or trace


def _package(frame: FrameType) -> str:
    # A module that `python -m` runs is called __main__, and its spec has the name.
    spec = frame.f_globals.get("__spec__")
    name = getattr(spec, "name", None) or frame.f_globals.get("__name__") or ""
    return str(name).partition(".")[0]
