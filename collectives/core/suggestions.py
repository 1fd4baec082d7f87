"""Errors for names of mpi4py, torch.distributed and Horovod that have another name here."""

from __future__ import annotations

__all__ = ["unknown"]

# Keys are normalized. A name that differs only in underscores and case needs no entry.
_NAMES = {
    "getrank": "rank",
    "getsize": "size",
    "getworldsize": "size",
    "worldsize": "size",
    "bcast": "broadcast, or broadcast_object for Python objects",
    "reducescattertensor": "reduce_scatter",
    "allgatherintotensor": "allgather",
    "dup": "split(0)",
    "newgroup": "group, or split",
    "free": "close",
    "avg": "MEAN",
    "average": "MEAN",
    "prod": "PRODUCT",
    "land": "LOGICAL_AND",
    "lor": "LOGICAL_OR",
    "lxor": "LOGICAL_XOR",
    "band": "BITWISE_AND",
    "bor": "BITWISE_OR",
    "bxor": "BITWISE_XOR",
}


def unknown(owner: str, name: str, obj: object) -> AttributeError:
    """Return the error for a missing attribute, which names the one that may be meant.

    Args:
        owner: what has no such attribute, for the text: "module 'collectives'".
        name: the attribute.
        obj: the object.

    Example:
        >>> import math
        >>> unknown("module 'math'", "Log_2", math)
        AttributeError("module 'math' has no attribute 'Log_2'; use log2")
    """
    use = ""
    if not name.startswith("_"):
        wanted = _normalize(name)
        here = _NAMES.get(wanted) or next((n for n in dir(obj) if _normalize(n) == wanted), None)
        use = f"; use {here}" if here else ""
    return AttributeError(f"{owner} has no attribute {name!r}{use}", name=name, obj=obj)


def _normalize(name: str) -> str:
    return name.replace("_", "").lower()
