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

# Seconds in which an address of another machine answers, or is left for the next one. On rank 0's
# own machine there is no next one: where jobs crowd the cores its store has taken more than that.
_CONNECT = 3.0

# By which ranks know that this is their store.
_KEY = "unisono/secret"

# Linux: the request for an interface's IPv4 address, a table of those of IPv6, its word for those
# that other machines know.
_SIOCGIFADDR = 0x8915
_IPV6, _GLOBAL = Path("/proc/net/if_inet6"), "00"


class _StoreAddress(NamedTuple):
    """Where rank 0 serves the store."""

    node: int
    hosts: list[str]
    port: int
    secret: str


def rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, **options: Any
) -> Iterator[tuple[distributed.Store, int, int]]:
    """Yield a store, the rank and the number of ranks; *collective*.

    Args:
        url: may contain `rank` and `world_size`, which must be MPI's, as must the variables `RANK`
            and `WORLD_SIZE` without them.
        timeout: of what waits for the store.
        options: of PyTorch's own way, which this one does not need.

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
    yield store, comm.rank, comm.size
    raise RuntimeError("init_process_group: ranks of MPI do not meet a second time")


def _check(url: str, comm: cc.Communicator, timeout: timedelta) -> None:
    """Compare the program's rank and number of ranks with those of MPI; *collective*."""
    named = {"rank": os.environ.get("RANK"), "world_size": os.environ.get("WORLD_SIZE")}
    named |= parse_qsl(urlsplit(url).query)
    rank, size = named["rank"] or str(comm.rank), named["world_size"] or str(comm.size)
    wrong = None if (rank, size) == (str(comm.rank), str(comm.size)) else f"rank {rank} of {size}"
    all_wrong = comm.allgather_object(wrong, timeout=timeout_seconds(timeout, comm))
    if any(all_wrong):
        number = next(number for number, text in enumerate(all_wrong) if text)
        count = size if comm.size == 1 else comm.size
        raise ValueError(
            "init_process_group: rank and world_size are not those of MPI, expected rank "
            f"{number} of {comm.size}, got {all_wrong[number]}; start with `mpirun -np {count} "
            "python train.py`, without these arguments and the variables RANK, WORLD_SIZE and "
            "MASTER_ADDR"
        )


def timeout_seconds(timeout: timedelta, comm: cc.Communicator) -> float:
    """Return the seconds for a program's `timeout`: `UNISONO_TIMEOUT` where it has not named one.

    PyTorch tells its own 30 minutes then.
    """
    return comm.settings.timeout if timeout == default_pg_timeout else timeout.total_seconds()


def addresses() -> list[str]:
    """Return where other machines may find this one: the addresses of its interfaces.

    `MASTER_ADDR` comes first where it is set. A host name does not help: on many clusters it is
    known to nobody else, or means the machine itself.
    """
    found = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    with contextlib.suppress(OSError):  # there is no IPv6
        for line in _IPV6.read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == _GLOBAL:
                found.append(str(ipaddress.IPv6Address(int(digits, 16))))
    return [host for host in found if not host.startswith("127.")]


def _store(comm: cc.Communicator, timeout: timedelta) -> distributed.Store:
    """Make the store by which torch.distributed tells ranks of groups; rank 0 serves it.

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
            error = str(caught)
    place = comm.broadcast_object(place, timeout=limit)
    if place is not None and comm.rank != 0:
        apart = place.node != comm.node_rank
        hosts = [*place.hosts, "localhost"] if apart else ["localhost"]
        wait = min(_CONNECT, limit) if apart else limit / 3
        store, error = _join(hosts, place, comm.size, timeout, wait)
    # Who goes on before others have come may end, and its store with it.
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
    """Return the store at the first host where it is found, or why it is at none of them.

    A host has `wait` seconds to be reached, and as many to answer as a store.
    """
    failures = []
    for host in hosts:
        try:
            socket.create_connection((host, place.port), wait).close()
            store = distributed.TCPStore(
                host, place.port, size, False, timedelta(seconds=wait), wait_for_workers=False
            )
            if store.get(_KEY).decode() == place.secret:  # machines may have the same addresses
                store.set_timeout(timeout)
                return store, None
            failures.append(f"{host} port {place.port} has another store")
        except (OSError, RuntimeError) as error:
            failures.append(f"{host} port {place.port}: {error}")
    return None, "; ".join(failures)
