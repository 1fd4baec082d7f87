"""Replicated negotiation state: which named requests are ready on which ranks.

In a round every rank may tell *news*: that it has made a call, that one has waited for too long,
that it has no more data, that it leaves. All ranks hear the news of all of them, and so come to the
same end of every call: it is carried out, it fails on all of them, or it is waited for.
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
"""How many calls have numbers."""


class Ready(NamedTuple):
    """A call that this rank has made, with its description."""

    key: RequestKey
    description: RequestSignature


class Stalled(NamedTuple):
    """A call has waited for too long on this rank."""

    key: RequestKey


class Joined(NamedTuple):
    """This rank has no more data."""


class Leaving(NamedTuple):
    """This rank has called `shutdown`."""


News = Ready | Stalled | Joined | Leaving


class NegotiationState:
    """What the ranks of a controller know.

    Args:
        comm: the ranks.

    Attributes:
        table: calls that have numbers.
        told: calls that some ranks have made, and what each of these means by them.
        joined: the ranks without more data, in the order in which they have said so.
        leaving: the ranks that have called `shutdown`.
    """

    def __init__(self, comm: cc.Communicator) -> None:
        self._comm = comm
        self.table = ResponseCache(MOST)
        self.told: dict[RequestKey, dict[int, RequestSignature]] = {}
        self.joined: list[int] = []
        self.leaving: list[int] = []

    def apply(self, told: Sequence[Sequence[News]]) -> set[RequestKey]:
        """Take in the news of all ranks; returns the calls that have waited for too long."""
        late = set()
        for rank, news in enumerate(told):
            for item in news:
                if isinstance(item, Ready):
                    self.told.setdefault(item.key, {})[rank] = item.description
                elif isinstance(item, Stalled):
                    late.add(item.key)
                elif isinstance(item, Joined):
                    self.joined.append(rank)
                else:
                    self.leaving.append(rank)
        return late

    def runnable(self, what: RequestSignature) -> bool:
        """Whether a call can be carried out though ranks have joined."""
        return what.operation not in WITHOUT_JOINED and what.root not in self.joined

    def missing(self, key: RequestKey) -> list[int]:
        """Return the ranks that have not made a call, and have to."""
        told = self.told[key]
        return [r for r in range(self._comm.size) if r not in told and r not in self.joined]

    def error(self, key: RequestKey, *, late: bool) -> Exception | None:
        """Say why a call fails, on all ranks; None if it does not.

        Args:
            key: of a call that some ranks have told.
            late: it has waited for too long.
        """
        told, missing = self.told[key], self.missing(key)
        name = functools.partial(extend.describe_ranks, self._comm)
        first = told[min(told)]
        here = label(key, first)
        gone = [rank for rank in missing if rank in self.leaving]
        joined = [] if self.runnable(first) else [r for r in self.joined if r not in told]
        if not missing and (refused := rejections(told, name)) is not None:
            return cc.MismatchError(f"{here}: {refused}")
        if gone:
            return cc.CollectiveError(f"{here}: {name(*gone)} has called shutdown before")
        if joined:
            return cc.MismatchError(f"{here}: not possible after {name(*joined)} joined")
        if missing:
            limit = self._comm.settings.timeout
            silent = f"{here}: not called by {name(*missing)} within {limit:g} s"
            return cc.CollectiveTimeout(silent) if late else None
        differs = difference(told, name)
        return None if differs is None else cc.MismatchError(f"{here}: {differs}")
