"""Signature of a named request, and error texts for ranks that differ.

A call is found on the other ranks by its *key*: its name, or the number of a call without one. What
it means is its *description*, which has to be the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["RequestSignature", "RequestKey", "difference", "label", "rejections"]

Name = Callable[..., str]  # of ranks, as errors call them


class RequestKey(NamedTuple):
    """By what a call is found on the other ranks.

    Attributes:
        name: as it was given, or None.
        number: of a call without a name: its number among these, whatever they do; else 0.
    """

    name: str | None
    number: int = 0


class RequestSignature(NamedTuple):
    """What has to be equal on all ranks.

    Attributes:
        operation: such as "allreduce".
        arrays: dtype and shape of each, as far as they must be equal.
        op: the reduction's name.
        root: as a rank of the process set.
        factors: before and after the reduction.
        refused: why this rank has raised an error instead.
    """

    operation: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    op: str = ""
    root: int = -1
    factors: tuple[float, float] = (1.0, 1.0)
    refused: str = ""


# What a field is called, and what is shown of it.
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
    """Name a call as errors do."""
    if key.name is not None:
        return f"{description.operation} {key.name!r}"
    return f"{description.operation} (call {key.number} without a name)"


def rejections(told: Mapping[int, RequestSignature], name: Name) -> str | None:
    """Say which rank has refused a call, and why; None if none has."""
    refused = [rank for rank in sorted(told) if told[rank].refused]
    if not refused:
        return None
    return f"{name(refused[0])} has raised an error: {told[refused[0]].refused}"


def difference(told: Mapping[int, RequestSignature], name: Name) -> str | None:
    """Say in what the ranks differ; None if in nothing."""
    ranks = sorted(told)
    first = told[ranks[0]]
    other = next((rank for rank in ranks if told[rank] != first), None)
    if other is None:
        return None
    for words, shown in _FIELDS.values():
        here, there = shown(first), shown(told[other])
        if here != there:
            here, there = _apart(here, there)
            return (
                f"ranks differ in their {words}: {here} on {name(ranks[0])}, "
                f"{there} on {name(other)}"
            )
    raise AssertionError(f"{first} and {told[other]} differ in a field that has no words")


def _apart(here: Any, there: Any) -> tuple[Any, Any]:
    """Of two lists return the first elements that differ; other values as they are."""
    if not isinstance(here, Sequence) or not isinstance(here, list):
        return here, there
    return next(pair for pair in zip(here, there, strict=True) if pair[0] != pair[1])
