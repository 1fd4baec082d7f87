"""Response cache: known requests by number, so that readiness is one byte.

All ranks hold the same table, since they change it only by what all of them were told::

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

# A call without a name is known by its number modulo this: it costs the first so many calls of one
# description the longer way, and calls in another order on some rank still do not meet.
_TURNS = 16


def cache_key(key: RequestKey) -> RequestKey:
    """Return the part of a key that comes again: a name, or a number modulo a few."""
    return key if key.name is not None else key._replace(number=key.number % _TURNS)


class ResponseCache:
    """Numbers for calls, given in the order in which ranks agreed on them.

    Args:
        most: how many calls are remembered; then those that were carried out longest ago give up
            their numbers.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: OrderedDict[CacheEntry, int] = OrderedDict()  # the one used last at the end
        self._entries: list[CacheEntry] = []  # by number

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> CacheEntry:
        return self._entries[number]

    def find(self, entry: CacheEntry) -> int | None:
        """Return the number of a call, None if it has none."""
        return self._numbers.get(entry)

    def used(self, numbers: Sequence[int]) -> None:
        """Note that these were carried out."""
        for number in numbers:
            self._numbers.move_to_end(self._entries[number])

    def add(self, entry: CacheEntry) -> int:
        """Give a call a number: a new one, or that of the call used longest ago."""
        number = self._numbers.get(entry)
        if number is not None:
            self._numbers.move_to_end(entry)
            return number
        if len(self._entries) < self._most:
            number = len(self._entries)
            self._entries.append(entry)
        else:
            _, number = self._numbers.popitem(last=False)
            self._entries[number] = entry
        self._numbers[entry] = number
        return number
