"""Agreement of ranks: turns an error on one rank into an error on all."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

import collectives as cc
from collectives import extend
from strategies.errors import OpError

__all__ = ["compare", "first_difference", "raise_everywhere"]

T = TypeVar("T")


def raise_everywhere(error: Exception | None, comm: cc.Communicator, what: str) -> NoReturn:
    """Raise this rank's own error, or a copy of the lowest failed rank's.

    A `MismatchError` of a rank counts for less than any other: it is how that rank, in the middle
    of an operation, heard of another's error.

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
    failed = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
    causes = [report for report in failed if report[1] is not cc.MismatchError] or failed
    rank, kind, text = causes[0]
    if error is not None and comm.rank in [rank for rank, _, _ in causes]:
        if _report(error) == (kind, text):  # else it says more than that of the lowest rank
            extend.collective_error(comm, error, rank)
        raise error
    copy = kind(f"{text} ({what} of {extend.describe_ranks(comm, rank)} of {comm.size})")
    raise extend.collective_error(comm, copy, rank) from error


def _report(error: Exception) -> tuple[type[Exception], str]:
    """Return a class that can be made from a message alone, and the message."""
    kind = type(error)
    if isinstance(error, OpError) or kind in (
        ValueError,
        TypeError,
        RuntimeError,
        cc.MismatchError,
    ):
        return kind, str(error)
    return RuntimeError, f"{kind.__name__}: {error}"


def first_difference(comm: cc.Communicator, what: str, told: Sequence[Sequence[Any]]) -> str | None:
    """Say in what a rank differs from rank 0, given the facts of all; None if in nothing."""
    first, *others = told
    for rank, facts in enumerate(others, start=1):
        for here, there in itertools.zip_longest(first, facts, fillvalue="nothing"):
            if here != there:
                return (
                    f"{what}: ranks differ, {here} on {extend.describe_ranks(comm, 0)}, {there} on "
                    f"{extend.describe_ranks(comm, rank)} of {comm.size}"
                )
    return None


Explain = Callable[[cc.Communicator, str, Sequence[Sequence[Any]]], str | None]


def compare(
    comm: cc.Communicator,
    what: str,
    prepare: Callable[[], tuple[T, Sequence[Any]]],
    explain: Explain = first_difference,
) -> T:
    """Compare what all ranks mean, before any of them goes on.

    *Collective*.

    Args:
        comm: the ranks.
        what: the operation, for errors.
        prepare: returns what this rank goes on with, and the facts that must be the same on all
            ranks: lines of text, or tuples of text. Its error is raised on all.
        explain: describes the difference, given the facts of all ranks; returns None to accept it.

    Returns:
        The first of what `prepare` has returned.

    Raises:
        MismatchError: the facts differ; on all ranks, names the first difference.
        Exception: as `raise_everywhere`.
    """
    prepared, facts, error = None, cast("Sequence[Any]", ()), None
    try:
        prepared, facts = prepare()
    except Exception as caught:
        error = caught
    digest = hashlib.blake2b("\n".join(map(str, facts)).encode(), digest_size=16).digest()
    row = np.frombuffer(bytes([error is not None]) + digest, np.uint8)
    rows = comm.allgather(row[np.newaxis])
    if rows[:, 0].any():
        raise_everywhere(error, comm, what)
    if not (rows == rows[0]).all():
        text = explain(comm, what, comm.allgather_object(list(facts)))
        if text is not None:
            raise extend.collective_error(comm, cc.MismatchError(text))
    return cast(T, prepared)
