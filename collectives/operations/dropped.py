"""Groups that the program has dropped without `close`: freed once all of their ranks have.

Garbage is collected on each rank at another time, and MPI frees a communicator on all ranks. So a
rank notes what it has dropped, and its next `split` or `group` tells the others a few of these
keys, in the exchange that it makes anyway. Each rank counts what it hears:

    rank 0   drops a    split: tells a              split               heard from both: frees a
    rank 1              split            drops a    split: tells a      heard from both: frees a

All members of a dropped group take part in such an exchange, so all of them hear the same. Files
and memory of this process alone are released at once (`collectives.transport.liveness`).
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from collectives.transport.transport import Transport

__all__ = ["NEWS", "Family", "Member"]

# Keys that a rank tells in one exchange: each makes one group, so more than one key per exchange
# works off what has piled up.
NEWS = 4


@dataclass
class Member:
    """A group of a family.

    Attributes:
        key: equal on its ranks; of groups that have a rank in common no two have one key.
        ranks: by their numbers in the first group.
        transport: of the group.
        missing: how many of its ranks have not told that they have dropped it.
        dropped: called as garbage is collected.
    """

    key: int
    ranks: Sequence[int]
    transport: Transport
    missing: int
    dropped: weakref.finalize[[int], object]


class Family:
    """The groups that were made of one group, and of these, and so on."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._dropped: deque[int] = deque()  # keys that this rank has not told yet
        self._lock = threading.Lock()

    def add(self, group: object, name: str, ranks: Sequence[int], transport: Transport) -> Member:
        """Add a group, on each of its ranks.

        Args:
            group: the object whose end counts.
            name: as for keys.
            ranks: its members, by their numbers in the first group.
            transport: what is closed once all have dropped the group.
        """
        digest = hashlib.blake2b(f"{name} of {ranks[0]}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "big") >> 1 or 1
        dropped = weakref.finalize(group, self._dropped.append, key)
        dropped.atexit = False
        member = self._members[key] = Member(key, ranks, transport, len(ranks), dropped)
        return member

    def forget(self, member: Member) -> None:
        """Leave a group out that was closed, or has failed."""
        if member.dropped.detach() is not None:
            self._members.pop(member.key, None)

    def news(self, ranks: Sequence[int]) -> list[int]:
        """Return what this rank tells in an exchange among these ranks: NEWS keys, 0 for none."""
        told: list[int] = []
        with self._lock:
            hearers = set(ranks) if self._dropped else set()
            for _ in range(len(self._dropped)):
                key = self._dropped.popleft()
                if len(told) < NEWS and hearers.issuperset(self._members[key].ranks):
                    told.append(key)
                else:
                    self._dropped.append(key)
        return told + [0] * (NEWS - len(told))

    def hear(self, keys: Iterable[int]) -> None:
        """Take note of what all ranks have told, and free what all of its ranks have dropped."""
        for key in filter(None, keys):
            with self._lock:
                member = self._members.get(key)
                if member is not None:
                    member.missing -= 1
                    if not member.missing:
                        del self._members[key]
            if member is not None and not member.missing:
                member.transport.close()
