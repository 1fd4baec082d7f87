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

    Other errors take precedence over a `MismatchError`, with which a rank inside an operation
    detects another rank's error.

    *Collective*: all ranks call it once they know that at least one of them has failed.

    Args:
        error: this rank's own error; None if it has none.
        comm: the ranks.
        what: the part of the program that failed, for the messages of copies.

    Raises:
        OpError, ValueError, TypeError, RuntimeError: the error itself on the rank that failed.
            Other ranks raise the same class, or `RuntimeError` for other classes, and name the
            rank.
    """
    reports = comm.allgather_object(None if error is None else _report(error))
    failed = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
    causes = [report for report in failed if report[1] is not cc.MismatchError] or failed
    rank, kind, text = causes[0]
    if error is not None and comm.rank in [rank for rank, _, _ in causes]:
        if _report(error) == (kind, text):  # else it has more details than the lowest rank's
            extend.collective_error(comm, error, rank)
        raise error
    copy = kind(f"{text} ({what} of {extend.describe_ranks(comm, rank)} of {comm.size})")
    raise extend.collective_error(comm, copy, rank) from error


def _report(error: Exception) -> tuple[type[Exception], str]:
    """Return a class that can be constructed from a message alone, and the message."""
    kind = type(error)
    # Subclasses of ValueError may need other arguments, so only the exact class is copied.
    if isinstance(error, OpError) or kind in (
        ValueError,
        TypeError,
        RuntimeError,
        cc.MismatchError,
    ):
        return kind, str(error)
    return RuntimeError, f"{kind.__name__}: {error}"


def first_difference(comm: cc.Communicator, what: str, told: Sequence[Sequence[Any]]) -> str | None:
    """Return the first difference of a rank from rank 0, given all ranks' facts, or None."""
    first, *others = told
    for rank, facts in enumerate(others, start=1):
        # `fillvalue` also finds the rank with more facts.
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
    """Compare facts of all ranks before any of them continues.

    *Collective*.

    Args:
        comm: the ranks.
        what: the operation, for errors.
        prepare: returns a result, and the facts that must be equal on all ranks: strings, or tuples
            of strings. Its error is raised on all ranks.
        explain: describes the difference, given the facts of all ranks; returns None to accept it.

    Returns:
        the result of `prepare`.

    Raises:
        MismatchError: the facts differ; on all ranks, names the first difference.
        Exception: as `raise_everywhere`.
    """
    # `facts` is empty after an error, so the digest is defined on every rank.
    prepared, facts, error = None, cast("Sequence[Any]", ()), None
    try:
        prepared, facts = prepare()
    except Exception as caught:
        error = caught
    # A fixed number of bytes per rank, however many facts: 16 bytes make a collision improbable.
    digest = hashlib.blake2b("\n".join(map(str, facts)).encode(), digest_size=16).digest()
    row = np.frombuffer(bytes([error is not None]) + digest, np.uint8)
    # Error flag and digest in one message.
    rows = comm.allgather(row[np.newaxis])
    if rows[:, 0].any():
        raise_everywhere(error, comm, what)
    if not (rows == rows[0]).all():
        # Only now, because all ranks see that digests differ and enter this exchange together.
        text = explain(comm, what, comm.allgather_object(list(facts)))
        if text is not None:
            raise extend.collective_error(comm, cc.MismatchError(text))
    return cast(T, prepared)
