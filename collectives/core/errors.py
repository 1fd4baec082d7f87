"""Exceptions of `collectives`, one class for each reaction of the caller.

Wrong use of one call (a negative root, an array of strings) is a plain `ValueError` or `TypeError`,
raised before any message. Everything here concerns several ranks.

Where ranks agree on an error, each of them raises it, and each would show the same traceback. They
take turns instead: the rank whose turn is first shows it at once and ends the job; the next one
waits a moment, and all others two. Whoever is still there after its wait shows it, too: those
before it have caught the error, or are slow. Nobody asks anybody, so nobody can wait for ever.

Only what is the same everywhere is held back: an error that was raised while another one of this
rank alone was handled is shown at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TypeVar

__all__ = [
    "CollectiveError",
    "CollectiveTimeout",
    "LaunchError",
    "MismatchError",
    "PeerFailure",
    "await_turn",
    "in_turn",
    "page",
    "some",
]

# Seconds between two turns: more than a launcher takes to end the processes of a job.
_TURN = 1.0

_LAST_TURN = 2

E = TypeVar("E", bound=BaseException)


class CollectiveError(RuntimeError):
    """An operation among several ranks could not be completed."""


class MismatchError(CollectiveError):
    """The ranks did not mean the same call; the communicator stays usable.

    Attributes:
        operations: the names of what the ranks called, as far as they are known; the same on all.
        fields: in which facts of these calls they differ, such as "dtype"; the same on all.
    """

    operations: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Some rank did not answer within the limit; the communicator is not usable any more."""


class PeerFailure(CollectiveError):
    """A rank is dead or has ended its program; the communicator is not usable any more."""


class LaunchError(CollectiveError):
    """The processes were started in a way that cannot become one world."""


def some(texts: Sequence[str], most: int = 8) -> str:
    """Join the first few of many texts, as errors and warnings do.

    Example:
        >>> some(["a", "b", "c"], 2)
        'a, b, and 1 more'
    """
    more = f", and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def page(error: BaseException) -> str | None:
    """Return the command that says what an error means and what to do; None if it is not ours.

    Ours are the kinds of this module and of `strategies.errors`, and a `ValueError` or `TypeError`
    that a line of these packages has raised.

    Example:
        >>> page(MismatchError("ranks disagree"))
        'python -m collectives errors MismatchError'
    """
    for kind in type(error).__mro__:
        wrong_use = (
            kind in (ValueError, TypeError) and kind is type(error) and _is_raised_here(error)
        )
        if wrong_use or kind.__module__ in ("collectives.core.errors", "strategies.errors"):
            return f"python -m collectives errors {kind.__name__}"
    return None


def _is_raised_here(error: BaseException) -> bool:
    """Tell whether the line that raised an error is one of these packages."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("collectives", "strategies")


def in_turn(error: E, turn: int) -> E:
    """Note that all ranks of a group raise this error; returns it.

    Args:
        error: about to be raised.
        turn: how many ranks of the group come before this one.
    """
    error._turn = turn  # type: ignore[attr-defined]
    return error


def await_turn(error: BaseException | None) -> float:
    """Wait until it is this rank's turn to show an error that nobody has caught.

    Returns:
        In how many seconds it is the last rank's turn; 0 if the error is this rank's own.
    """
    turn = _turn(error)
    if turn is None:
        return 0.0
    with contextlib.suppress(BaseException):  # of a signal handler: what it interrupts is shown
        time.sleep(_TURN * min(turn, _LAST_TURN))
    return _TURN * (_LAST_TURN - min(turn, _LAST_TURN))


def _turn(error: BaseException | None) -> int | None:
    """Return the turn of an error; None where it, or what led to it, is this rank's alone."""
    turn = getattr(error, "_turn", None)
    while error is not None:
        if not hasattr(error, "_turn"):
            return None
        hidden = error.__cause__ is None and error.__suppress_context__
        error = None if hidden else error.__cause__ or error.__context__
    return turn
