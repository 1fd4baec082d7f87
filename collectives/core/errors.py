"""Exceptions of `collectives`, one class for each reaction of the caller.

Wrong use of a single call (a negative root, an array of strings) is a plain `ValueError` or
`TypeError`, raised before any message. The classes here concern several ranks.

If ranks agree on an error, each of them raises it, and each would print the same traceback. So they
take turns. The first rank prints it at once and ends the job. The next rank waits one turn, and all
other ranks two. A rank that still runs after its wait also prints the traceback, because the ranks
before it have caught the error or are slow. The turns need no messages, so no rank can hang.

Only an error that is equal on all ranks waits: an error raised while this rank handled another
error of its own is printed at once.
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
    "counted",
    "in_turn",
    "is_library_error",
    "page",
    "some",
]

# Seconds per turn: longer than a launcher takes to end the processes of a job.
_TURN = 1.0

_LAST_TURN = 2

# Modules whose classes are the errors of both packages.
_MODULES = ("collectives.core.errors", "strategies.errors")

E = TypeVar("E", bound=BaseException)


class CollectiveError(RuntimeError):
    """An operation among several ranks failed."""


class MismatchError(CollectiveError):
    """The ranks made different calls; the communicator stays usable.

    Attributes:
        operations: names of the calls, as far as known; the same on all ranks.
        fields: arguments in which the calls differ, such as "dtype"; the same on all ranks.
    """

    operations: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A rank did not answer within the limit; the communicator is no longer usable."""


class PeerFailure(CollectiveError):
    """A rank is dead or has ended its program; the communicator is no longer usable."""


class LaunchError(CollectiveError):
    """The processes were started in a way that does not form one world."""


def some(texts: Sequence[str], most: int = 8) -> str:
    """Join the first few of many texts, as errors and warnings do.

    Example:
        >>> some(["a", "b", "c"], 2)
        'a, b, and 1 more'
    """
    more = f", and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as errors and reports do.

    Example:
        >>> counted(1, "node"), counted(2, "node")
        ('1 node', '2 nodes')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def page(error: BaseException) -> str | None:
    """Return the command that explains an error; None if these packages did not raise it.

    They raise the classes of this module and of `strategies.errors`, and `ValueError` or
    `TypeError` from their own lines.

    Example:
        >>> page(MismatchError("ranks disagree"))
        'python -m collectives errors MismatchError'
    """
    # The classes of the error, nearest first, because programs may derive from these errors.
    for kind in type(error).__mro__:
        # Only the class itself: a subclass of ValueError in a program is not an error of ours.
        wrong_use = (
            kind in (ValueError, TypeError) and kind is type(error) and _is_raised_here(error)
        )
        if wrong_use or kind.__module__ in _MODULES:
            return f"python -m collectives errors {kind.__name__}"
    return None


def is_library_error(error: BaseException) -> bool:
    """Return whether an error is of a class of these packages, and not a bug of theirs.

    Example:
        >>> is_library_error(PeerFailure("rank 1 died")), is_library_error(ValueError("no root"))
        (True, False)
    """
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ in _MODULES]
    return bool(kinds) and "InternalError" not in kinds


def _is_raised_here(error: BaseException) -> bool:
    """Return whether a line of these packages raised an error."""
    trace = error.__traceback__
    # The innermost frame is the line that raised.
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("collectives", "strategies")


def in_turn(error: E, turn: int) -> E:
    """Mark an error as raised by all ranks of a group, and return it.

    Args:
        error: the error, about to be raised.
        turn: number of ranks of the group that print before this one.
    """
    error._turn = turn  # type: ignore[attr-defined]
    return error


def await_turn(error: BaseException | None) -> float:
    """Wait for this rank's turn to print an uncaught error.

    Returns:
        seconds until the last rank's turn; 0 if the error is this rank's own.
    """
    turn = _turn(error)
    if turn is None:
        return 0.0
    with contextlib.suppress(BaseException):  # a signal handler that raises must not hide the error
        time.sleep(_TURN * min(turn, _LAST_TURN))
    return _TURN * (_LAST_TURN - min(turn, _LAST_TURN))


def _turn(error: BaseException | None) -> int | None:
    """Return the turn of an error; None if the error or its cause is this rank's alone."""
    turn = getattr(error, "_turn", None)
    # A cause of this rank's own explains the error, so the traceback differs from that of other
    # ranks.
    while error is not None:
        if not hasattr(error, "_turn"):
            return None
        # `raise ... from None` hides the context.
        hidden = error.__cause__ is None and error.__suppress_context__
        error = None if hidden else error.__cause__ or error.__context__
    return turn
