"""Signature of a named request, and error texts for ranks that differ.

The *key* of a call identifies it on all ranks: its name, or the number of a call without one. Its
*description* must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["RequestSignature", "RequestKey", "difference", "label", "rejections"]

Name = Callable[..., str]  # (ranks) -> their description in errors


class RequestKey(NamedTuple):
    """Identifies a call on all ranks.

    Attributes:
        name: name of the call, or None.
        number: number among all calls without a name; 0 for calls with one.
    """

    name: str | None
    number: int = 0


class RequestSignature(NamedTuple):
    """The properties of a call that must be equal on all ranks.

    Attributes:
        operation: name such as "allreduce".
        arrays: dtype and shape of each array; only the dimensions that must be equal.
        op: name of the reduction.
        root: root as a rank of the process set.
        factors: factors before and after the reduction.
        refused: error that this rank raised instead.
    """

    operation: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    op: str = ""
    root: int = -1
    factors: tuple[float, float] = (1.0, 1.0)
    refused: str = ""


# Name of a property in errors, and its value.
_FIELDS: Mapping[str, tuple[str, Callable[[RequestSignature], Any]]] = {
    "operation": ("operation", lambda d: d.operation),
    "count": ("number of arrays", lambda d: len(d.arrays)),
    "dtypes": ("dtype", lambda d: [dtype for dtype, _ in d.arrays]),
    "shapes": ("shape", lambda d: [shape for _, shape in d.arrays]),
    "op": ("op", lambda d: d.op),
    "root": ("root_rank", lambda d: d.root),
    "factors": ("prescale_factor and postscale_factor", lambda d: d.factors),
}


def label(key: RequestKey, description: RequestSignature) -> str:
    """Return the name of a call in errors."""
    if key.name is not None:
        return f"{description.operation} {key.name!r}"
    return f"{description.operation} (call {key.number} without a name)"


def rejections(told: Mapping[int, RequestSignature], name: Name) -> str | None:
    """Return the first rank that has raised an error, with its message; None without one."""
    # The lowest rank's error, so that all ranks raise the same text.
    refused = [rank for rank in sorted(told) if told[rank].refused]
    if not refused:
        return None
    return f"{name(refused[0])} has raised an error: {told[refused[0]].refused}"


def difference(told: Mapping[int, RequestSignature], name: Name) -> str | None:
    """Describe the first difference between ranks; None if they are equal."""
    ranks = sorted(told)
    # Every rank compares with the lowest one, so all find the same difference.
    first = told[ranks[0]]
    other = next((rank for rank in ranks if told[rank] != first), None)
    if other is None:
        return None
    for words, shown in _FIELDS.values():
        here, there = shown(first), shown(told[other])
        if here != there:
            if isinstance(here, list):
                # The first elements that differ.
                here, there = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
            return (
                f"ranks differ in their {words}: {here} on {name(ranks[0])}, "
                f"{there} on {name(other)}"
            )
    # A new field needs a name in `_FIELDS`.
    raise AssertionError(f"{first} and {told[other]} differ in a field that has no words")
