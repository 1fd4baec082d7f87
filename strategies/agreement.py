"""Turn an error on one rank into an error on all, so that nobody waits for a rank that gave up."""

from __future__ import annotations

from typing import NoReturn

import collectives as cc
from strategies.errors import OpError

__all__ = ["raise_everywhere"]


def raise_everywhere(error: Exception | None, comm: cc.Communicator, what: str) -> NoReturn:
    """Raise this rank's own error, or a copy of the lowest failed rank's.

    *Collective*: all ranks call it once they know that at least one of them has failed.

    Args:
        error: this rank's own, None if it has none.
        comm: the ranks.
        what: the part of the program that failed, for the copies' messages.

    Raises:
        OpError, ValueError, TypeError, RuntimeError: the error itself where it happened; elsewhere
            one of the same class, or a `RuntimeError` for other classes, that names the rank.
    """
    reports = comm.allgather_object(None if error is None else _report(error))
    if error is not None:
        raise error
    rank, report = next((r, report) for r, report in enumerate(reports) if report is not None)
    kind, text = report
    raise kind(f"{text} ({what} of rank {rank} of {comm.size})")


def _report(error: Exception) -> tuple[type[Exception], str]:
    """Return a class that can be made from a message alone, and the message."""
    kind = type(error)
    if isinstance(error, OpError) or kind in (ValueError, TypeError, RuntimeError):
        return kind, str(error)
    return RuntimeError, f"{kind.__name__}: {error}"
