"""How processes that MPI has started find each other for torch.distributed: they have already."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torch import distributed

import collectives as cc

__all__ = ["rendezvous"]

_TIMEOUT = timedelta(minutes=30)  # as PyTorch's own


def rendezvous(
    url: str, timeout: timedelta = _TIMEOUT, **options: Any
) -> Iterator[tuple[distributed.Store, int, int]]:
    """Yield a store, the rank and the number of ranks; *collective*.

    Args:
        url: may name `rank` and `world_size`, which are then compared with MPI's.
        timeout: of what waits for the store.
        options: of PyTorch's own way, which this one does not need.

    Raises:
        ValueError: MPI has another rank or number of ranks than the url; on all ranks.
        LaunchError: the processes do not form one world.
    """
    comm = cc.init()
    told = dict(parse_qsl(urlsplit(url).query))
    wanted = [int(told.get("rank", comm.rank)), int(told.get("world_size", comm.size))]
    fits = wanted == [comm.rank, comm.size]
    if not comm.allreduce(fits, op=cc.MIN):
        here = f"got rank {wanted[0]} of {wanted[1]}" if not fits else "got others elsewhere"
        raise ValueError(
            "init_process_group: rank and world_size are not those of MPI, expected rank "
            f"{comm.rank} of {comm.size}, {here}; leave them away"
        )
    yield _store(comm, timeout), comm.rank, comm.size
    raise RuntimeError("init_process_group: ranks of MPI do not meet a second time")


def _store(comm: cc.Communicator, timeout: timedelta) -> distributed.Store:
    """Make the store by which torch.distributed tells ranks of groups; rank 0 serves it."""
    place: Any = None
    if comm.rank == 0:
        host = "localhost" if comm.num_nodes == 1 else socket.gethostname()
        store = distributed.TCPStore(host, 0, comm.size, True, timeout, wait_for_workers=False)
        place = host, store.port
    host, port = comm.broadcast_object(place)
    if comm.rank != 0:
        store = distributed.TCPStore(host, port, comm.size, False, timeout, wait_for_workers=False)
    comm.barrier()  # who goes on before others have come may end, and its store with it
    return store
