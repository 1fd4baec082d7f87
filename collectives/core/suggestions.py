"""Errors that translate names of mpi4py, torch.distributed and Horovod."""

from __future__ import annotations

__all__ = ["FOREIGN_NAMES", "ForeignName", "unknown"]

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


# Methods of communicators of mpi4py, and functions of torch.distributed.
FOREIGN_NAMES = frozenset([
    "Get_rank", "Get_size", "Dup", "Split", "Free", "Create_group", "Barrier", "Bcast", "Reduce",
    "Allreduce", "Gather", "Gatherv", "Allgather", "Allgatherv", "Scatter", "Scatterv", "Alltoall",
    "Alltoallv", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan", "Send", "Recv",
    "Isend", "Irecv", "Sendrecv", "Probe", "Ibarrier", "Ibcast", "Ireduce", "Iallreduce", "Igather",
    "Iallgather", "Iscatter", "Ialltoall", "bcast", "dup", "free", "get_rank", "get_size",
    "get_world_size", "world_size", "new_group", "all_reduce", "all_gather", "all_gather_object",
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "broadcast_object_list",
])  # fmt: skip


class ForeignName:
    """A missing attribute of a class, whose error suggests the name used here.

    `__getattr__` would cover all names, but slows down every attribute look-up: an all-reduce of 8
    bytes took 17 % longer.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, obj: object, kind: type) -> None:
        raise unknown(f"{kind.__name__!r} object", self.name, kind if obj is None else obj)


def unknown(owner: str, name: str, obj: object) -> AttributeError:
    """Return the error for a missing attribute, with a suggestion.

    Args:
        owner: description of the object, for the text: "module 'collectives'".
        name: the attribute.
        obj: the object.

    Example:
        >>> import math
        >>> unknown("module 'math'", "Log_2", math)
        AttributeError("module 'math' has no attribute 'Log_2'; use log2")
    """
    use = ""
    # Private names are misspelled by these packages, not by a user.
    if not name.startswith("_"):
        wanted = _normalize(name)
        # The table first, because a similar name may mean something else elsewhere.
        here = _NAMES.get(wanted) or next((n for n in dir(obj) if _normalize(n) == wanted), None)
        use = f"; use {here}" if here else ""
    return AttributeError(f"{owner} has no attribute {name!r}{use}", name=name, obj=obj)


def _normalize(name: str) -> str:
    return name.replace("_", "").lower()
