"""Datasets in memory once per node: read by one rank, mapped by the others.

The memory has no name in any file system; the ranks of a node reach it through `/proc/<pid>/fd`,
so that nothing is left behind whatever becomes of the job.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import collectives as cc
from strategies.core.process_group import ProcessGroup
from strategies.core.pytree import leaves, map_leaves
from strategies.rpc.wire import is_numeric

__all__ = ["once_per_node"]

_LINE = 64  # bytes at whose multiples arrays begin, as vector instructions and JAX like it


class _Place(NamedTuple):
    """Where one array lies in the memory."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def once_per_node(make: Callable[[], Any], comm: cc.Communicator) -> Any:
    """Make arrays on rank 0, and let every rank see them; a node holds them once.

    As if every rank had called `make`, but that file systems are read by one rank, and that the
    ranks of a node have the same memory. *Collective*.

    Args:
        make: called on rank 0 only; returns an array, or nested tuples, lists and dicts of arrays
            of numbers or truth values.
        comm: the ranks.

    Returns:
        The same structure of NumPy arrays that nobody can write to. They live as long as somebody
        on the node refers to any of them.

    Raises:
        TypeError: something is not an array of numbers; on all ranks.
        OSError: no memory, or ranks of a node do not reach each other's; on all ranks, on others
            than the first that it concerns as a RuntimeError.
        Exception: what `make` has raised; on all ranks.

    Cost: a broadcast of all bytes among the first ranks of the nodes. Rank 0 holds what `make` has
    returned besides, until that is free.

    Example:
        >>> import collectives as cc
        >>> x, y = once_per_node(lambda: (np.arange(3), np.ones(2)), cc.init())
        >>> x.tolist(), y.flags.writeable
        ([0, 1, 2], False)
    """
    ranks = ProcessGroup(comm)
    first = comm.rank == 0
    form, found = ranks.run_then_agree(
        "once_per_node", lambda: _make(make) if first else (None, [])
    )
    told: Any = comm.broadcast_object((form, _places(found)) if first else None)
    form, places = told
    total = max(sum(place.nbytes + _LINE for place in places), 1)
    node = comm.split(comm.node_rank)
    leaders = comm.split(comm.local_rank)  # of which only that of the nodes' first ranks is used
    assert node is not None
    assert leaders is not None
    files: list[int] = []
    with node, leaders:
        try:
            if not node.rank:
                ranks.run_then_agree("once_per_node", lambda: files.append(_reserve(total)))
                _fill(mmap.mmap(files[0], total), found, places, leaders)
            else:
                ranks.agree("once_per_node")
            owner: Any = node.broadcast_object((os.getpid(), *files))
            shared = ranks.run_then_agree("once_per_node", lambda: _map(owner[0], owner[1], total))
        finally:
            for file in files:  # which all have mapped by now
                os.close(file)
    views = iter([_view(shared, place) for place in places])
    return map_leaves(lambda _: next(views), form)


def _make(make: Callable[[], Any]) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """Return the structure, without its arrays, and the arrays."""
    value = make()
    found = [np.asarray(leaf) for leaf in leaves(value)]
    for array in found:
        if not is_numeric(array.dtype):
            raise TypeError(
                f"once_per_node: expected arrays of numbers, got {array.dtype} of shape "
                f"{array.shape}"
            )
    return map_leaves(lambda _: 0, value), found


def _places(found: list[np.ndarray[Any, Any]]) -> list[_Place]:
    places, start = [], 0
    for array in found:
        places.append(_Place(start, array.shape, array.dtype))
        start += -(-array.nbytes // _LINE) * _LINE
    return places


def _reserve(nbytes: int) -> int:
    """Return a file in memory of this length, all of which is there."""
    # The system would take pages until it ends processes, and not say that there are too few.
    free = _available()
    if free is not None and nbytes > free:
        raise OSError(
            errno.ENOMEM,
            f"once_per_node: not enough memory on this node, expected {nbytes} bytes, got {free}",
        )
    file = os.memfd_create("unisono")
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


def _available() -> int | None:
    """Return how many bytes of memory the node has free, or can free; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) << 10 if found else None


def _fill(
    mapped: mmap.mmap,
    found: list[np.ndarray[Any, Any]],
    places: list[_Place],
    leaders: cc.Communicator,
) -> None:
    """Write rank 0's arrays on the first rank of each node; *collective* over these."""
    memory = np.frombuffer(mapped, np.uint8)
    for array, place in zip(found, places, strict=False):  # elsewhere there are none
        _view(memory, place)[...] = array
    leaders.broadcast(memory, out=memory)


def _map(process: int, number: int, nbytes: int) -> np.ndarray[Any, Any]:
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY)
    try:
        return np.frombuffer(mmap.mmap(file, nbytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)


def _view(memory: np.ndarray[Any, Any], place: _Place) -> np.ndarray[Any, Any]:
    part = memory[place.start : place.start + place.nbytes]
    return part.view(place.dtype).reshape(place.shape)
