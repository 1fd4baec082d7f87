"""Peers of `bench`: the same operation by MPI (through mpi4py) and Gloo."""

from __future__ import annotations

import functools
import importlib.util
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from collectives import world
from collectives.arrays.host_arrays import Array
from collectives.arrays.torch_adapter import as_tensor
from collectives.core import settings
from collectives.launch import processes
from collectives.tools import info

__all__ = ["PEERS", "close", "gloo", "missing", "name", "native"]

Call = Callable[[], object]


def native(operation: str, x: Array, bounds: Sequence[int], root: int) -> Call:
    """Return MPI's own blocking call through mpi4py.

    Args:
        operation: name of the operation here.
        x: flat input of this rank; only read.
        bounds: `size + 1` offsets of the ranks' shares of the whole array.
        root: root, for operations that have one.

    Raises:
        ValueError: the MPI library lacks the dtype.
    """
    from mpi4py import MPI

    # Starts MPI only if `init` has not.
    mpi_world = processes.start_mpi(settings.from_environment())
    rank, size = mpi_world.Get_rank(), mpi_world.Get_size()
    if x.dtype.name == "bfloat16":  # MPI lacks it; float16 has the same size
        x = x.astype(np.float16)
    # A predefined datatype, because reductions reject derived ones.
    kind = MPI.Datatype.fromcode(x.dtype.char)
    if kind == MPI.DATATYPE_NULL:
        raise ValueError(f"bench: this MPI library has no {x.dtype}, expected --peers ''")
    counts = np.diff(bounds).tolist()
    offsets = bounds[:-1]
    # The first op that is defined for a dtype: SUM, or MIN for bool, which MPI calls LAND.
    mpi_op = MPI.LAND if x.dtype.kind == "b" else MPI.SUM
    send, out, at_root = [x, kind], [x.copy(), kind], rank == root
    own = [np.empty(counts[rank], x.dtype), kind]
    # Vector forms, because shares may differ by one element.
    whole = [np.empty(bounds[-1], x.dtype), counts, offsets, kind]
    parts = [x, counts, offsets, kind]
    # Each rank receives its share from every rank.
    starts = [counts[rank] * r for r in range(size)]
    received = [np.empty(counts[rank] * size, x.dtype), [counts[rank]] * size, starts, kind]
    calls: dict[str, Call] = {
        "allreduce": lambda: mpi_world.Allreduce(send, out, mpi_op),
        "reduce": lambda: mpi_world.Reduce(send, out if at_root else None, mpi_op, root),
        "reduce_scatter": lambda: mpi_world.Reduce_scatter(send, own, counts, mpi_op),
        "broadcast": lambda: mpi_world.Bcast(out, root),
        "allgather": lambda: mpi_world.Allgatherv(send, whole),
        "gather": lambda: mpi_world.Gatherv(send, whole if at_root else None, root),
        "scatter": lambda: mpi_world.Scatterv(parts if at_root else None, own, root),
        "alltoall": lambda: mpi_world.Alltoallv(parts, received),
    }
    return calls[operation]


def gloo(operation: str, x: Array, bounds: Sequence[int], root: int) -> Call:
    """Return the call of torch.distributed with the Gloo backend, on CPU tensors.

    Arguments and meaning as `native`. Gloo gathers and scatters equal shares only: if the whole
    does not divide evenly, every share is as large as the largest.

    Raises:
        ValueError: Gloo does not reduce the dtype.
    """
    # By name, so that type checkers need no PyTorch.
    torch: Any = importlib.import_module("torch")
    group = _gloo_group()
    rank, size = group.get_rank(), group.get_world_size()
    if x.dtype.name in ("int16", "uint16", "uint32", "uint64", "complex128"):
        raise ValueError(f"bench: gloo does not reduce {x.dtype}, expected --peers native")
    send = as_tensor(x.copy())
    # Gloo takes equal shares only.
    share = max(np.diff(bounds).tolist())
    if operation in ("allreduce", "reduce"):
        # Repeated in-place sums would overflow, except those of zeros.
        send.zero_()
        if operation == "allreduce":
            return lambda: group.all_reduce(send)
        return lambda: group.reduce(send, root)
    if operation == "broadcast":
        return lambda: group.broadcast(send, root)
    part, whole = send.new_zeros(share), send.new_zeros(share * size)
    parts = list(whole.chunk(size)) if rank == root else None
    # New names since PyTorch 2.13, where the old ones warn.
    reduce_scatter = getattr(group, "reduce_scatter_single", group.reduce_scatter_tensor)
    allgather = getattr(group, "all_gather_single", group.all_gather_into_tensor)
    calls: dict[str, Call] = {
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "allgather": lambda: allgather(whole, part),
        "gather": lambda: group.gather(part, parts, root),
        "scatter": lambda: group.scatter(part, parts, root),
        "alltoall": lambda: group.all_to_all_single(torch.empty_like(whole), whole),
    }
    return calls[operation]


@functools.cache
def _gloo_group() -> Any:
    """Return `torch.distributed` with the world's ranks in its default group."""
    group: Any = importlib.import_module("torch.distributed")
    # The world numbers the ranks, and carries the address of the store.
    comm = world.init()
    rank, size = comm.rank, comm.size
    limit = timedelta(seconds=60)
    place: Any = None
    if rank == 0:  # port 0: any free one
        host = "127.0.0.1" if comm.num_nodes == 1 else socket.gethostname()
        # Without waiting: the other ranks learn the port only after this call.
        store = group.TCPStore(host, 0, size, True, limit, wait_for_workers=False)
        place = (host, store.port)
    place = comm.broadcast_object(place)
    if rank > 0:
        store = group.TCPStore(*place, size, False, limit)
    group.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return group


PEERS: dict[str, Callable[[str, Array, Sequence[int], int], Call]] = {
    "native": native,
    "gloo": gloo,
}


def name(peer: str) -> str:
    """Return the name of a peer for people, such as "Open MPI 5.0.11" or "Gloo"."""
    return info.library_name() if peer == "native" else peer.capitalize()


def close() -> None:
    """End Gloo's threads, which must not outlive the interpreter; harmless without them."""
    # Asking for the group would create one.
    if _gloo_group.cache_info().currsize:
        _gloo_group().destroy_process_group()
        _gloo_group.cache_clear()


def missing(names: Sequence[str]) -> str:
    """Return the installation hint for missing peers; "" if all are installed."""
    # Without an import of PyTorch, which takes seconds.
    absent = "gloo" in names and importlib.util.find_spec("torch") is None
    return "the peer gloo needs PyTorch: pip install torch" if absent else ""
