"""What all ranks know alike of named calls, since they change it only by what all have heard.

In a round every rank may tell *news*: that it has made a call, that one has waited for too long,
that it has no more data, that it leaves. All ranks hear the news of all of them, and so come to the
same end of every call: it is carried out, it fails on all of them, or it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import collectives as cc
from strategies.horovod.execution import WITHOUT_JOINED
from strategies.horovod.table import Table
from strategies.horovod.words import Description, Key, difference, label, refusals

__all__ = ["MOST", "Joined", "Known", "Late", "Leaves", "News", "Told"]

MOST = 4095
"""How many calls have numbers."""


class Told(NamedTuple):
    """A call that this rank has made, with its description."""

    key: Key
    description: Description


class Late(NamedTuple):
    """A call has waited for too long on this rank."""

    key: Key


class Joined(NamedTuple):
    """This rank has no more data."""


class Leaves(NamedTuple):
    """This rank has called `shutdown`."""


News = Told | Late | Joined | Leaves


class Known:
    """What the ranks of an engine know.

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
        self.table = Table(MOST)
        self.told: dict[Key, dict[int, Description]] = {}
        self.joined: list[int] = []
        self.leaving: list[int] = []

    def hear(self, told: Sequence[Sequence[News]]) -> set[Key]:
        """Take in the news of all ranks; returns the calls that have waited for too long."""
        late = set()
        for rank, news in enumerate(told):
            for item in news:
                if isinstance(item, Told):
                    self.told.setdefault(item.key, {})[rank] = item.description
                elif isinstance(item, Late):
                    late.add(item.key)
                elif isinstance(item, Joined):
                    self.joined.append(rank)
                else:
                    self.leaving.append(rank)
        return late

    def possible(self, what: Description) -> bool:
        """Whether a call can be carried out though ranks have joined."""
        return what.operation not in WITHOUT_JOINED and what.root not in self.joined

    def missing(self, key: Key) -> list[int]:
        """Return the ranks that have not made a call, and have to."""
        told = self.told[key]
        return [r for r in range(self._comm.size) if r not in told and r not in self.joined]

    def error(self, key: Key, *, late: bool) -> Exception | None:
        """Say why a call fails, on all ranks; None if it does not.

        Args:
            key: of a call that some ranks have told.
            late: it has waited for too long.
        """
        told, missing = self.told[key], self.missing(key)
        name = self._comm.name
        first = told[min(told)]
        here = label(key, first)
        gone = [rank for rank in missing if rank in self.leaving]
        joined = [] if self.possible(first) else [r for r in self.joined if r not in told]
        if not missing and (refused := refusals(told, name)) is not None:
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
