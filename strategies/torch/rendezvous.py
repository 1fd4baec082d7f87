"""Rendezvous of torch.distributed over MPI."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from torch import distributed
from torch.distributed.constants import default_pg_timeout

import collectives as cc
from collectives import extend
from strategies.torch.work import translated

__all__ = ["addresses", "timeout_seconds", "rendezvous"]

# Seconds to wait for an address of another machine before the next one is tried. Rank 0's own
# machine has no other address, and its store may take longer when jobs crowd the cores.
_CONNECT = 3.0

# Key of a secret in the store, so that ranks detect a foreign store.
_KEY = "unisono/secret"

# Linux: the request for an interface's IPv4 address, the table of IPv6 addresses, and the scope of
# addresses that other machines can reach.
_SIOCGIFADDR = 0x8915
_IPV6, _GLOBAL = Path("/proc/net/if_inet6"), "00"


class _StoreAddress(NamedTuple):
    """Address of rank 0's store."""

    node: int
    hosts: list[str]
    port: int
    secret: str


def rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, **options: Any
) -> Iterator[tuple[distributed.Store, int, int]]:
    """Yield a store, the rank and the number of ranks; *collective*.

    Args:
        url: may contain `rank` and `world_size`, otherwise the variables `RANK` and `WORLD_SIZE`
            may; they must equal MPI's.
        timeout: timeout of the store.
        options: ignored; PyTorch passes them for its own rendezvous.

    Raises:
        ValueError: MPI has another rank or number of ranks; on all ranks.
        LaunchError: the processes do not form one world; or some cannot reach rank 0, on all ranks.
    """
    comm = cc.init()
    try:
        _check(url, comm, timeout)
        store = _store(comm, timeout)
    except cc.CollectiveTimeout as error:
        raise translated(error) from error.__cause__
    # PyTorch takes one item, and asks again only if it wants to restart the job.
    yield store, comm.rank, comm.size
    raise RuntimeError("init_process_group: a second rendezvous over MPI is not possible")


def _check(url: str, comm: cc.Communicator, timeout: timedelta) -> None:
    """Compare the program's rank and number of ranks with MPI's; *collective*."""
    named = {"rank": os.environ.get("RANK"), "world_size": os.environ.get("WORLD_SIZE")}
    named |= parse_qsl(urlsplit(url).query)
    # An empty variable counts as not set.
    rank, size = named["rank"] or str(comm.rank), named["world_size"] or str(comm.size)
    wrong = None if (rank, size) == (str(comm.rank), str(comm.size)) else f"rank {rank} of {size}"
    # Exchanged before raising, so that all ranks raise the same error.
    all_wrong = comm.allgather_object(wrong, timeout=timeout_seconds(timeout, comm))
    if any(all_wrong):
        number = next(number for number, text in enumerate(all_wrong) if text)
        # A world of one with a larger number: the program was started without mpirun.
        count = size if comm.size == 1 else comm.size
        raise ValueError(
            "init_process_group: rank and world_size are not those of MPI, expected rank "
            f"{number} of {comm.size}, got {all_wrong[number]}; start with `mpirun -np {count} "
            "python train.py`, without these arguments and the variables RANK, WORLD_SIZE and "
            "MASTER_ADDR"
        )


def timeout_seconds(timeout: timedelta, comm: cc.Communicator) -> float:
    """Return a program's timeout in seconds: `UNISONO_TIMEOUT` if it has not set one.

    PyTorch then passes its own default of 30 minutes.
    """
    # PyTorch passes its default for None, so both mean that the program set no timeout.
    return comm.settings.timeout if timeout == default_pg_timeout else timeout.total_seconds()


def addresses() -> list[str]:
    """Return the addresses of this machine's interfaces, for other machines.

    `MASTER_ADDR` is the first one if it is set. A host name would not help: on many clusters other
    machines cannot resolve it, or it means the machine itself.
    """
    # First, because the user knows which address the others can reach.
    found = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no address
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    with contextlib.suppress(OSError):  # the machine has no IPv6
        for line in _IPV6.read_text().splitlines():
            # Fields: address, number of the interface, prefix length, scope, flags and name.
            digits, _, _, scope, *_ = line.split()
            if scope == _GLOBAL:
                found.append(str(ipaddress.IPv6Address(int(digits, 16))))
    return [host for host in found if not host.startswith("127.")]


def _store(comm: cc.Communicator, timeout: timedelta) -> distributed.Store:
    """Make torch.distributed's key-value store, which rank 0 serves.

    Raises:
        LaunchError: a rank cannot reach rank 0; on all ranks.
    """
    limit = timeout_seconds(timeout, comm)
    store: distributed.TCPStore | None = None
    place: _StoreAddress | None = None
    error: str | None = None
    if comm.rank == 0:
        try:
            store = distributed.TCPStore(
                "localhost", 0, comm.size, True, timeout, wait_for_workers=False
            )
            store.set(_KEY, secret := secrets.token_hex(8))
            hosts = addresses() if comm.num_nodes > 1 else []
            place = _StoreAddress(comm.node_rank, hosts, store.port, secret)
        except (OSError, RuntimeError) as caught:
            # Broadcast as None below; the ranks then raise together.
            error = str(caught)
    place = comm.broadcast_object(place, timeout=limit)
    if place is not None and comm.rank != 0:
        # `localhost` last for other nodes: containers may share a network.
        apart = place.node != comm.node_rank
        hosts = [*place.hosts, "localhost"] if apart else ["localhost"]
        # Two attempts of a third each leave a third of the limit for the others.
        wait = min(_CONNECT, limit) if apart else limit / 3
        store, error = _join(hosts, place, comm.size, timeout, wait)
    # Wait for all ranks: a rank that continued could exit and close its store too early.
    errors = comm.allgather_object(error, timeout=limit)
    wrong = [rank for rank, text in enumerate(errors) if text is not None]
    if wrong or store is None:
        where = extend.describe_ranks(comm, *wrong)
        raise cc.LaunchError(
            f"init_process_group: {where} cannot reach the store of rank 0: "
            f"{errors[wrong[0]]}; MASTER_ADDR on rank 0 may name an address that all can reach"
        )
    return store


def _join(
    hosts: Sequence[str], place: _StoreAddress, size: int, timeout: timedelta, wait: float
) -> tuple[distributed.TCPStore | None, str | None]:
    """Return the first host's store that is rank 0's, or the error of every host.

    A host has `wait` seconds to accept a connection, and the same to answer as a store.
    """
    failures = []
    for host in hosts:
        try:
            # A plain connection first: a store retries an unreachable address until its timeout.
            socket.create_connection((host, place.port), wait).close()
            store = distributed.TCPStore(
                host, place.port, size, False, timedelta(seconds=wait), wait_for_workers=False
            )
            if store.get(_KEY).decode() == place.secret:  # machines may have equal addresses
                store.set_timeout(timeout)
                return store, None
            failures.append(f"{host} port {place.port} has another store")
        except (OSError, RuntimeError) as error:
            failures.append(f"{host} port {place.port}: {error}")
    return None, "; ".join(failures)
