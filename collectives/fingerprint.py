"""Do all ranks mean the same call? Compared before the first byte of data moves.

MPI sums float32 against int32, or SUM against MAX, without an error and wrongly, and waits for
ever where one rank broadcasts and another reduces. Here each rank describes its call as a few named
fields; 8-byte hashes of the descriptions are compared by one minimum over all ranks, and only when
they differ the descriptions themselves are collected, so that every rank raises the same error.

A rank whose own arguments are refused takes part with the refusal as its description. The others
then raise an error that says so, where they would otherwise wait for a rank that never comes.

Cost: about log2 P messages of 16 bytes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from collectives import reduction
from collectives.algorithms import halving
from collectives.errors import MismatchError
from collectives.transport import Deadline, Transport

__all__ = ["Description", "agree", "agree_on_rows", "differences", "digest", "raise_mismatch"]

Description = dict[str, object]

# Bytes of a description that are sent when ranks disagree; a longer one is cut.
_TEXT_BYTES = 256


def agree(transport: Transport, own: int, call: Description, deadline: Deadline) -> None:
    """Return when all ranks describe their call alike.

    Args:
        transport: the ranks.
        own: the digest of this rank's description.
        call: the description, for the error.
        deadline: the limit of every wait.

    Raises:
        MismatchError: they do not; the same error on all ranks, and no message is left under way.
    """
    if transport.size == 1:
        return
    smallest = np.array([own, ~own], np.int64)  # min(~h) is ~max(h)
    halving.allreduce(transport, smallest, reduction.MIN, deadline)
    if smallest[0] != ~smallest[1]:
        raise_mismatch(transport, call, deadline)


def agree_on_rows(
    transport: Transport, own: int, call: Description, rows: int, deadline: Deadline
) -> list[int]:
    """As `agree`, and tell how many rows every rank brings.

    Returns:
        The rows of all ranks, in rank order.
    """
    facts = np.zeros((transport.size, 2), np.int64)
    facts[transport.rank] = own, rows
    bounds = [2 * r for r in range(transport.size + 1)]
    halving.allgather(transport, facts.reshape(-1), bounds, deadline)
    if (facts[:, 0] != facts[0, 0]).any():
        raise_mismatch(transport, call, deadline)
    return [int(n) for n in facts[:, 1]]


def differences(calls: Sequence[Mapping[str, object]]) -> str:
    """Say which fields differ, and on which ranks.

    Example:
        >>> differences([{"op": "SUM", "dtype": "int32"}, {"op": "MAX", "dtype": "int32"}])
        'op is SUM on rank 0, MAX on rank 1'
    """
    fields = dict.fromkeys(name for call in calls for name in call)
    if len({call.get("operation") for call in calls}) > 1:
        fields = {"operation": None}  # the rest belongs to different operations
    texts = []
    for field in fields:
        ranks_of: dict[str, list[int]] = {}
        for rank, call in enumerate(calls):
            ranks_of.setdefault(str(call.get(field, "absent")), []).append(rank)
        if len(ranks_of) > 1:
            parts = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items()]
            texts.append(f"{field} is {', '.join(parts)}")
    return "; ".join(texts)


def raise_mismatch(transport: Transport, call: Description, deadline: Deadline) -> NoReturn:
    """Collect the descriptions of all ranks, which differ, and raise the same error on all."""
    lines = np.zeros((transport.size, _TEXT_BYTES), np.uint8)
    text = _text(call).encode()[:_TEXT_BYTES]
    lines[transport.rank, : len(text)] = np.frombuffer(text, np.uint8)
    bounds = [_TEXT_BYTES * r for r in range(transport.size + 1)]
    halving.allgather(transport, lines.reshape(-1), bounds, deadline)
    calls = [_parse(line.tobytes().rstrip(b"\0").decode(errors="replace")) for line in lines]
    names = " / ".join(dict.fromkeys(str(call.get("operation", "?")) for call in calls))
    refused = {rank: call["refused"] for rank, call in enumerate(calls) if "refused" in call}
    if refused:
        whys = "; ".join(f"rank {rank}: {why}" for rank, why in list(refused.items())[:8])
        raise MismatchError(f"{names}: refused on {_ranks(list(refused))}, so none goes on: {whys}")
    raise MismatchError(f"{names}: the ranks do not mean the same call: {differences(calls)}")


def _ranks(ranks: Sequence[int]) -> str:
    listed = " ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _text(call: Description) -> str:
    return "\n".join(f"{name}\t{value}" for name, value in call.items())


def _parse(text: str) -> dict[str, str]:
    pairs = (line.partition("\t") for line in text.split("\n") if line)
    return {name: value for name, _, value in pairs}


def digest(call: Description) -> int:
    """Return 64 bits that tell descriptions apart."""
    return _digest(tuple(call.items()))


@functools.lru_cache(1024)  # a program makes the same few calls again and again
def _digest(items: tuple[tuple[str, object], ...]) -> int:
    hashed = hashlib.blake2b(_text(dict(items)).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)
