"""Signature of a call as named fields, and the error text for ranks that differ.

Where the hashes of descriptions differ (`collectives.calls.signature_check`, or the node engine as
ranks meet), the descriptions themselves are collected, so that every rank raises the same error.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from collectives.algorithms import halving_doubling
from collectives.core.errors import MismatchError, in_turn, some
from collectives.tracing import call_sites
from collectives.transport.transport import Deadline, Transport, describe_ranks

__all__ = ["NUMBER", "Description", "differences", "hash_of", "with_number", "raise_mismatch"]

Description = dict[str, object]

# The field of a description that says which call of the communicator it is.
NUMBER = "call"

# Bytes of a description that are sent when ranks disagree; a longer one is cut.
_TEXT_BYTES = 384

# Fields that are sent with it, and what is kept of the first one, whose end says the most.
_SITE, _ENTRY = "site", "entry"
_SITE_CHARACTERS = 64

# How many refusals an error lists.
_WHYS = 8


def differences(
    calls: Sequence[Mapping[str, object]], name: Callable[[Sequence[int]], str] = describe_ranks
) -> str:
    """Say which fields differ, and on which ranks.

    Example:
        >>> differences([{"op": "SUM", "dtype": "int32"}, {"op": "MAX", "dtype": "int32"}])
        'op is SUM on rank 0, MAX on rank 1'
    """
    texts = []
    for field in dict.fromkeys(name for call in calls for name in call):
        values = [str(call.get(field, "absent")) for call in calls]
        if len(set(values)) > 1:
            texts.append(f"{field} is {_by_ranks(values, name)}")
    return "; ".join(texts)


def _by_ranks(values: Sequence[str], name: Callable[[Sequence[int]], str]) -> str:
    """Say which ranks have which value: "SUM on rank 0, MAX on ranks 1 2"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) == 1:
        return f"{values[0]} on all ranks"
    return some([f"{value} on {name(ranks)}" for value, ranks in ranks_of.items()])


def raise_mismatch(transport: Transport, call: Description, deadline: Deadline) -> NoReturn:
    """Collect the descriptions of all ranks, which differ, and raise the same error on all.

    With each description comes where its rank stands, which need not be equal.
    """
    site, entry = call_sites.current_origin()
    place = {_SITE: str(site)[-_SITE_CHARACTERS:], _ENTRY: entry}
    lines = np.zeros((transport.size, _TEXT_BYTES), np.uint8)
    own = _text(place | call).encode()[:_TEXT_BYTES]
    lines[transport.rank, : len(own)] = np.frombuffer(own, np.uint8)
    bounds = [_TEXT_BYTES * r for r in range(transport.size + 1)]
    halving_doubling.allgather(transport, lines.reshape(-1), bounds, deadline)
    calls = [_parse(line.tobytes().rstrip(b"\0").decode(errors="replace")) for line in lines]
    text, first = _mismatch(calls, transport.name)
    error = MismatchError(text)
    error.operations = frozenset(call.get("operation", "?") for call in calls)
    error.fields = frozenset(
        field for call in calls for field in call if len({c.get(field) for c in calls}) > 1
    )
    raise in_turn(error, (transport.rank - first) % transport.size)


def _mismatch(
    calls: Sequence[dict[str, str]], name: Callable[[Sequence[int]], str]
) -> tuple[str, int]:
    """Say in what calls differ, and where ranks stand; returns also who should say it first."""
    places = [(call.pop(_SITE, "?"), call.pop(_ENTRY, "")) for call in calls]
    operations = [call.get("operation", "?") for call in calls]
    stands = _by_ranks(
        [
            f"{entry} ({operation}) at {site}" if entry else f"{operation} at {site}"
            for (site, entry), operation in zip(places, operations, strict=True)
        ],
        name,
    )
    callers = [entry or op for (_, entry), op in zip(places, operations, strict=True)]
    names = " / ".join(dict.fromkeys(callers))
    refused = {rank: call["refused"] for rank, call in enumerate(calls) if "refused" in call}
    if refused:
        whys = "; ".join(f"{name([rank])}: {why}" for rank, why in list(refused.items())[:_WHYS])
        what = f"refused on {name(list(refused))}, so none goes on: {whys}"
        return f"{names}: {what}; {stands}", next(iter(refused))
    what = "the ranks do not mean the same call"
    if len(set(operations)) > 1:  # the rest belongs to different operations
        return f"{names}: {what}: {stands}", 0
    return f"{names}: {what}: {differences(calls, name)}; {stands}", 0


def _text(call: Description) -> str:
    return "\n".join(f"{name}\t{value}" for name, value in call.items())


def _parse(text: str) -> dict[str, str]:
    pairs = (line.partition("\t") for line in text.split("\n") if line)
    return {name: value for name, _, value in pairs}


def hash_of(call: Description) -> int:
    """Return 64 bits that tell descriptions apart."""
    number = call.get(NUMBER)
    if not isinstance(number, int):
        return _digest(tuple(call.items()))
    return with_number(_digest(tuple(item for item in call.items() if item[0] != NUMBER)), number)


def with_number(rest: int, number: int) -> int:
    """Return the digest of a description that is known but for its number."""
    # In two's complement; the odd factor spreads the numbers over all 64 bits.
    return (rest + number * 0x9E3779B97F4A7C15 + (1 << 63)) % (1 << 64) - (1 << 63)


# A program makes the same few calls again and again, but for their numbers.
@functools.lru_cache(1024)
def _digest(items: tuple[tuple[str, object], ...]) -> int:
    hashed = hashlib.blake2b(_text(dict(items)).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)
