"""Hooks at the exit of this process and in its forked children, in a fixed order.

Python runs `atexit` functions in the reverse order of their registration, which depends on the
order of imports. These packages register one function, which runs their handlers by stage::

    THREADS           background threads finish work that other ranks wait for, services leave
    TIMELINE          the timeline file is completed
    SURVIVORS         after a failure: wait for the surviving ranks
    FAILURE_DETECTOR  answer other ranks until all of them have finished their programs
    LIVENESS          arm the alarm that ends this process if MPI_Finalize hangs

Handlers that a program registers after importing the package run before all of these.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable
from enum import IntEnum

__all__ = ["ExitStage", "at_exit", "call_all", "in_child"]

_log = logging.getLogger(__name__)


class ExitStage(IntEnum):
    """When a handler runs at exit, compared with other handlers of these packages."""

    THREADS = 1
    TIMELINE = 2
    SURVIVORS = 3
    FAILURE_DETECTOR = 4
    LIVENESS = 5


_exit_handlers: list[tuple[ExitStage, Callable[[], object]]] = []
_child_handlers: list[Callable[[], object]] = []


def at_exit(stage: ExitStage, handler: Callable[[], object]) -> None:
    """Call `handler` at the exit of this process and of its forked children.

    Within a stage, the handler that was registered last runs first, as with `atexit`.
    """
    # In front, so that the stable sort below runs the last one of a stage first.
    _exit_handlers.insert(0, (stage, handler))


def in_child(handler: Callable[[], object]) -> None:
    """Call `handler` in each forked child before `os.fork` returns there; handlers must not block.

    Of the parent's threads only the one that forked exists in the child, and a lock that another
    thread held stays locked for ever: handlers replace locks and forget threads.
    """
    _child_handlers.append(handler)


def call_all(functions: Iterable[Callable[[], object]]) -> None:
    """Call all functions in order; log the errors, so that none prevents a later call."""
    for function in functions:
        try:
            function()
        except BaseException:  # also Ctrl-C, which must not skip the alarm of the last stage
            _log.exception("an exit handler has failed")


@atexit.register
def _run_exit_handlers() -> None:
    # Sorted at the exit, because imports may register in any order.
    in_order = sorted(_exit_handlers, key=lambda entry: entry[0])
    call_all(handler for _, handler in in_order)


def _run_child_handlers() -> None:
    # In the order of registration: a module registers after the modules that it imports.
    for handler in _child_handlers:
        handler()


os.register_at_fork(after_in_child=_run_child_handlers)
