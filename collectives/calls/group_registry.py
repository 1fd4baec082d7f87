"""Garbage collection of groups: a dropped group is freed once all its ranks have dropped it.

Garbage collection runs at different times on different ranks, but MPI frees a communicator on all
ranks together. Each rank keeps the keys of the groups that it has dropped. It announces a few keys
in the exchange of its next `split` or `group`. Each rank counts the announcements:

    rank 0   drops a    split: announces a          split               2 of 2 ranks: frees a
    rank 1              split            drops a    split: announces a  2 of 2 ranks: frees a

All members of a dropped group take part in such an exchange, so their counts agree. Files and
memory of this process are released at once (`collectives.transport.liveness`).
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from collectives.transport.transport import Transport

__all__ = ["KEYS_PER_EXCHANGE", "GroupRegistry", "Registration"]

# Keys that a rank announces in one exchange. Each exchange makes one group, so with more than one
# key per exchange the backlog shrinks.
KEYS_PER_EXCHANGE = 4


@dataclass
class Registration:
    """Entry of a registry: one group.

    Attributes:
        key: equal on the group's ranks; two groups that share a rank have different keys.
        world_ranks: the group's ranks by their numbers in the world.
        transport: closed once all ranks have dropped the group.
        unannounced: number of ranks that have not announced the group.
        finalizer: runs when the group is collected as garbage.
    """

    key: int
    world_ranks: Sequence[int]
    transport: Transport
    unannounced: int
    finalizer: weakref.finalize[[int], object]


class GroupRegistry:
    """Groups created from a communicator, directly or indirectly, that some rank still holds."""

    def __init__(self) -> None:
        self._registrations: dict[int, Registration] = {}
        self._dropped: deque[int] = deque()  # keys that this rank has not announced yet
        self._lock = threading.Lock()

    def add(
        self, group: object, name: str, world_ranks: Sequence[int], transport: Transport
    ) -> Registration:
        """Register a group, on each of its ranks.

        Args:
            group: the object whose garbage collection counts.
            name: equal on all ranks; unique among the registered groups that share a rank.
            world_ranks: the group's ranks by their numbers in the world.
            transport: closed once all ranks have dropped the group.
        """
        digest = hashlib.blake2b(f"{name} of {world_ranks[0]}".encode(), digest_size=8).digest()
        # 63 bits, because the exchange is of int64; not 0, which pads the exchange.
        key = int.from_bytes(digest, "big") >> 1 or 1
        # Only an append: a finalizer may run at any point, also while this thread holds the lock.
        finalizer = weakref.finalize(group, self._dropped.append, key)
        finalizer.atexit = False
        registration = Registration(key, world_ranks, transport, len(world_ranks), finalizer)
        self._registrations[key] = registration
        return registration

    def remove(self, registration: Registration) -> None:
        """Remove a group that was closed or has failed, unless this rank has dropped it."""
        # None: the finalizer has run, and the key is among the dropped ones.
        if registration.finalizer.detach() is not None:
            self._registrations.pop(registration.key, None)

    def keys_to_announce(self, world_ranks: Sequence[int]) -> list[int]:
        """Return the keys for an exchange among `world_ranks`, padded with zeros.

        A key is announced once, in an exchange that includes all ranks of its group.
        """
        keys: list[int] = []
        with self._lock:
            # Most exchanges have nothing to announce.
            present = set(world_ranks) if self._dropped else set()
            for _ in range(len(self._dropped)):
                key = self._dropped.popleft()
                # The registration exists until all ranks, including this one, have announced the
                # key.
                group_ranks = self._registrations[key].world_ranks
                if len(keys) < KEYS_PER_EXCHANGE and present.issuperset(group_ranks):
                    keys.append(key)
                else:
                    # Left for an exchange with all members: only they can count it.
                    self._dropped.append(key)
        return keys + [0] * (KEYS_PER_EXCHANGE - len(keys))

    def count(self, keys: Iterable[int]) -> None:
        """Count the announcements of all ranks, and free the groups that every rank has dropped."""
        # Zeros pad the exchange; keys of groups without this rank are unknown here.
        for key in filter(None, keys):
            with self._lock:
                registration = self._registrations.get(key)
                if registration is not None:
                    registration.unannounced -= 1
                    if not registration.unannounced:
                        del self._registrations[key]
            if registration is not None and not registration.unannounced:
                # Outside of the lock, because closing may collect other groups as garbage.
                registration.transport.close()
