"""Response cache: known requests by number, so that readiness is one byte.

All ranks have the same table, because they change it only by news that all of them received::

    number   slot           description
    0        "loss"         allreduce float32 () MEAN
    1        "fc.weight"    allreduce float32 (10, 64) MEAN
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from strategies.horovod.controller.request_signature import RequestKey, RequestSignature

__all__ = ["CacheEntry", "ResponseCache", "cache_key"]

CacheEntry = tuple[RequestKey, RequestSignature]

# Calls without a name are cached by their number modulo this. The first calls of a description up
# to this number need the longer way. Calls in a different order on some rank still do not match.
_TURNS = 16


def cache_key(key: RequestKey) -> RequestKey:
    """Return the repeating part of a key: a name, or a number modulo `_TURNS`."""
    return key if key.name is not None else key._replace(number=key.number % _TURNS)


class ResponseCache:
    """Numbers of calls, in the order in which the ranks agreed on them.

    Args:
        most: capacity; then the least recently executed call loses its number.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: OrderedDict[CacheEntry, int] = OrderedDict()  # most recently used last
        self._entries: list[CacheEntry] = []  # by number

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> CacheEntry:
        return self._entries[number]

    def find(self, entry: CacheEntry) -> int | None:
        """Return the number of a call; None without one."""
        return self._numbers.get(entry)

    def used(self, numbers: Sequence[int]) -> None:
        """Mark calls as executed."""
        for number in numbers:
            # In the order of the round, the same on all ranks.
            self._numbers.move_to_end(self._entries[number])

    def add(self, entry: CacheEntry) -> int:
        """Give a call a number: a new one, or that of the least recently used call."""
        number = self._numbers.get(entry)
        if number is not None:
            self._numbers.move_to_end(entry)
            return number
        # The table only grows until it is full, so numbers stay valid.
        if len(self._entries) < self._most:
            number = len(self._entries)
            self._entries.append(entry)
        else:
            _, number = self._numbers.popitem(last=False)
            # The evicted call keeps no number; its next call is announced again.
            self._entries[number] = entry
        self._numbers[entry] = number
        return number
