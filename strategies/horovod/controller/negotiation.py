"""Replicated negotiation state: which named requests are ready on which ranks.

In a round every rank may send *news*: that it has made a call, that a call has timed out, that it
has no more data, that it leaves. All ranks process the news of all ranks, so they reach the same
decision on every call: execute it, fail it on all ranks, or wait.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import collectives as cc
from collectives import extend
from strategies.horovod.controller.execution import WITHOUT_JOINED
from strategies.horovod.controller.request_signature import (
    RequestKey,
    RequestSignature,
    difference,
    label,
    rejections,
)
from strategies.horovod.controller.response_cache import ResponseCache

__all__ = ["MOST", "Joined", "NegotiationState", "Stalled", "Leaving", "News", "Ready"]

MOST = 4095
"""Maximum number of cached calls."""


class Ready(NamedTuple):
    """News: this rank has made a call."""

    key: RequestKey
    description: RequestSignature


class Stalled(NamedTuple):
    """News: a call has timed out on this rank."""

    key: RequestKey


class Joined(NamedTuple):
    """News: this rank has no more data."""


class Leaving(NamedTuple):
    """News: this rank has called `shutdown`."""


News = Ready | Stalled | Joined | Leaving


class NegotiationState:
    """The state that all ranks of a controller share.

    Args:
        comm: the ranks.

    Attributes:
        table: calls that have numbers.
        told: call -> rank that has made it -> its description.
        joined: ranks without more data, in the order of their news.
        leaving: ranks that have called `shutdown`.
    """

    def __init__(self, comm: cc.Communicator) -> None:
        self._comm = comm
        # The widest round has a byte for each of `MOST` calls.
        self.table = ResponseCache(MOST)
        self.told: dict[RequestKey, dict[int, RequestSignature]] = {}
        self.joined: list[int] = []
        self.leaving: list[int] = []

    def apply(self, told: Sequence[Sequence[News]]) -> set[RequestKey]:
        """Process the news of all ranks; return the calls that have timed out."""
        late = set()
        for rank, news in enumerate(told):
            for item in news:
                if isinstance(item, Ready):
                    # By key and rank, so that a repeated announcement changes nothing.
                    self.told.setdefault(item.key, {})[rank] = item.description
                elif isinstance(item, Stalled):
                    late.add(item.key)
                elif isinstance(item, Joined):
                    self.joined.append(rank)
                else:
                    self.leaving.append(rank)
        return late

    def runnable(self, what: RequestSignature) -> bool:
        """Return whether a call can run although ranks have joined."""
        # Rows of a joined rank would be missing, and a joined root has nothing to send.
        return what.operation not in WITHOUT_JOINED and what.root not in self.joined

    def missing(self, key: RequestKey) -> list[int]:
        """Return the ranks that still have to make a call."""
        told = self.told[key]
        # A joined rank is never waited for.
        return [r for r in range(self._comm.size) if r not in told and r not in self.joined]

    def error(self, key: RequestKey, *, late: bool) -> Exception | None:
        """Return the error of a call for all ranks; None without an error.

        Args:
            key: key of a call that some ranks have announced.
            late: whether it has timed out.
        """
        told, missing = self.told[key], self.missing(key)
        name = functools.partial(extend.describe_ranks, self._comm)
        first = told[min(told)]
        here = label(key, first)
        gone = [rank for rank in missing if rank in self.leaving]
        # Only ranks that have joined without announcing this call.
        joined = [] if self.runnable(first) else [r for r in self.joined if r not in told]
        # An error of one rank first: it explains why the others differ.
        if not missing and (refused := rejections(told, name)) is not None:
            return cc.MismatchError(f"{here}: {refused}")
        # A rank that leaves will never make the call.
        if gone:
            return cc.CollectiveError(f"{here}: {name(*gone)} has called shutdown before")
        if joined:
            return cc.MismatchError(f"{here}: not possible after {name(*joined)} joined")
        if missing:
            limit = self._comm.settings.timeout
            silent = f"{here}: not called by {name(*missing)} within {limit:g} s"
            return cc.CollectiveTimeout(silent) if late else None
        # Compared at last, when all descriptions are there.
        differs = difference(told, name)
        return None if differs is None else cc.MismatchError(f"{here}: {differs}")
