"""Datasets in memory once per node: loaded by one rank, mapped by the others.

The memory is an anonymous file (memfd). The other ranks of a node open it through
`/proc/<pid>/fd`, so the kernel frees it even if the job is killed.
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

_LINE = 64  # alignment of arrays in bytes, for vector instructions and JAX


class _Place(NamedTuple):
    """Position of one array in the memory."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def once_per_node(make: Callable[[], Any], comm: cc.Communicator) -> Any:
    """Make arrays on rank 0 and share them with all ranks, one copy per node.

    As if every rank had called `make`, but only rank 0 reads files, and the ranks of a node share
    memory. *Collective*.

    Args:
        make: called on rank 0 only; returns an array, or nested tuples, lists and dicts of arrays
            of numbers or truth values.
        comm: the ranks.

    Returns:
        The same structure of read-only NumPy arrays. The memory is freed when no rank of the node
        refers to any of them.

    Raises:
        TypeError: a leaf is not an array of numbers; on all ranks.
        OSError: a node has too little memory, or its ranks cannot map each other's; on the first
            such rank. All other ranks raise RuntimeError.
        Exception: the error that `make` raised; on all ranks.

    Cost: a broadcast of all bytes among the first ranks of the nodes. Rank 0 also holds the arrays
    that `make` returned until the end of the call.

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
    # Room for the alignment of each array; at least one byte, as `mmap` of 0 bytes fails.
    total = max(sum(place.nbytes + _LINE for place in places), 1)
    # Ranks of a node share memory; the leaders of the nodes exchange the bytes.
    node = comm.split(comm.node_rank)
    leaders = comm.split(comm.local_rank)  # only the first ranks of the nodes use theirs
    assert node is not None
    assert leaders is not None
    files: list[int] = []

    def reserve() -> mmap.mmap:
        files.append(_reserve(total))
        return mmap.mmap(files[0], total)

    with node, leaders:
        try:
            if not node.rank:
                # It may fail on one node only, so all ranks agree before the broadcast.
                mapped = ranks.run_then_agree("once_per_node", reserve)
                memory = np.frombuffer(mapped, np.uint8)
                for array, place in zip(found, places, strict=False):  # none except on rank 0
                    _view(memory, place)[...] = array
                # Bytes instead of arrays: one broadcast for all of them.
                leaders.broadcast(memory, out=memory)
            else:
                # The other ranks of a node take part in the agreement only.
                ranks.agree("once_per_node")
            # After the leader has filled the memory: receiving this message is the signal.
            owner: Any = node.broadcast_object((os.getpid(), *files))
            # Agreed, so that no rank uses the arrays if the mapping failed on another one.
            shared = ranks.run_then_agree("once_per_node", lambda: _map(owner[0], owner[1], total))
        finally:
            for file in files:  # all ranks of the node have mapped it, or the call has failed
                os.close(file)
    # The views keep the mapping alive, and the mapping keeps the memory.
    views = iter([_view(shared, place) for place in places])
    return map_leaves(lambda _: next(views), form)


def _make(make: Callable[[], Any]) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """Return the structure without its arrays, and the arrays."""
    value = make()
    found = [np.asarray(leaf) for leaf in leaves(value)]
    for array in found:
        if not is_numeric(array.dtype):
            raise TypeError(
                f"once_per_node: expected arrays of numbers, got {array.dtype} of shape "
                f"{array.shape}"
            )
    # A number instead of each array: the structure travels by pickle.
    return map_leaves(lambda _: 0, value), found


def _places(found: list[np.ndarray[Any, Any]]) -> list[_Place]:
    places, start = [], 0
    for array in found:
        places.append(_Place(start, array.shape, array.dtype))
        # Rounded up to the next line, so that each array starts aligned.
        start += -(-array.nbytes // _LINE) * _LINE
    return places


def _reserve(nbytes: int) -> int:
    """Return a file descriptor of `nbytes` bytes of allocated memory.

    Without the check, Linux would hand out pages until the out-of-memory killer ends processes.
    """
    free = _available()
    if free is not None and nbytes > free:
        raise OSError(
            errno.ENOMEM,
            f"once_per_node: not enough memory on this node, expected {nbytes} bytes, got {free}",
        )
    file = os.memfd_create("unisono")
    # Allocates all pages now: a later write cannot fail for lack of memory.
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


def _available() -> int | None:
    """Return how many bytes of memory the node has available; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) << 10 if found else None


def _map(process: int, number: int, nbytes: int) -> np.ndarray[Any, Any]:
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY)
    try:
        # Read only, so that a rank cannot change the data of others.
        return np.frombuffer(mmap.mmap(file, nbytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)


def _view(memory: np.ndarray[Any, Any], place: _Place) -> np.ndarray[Any, Any]:
    part = memory[place.start : place.start + place.nbytes]
    return part.view(place.dtype).reshape(place.shape)
