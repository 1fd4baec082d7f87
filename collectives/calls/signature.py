"""Signature of a call as named fields, and the error text for ranks that differ.

If the hashes of descriptions differ (`collectives.calls.signature_check`, or the node engine), the
ranks collect the descriptions, so that every rank raises the same error.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from collectives.algorithms import halving_doubling
from collectives.core.errors import MismatchError, in_turn, some
from collectives.tracing import call_sites
from collectives.transport.transport import Deadline, Transport, describe_ranks

__all__ = ["NUMBER", "Description", "differences", "hash_of", "with_number", "raise_mismatch"]

Description = dict[str, object]

# Field of a description: number of the call in its communicator.
NUMBER = "call"

# Bytes of a description sent after a mismatch; a longer description is cut.
_TEXT_BYTES = 384

# Fields sent in addition. Of a call site only the end is kept: file name and line.
_SITE, _ENTRY = "site", "entry"
_SITE_CHARACTERS = 64

# How many refusals an error lists.
_WHYS = 8


def differences(
    calls: Sequence[Mapping[str, object]], name: Callable[[Sequence[int]], str] = describe_ranks
) -> str:
    """Describe the fields that differ, and their values by ranks.

    Example:
        >>> differences([{"op": "SUM", "dtype": "int32"}, {"op": "MAX", "dtype": "int32"}])
        'op is SUM on rank 0, MAX on rank 1'
    """
    texts = []
    # The fields of all ranks, because a call of another operation has others.
    for field in dict.fromkeys(name for call in calls for name in call):
        values = [str(call.get(field, "absent")) for call in calls]
        if len(set(values)) > 1:
            texts.append(f"{field} is {_by_ranks(values, name)}")
    return "; ".join(texts)


def _by_ranks(values: Sequence[str], name: Callable[[Sequence[int]], str]) -> str:
    """Describe the value of each rank: "SUM on rank 0, MAX on ranks 1 2"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) == 1:
        return f"{values[0]} on all ranks"
    return some([f"{value} on {name(ranks)}" for value, ranks in ranks_of.items()])


def raise_mismatch(transport: Transport, call: Description, deadline: Deadline) -> NoReturn:
    """Collect the descriptions of all ranks, and raise the same `MismatchError` on all.

    Each rank adds its call site to its description; call sites need not be equal.
    """
    site, entry = call_sites.current_origin()
    # First in the text, because a long description is cut at its end.
    place = {_SITE: str(site)[-_SITE_CHARACTERS:], _ENTRY: entry}
    # Fixed lengths, because the ranks know nothing of one another's calls.
    lines = np.zeros((transport.size, _TEXT_BYTES), np.uint8)
    own = _text(place | call).encode()[:_TEXT_BYTES]
    lines[transport.rank, : len(own)] = np.frombuffer(own, np.uint8)
    bounds = [_TEXT_BYTES * r for r in range(transport.size + 1)]
    halving_doubling.allgather(transport, lines.reshape(-1), bounds, deadline)
    calls = [_parse(line.tobytes().rstrip(b"\0").decode(errors="replace")) for line in lines]
    text, first = _mismatch(calls, transport.name)
    error = MismatchError(text)
    # For callers that react to one kind of mismatch.
    error.operations = frozenset(call.get("operation", "?") for call in calls)
    error.fields = frozenset(
        field for call in calls for field in call if len({c.get(field) for c in calls}) > 1
    )
    raise in_turn(error, (transport.rank - first) % transport.size)


def _mismatch(
    calls: Sequence[dict[str, str]], name: Callable[[Sequence[int]], str]
) -> tuple[str, int]:
    """Return the text of a mismatch, and the rank that raises it first."""
    places = [(call.pop(_SITE, "?"), call.pop(_ENTRY, "")) for call in calls]
    operations = [call.get("operation", "?") for call in calls]
    stands = _by_ranks(
        [
            f"{entry} ({operation}) at {site}" if entry else f"{operation} at {site}"
            for (site, entry), operation in zip(places, operations, strict=True)
        ],
        name,
    )
    # The public name of a caller in `strategies` means more to the user than the operation.
    callers = [entry or op for (_, entry), op in zip(places, operations, strict=True)]
    names = " / ".join(dict.fromkeys(callers))
    refused = {rank: call["refused"] for rank, call in enumerate(calls) if "refused" in call}
    if refused:
        whys = "; ".join(f"{name([rank])}: {why}" for rank, why in list(refused.items())[:_WHYS])
        what = f"refused on {name(list(refused))}, so no rank continues: {whys}"
        return f"{names}: {what}; {stands}", next(iter(refused))
    # Without a refusal rank 0 is the first to print its error (`core.errors`).
    what = "calls differ between ranks"
    if len(set(operations)) > 1:  # fields of different operations are not comparable
        return f"{names}: {what}: {stands}", 0
    return f"{names}: {what}: {differences(calls, name)}; {stands}", 0


def _text(call: Description) -> str:
    # A line that begins with a tab continues a value, such as a refusal of several lines.
    fields = (f"{name}\t{value}" for name, value in call.items())
    return "\n".join(field.replace("\n", "\n\t") for field in fields)


def _parse(text: str) -> dict[str, str]:
    pairs = (field.partition("\t") for field in re.split(r"\n(?!\t)", text) if field)
    return {name: value.replace("\n\t", "\n") for name, _, value in pairs}


def hash_of(call: Description) -> int:
    """Return a 64-bit hash of a description."""
    number = call.get(NUMBER)
    # Without a number in the engine, whose rounds are numbered.
    if not isinstance(number, int):
        return _digest(tuple(call.items()))
    return with_number(_digest(tuple(item for item in call.items() if item[0] != NUMBER)), number)


def with_number(rest: int, number: int) -> int:
    """Return the hash of a description from the hash of its other fields and its number."""
    # As a signed 64-bit integer; the odd factor spreads the numbers over all 64 bits.
    return (rest + number * 0x9E3779B97F4A7C15 + (1 << 63)) % (1 << 64) - (1 << 63)


# A training loop repeats the same few calls, which differ only in their numbers.
@functools.lru_cache(1024)
def _digest(items: tuple[tuple[str, object], ...]) -> int:
    # The cache returns one digest for equal values, so their texts must be equal.
    text = _text({name: _canonical(value) for name, value in items})
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def _canonical(value: object) -> object:
    """Return a value that has one text for all equal values, such as True, 1 and 1.0."""
    if isinstance(value, tuple):
        return tuple(map(_canonical, value))
    if isinstance(value, (int, np.integer, np.bool_)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return int(number) if number.is_integer() else number
    return value
