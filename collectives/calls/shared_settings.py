"""Negotiation of settings that must be equal on all ranks, in one exchange.

| setting | agreed value |
| --- | --- |
| `check` | the strictest of all ranks: a rank that compares needs all other ranks to compare |
| `cuda_aware` | "on" if it is on all ranks |
| `links` | the link costs of rank 0, from settings or file; "auto" picks algorithms by them |
| `timeline` | the value of rank 0: all ranks start one timeline together |
| versions, `settings.EQUAL` | not negotiated: the values must be equal, else `LaunchError` |

Every rank fills a page. A maximum over all ranks, byte by byte, gives the shared page:

    byte    0                    1                           2 ..         18 ..
            level of checking    1: device memory staged     hash, ~hash  rank 0's links ... as JSON

The hash covers the versions and variables that must be equal. The values agree if the largest
`~hash` is the complement of the largest hash, byte by byte. Otherwise the ranks exchange the
values.

An MPI library without device support reads device addresses as host addresses and crashes. Its
own query is unreliable: Open MPI without CUDA denies support that UCX below it has, and old
libraries report only their headers. `UNISONO_CUDA_AWARE` overrides the query.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import logging
import os
import sys
import zlib
from collections.abc import Sequence
from typing import Literal, NoReturn, get_args

import numpy as np

from collectives.algorithms import halving_doubling, recursive_doubling
from collectives.arrays import reduction
from collectives.calls import signature
from collectives.core import settings, tuning_file
from collectives.core.errors import LaunchError, in_turn
from collectives.core.links import LinkCost, Machine, MeasuredMachine
from collectives.core.settings import Settings
from collectives.core.version import __version__
from collectives.transport.transport import Deadline, Transport

__all__ = ["library_takes_device_memory", "negotiate"]

log = logging.getLogger(__name__)

_HASH_BYTES = 8

# Versions that must be equal: with others, messages, pickles and random numbers may differ.
_VERSIONS = {
    "unisono": __version__,
    "Python": "{}.{}".format(*sys.version_info),
    "NumPy": ".".join(np.__version__.split(".")[:2]),
}

# Page of a rank in the exchange; the ranks take the maximum of each byte.
_PAGE = np.dtype(
    [
        ("check", "u1"),  # index of the level of checks
        ("staged", "u1"),  # whether device arrays are staged through the host
        ("hash", "u1", _HASH_BYTES),  # of the values that must be equal
        ("inverse_hash", "u1", _HASH_BYTES),  # its bits inverted
        ("text", "u1", 4078),  # rank 0's links as JSON, or an error, which is cut
    ]
)

# Bytes of a rank's values as JSON, sent if the hashes differ; characters shown of each value, which
# take up to 12 bytes each as JSON.
_VALUES_BYTES, _VALUE_CHARACTERS = 8192, 200


def library_takes_device_memory() -> bool:
    """Return whether the loaded MPI library reports support for device memory; after MPI_Init."""
    # An extension of several MPI libraries, which mpi4py does not wrap.
    query = getattr(ctypes.CDLL(None), "MPIX_Query_cuda_support", None)
    if query is None:  # mpi4py may load the library with RTLD_LOCAL
        from mpi4py import MPI

        query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def negotiate(own: Settings, transport: Transport, leaders: Sequence[int] = ()) -> Settings:
    """Return this rank's settings with the negotiated values; *collective*.

    Args:
        own: this rank's settings.
        transport: the ranks.
        leaders: one integer per rank, equal exactly for the ranks of one node; empty for one node.

    Raises:
        LaunchError: versions or variables that must be equal differ; the same error on all ranks.
        ValueError: rank 0's file of links is damaged or its location is unknown, or its paths are
            too long; the same error on all ranks.
    """
    # From the weakest to the strictest, so that a maximum gives the strictest.
    levels = get_args(settings.Check)
    wish = own.cuda_aware
    aware = wish == "on" or (wish == "auto" and library_takes_device_memory())
    page = np.zeros((), _PAGE)
    # One rank that stages is enough: the maximum of the flag.
    page["check"], page["staged"] = levels.index(own.check), not aware
    equal = _VERSIONS | settings.equal_values(own, os.environ)
    values = json.dumps({name: _abbreviate(value) for name, value in equal.items()})
    hashed = hashlib.blake2b(values.encode(), digest_size=_HASH_BYTES).digest()
    page["hash"] = np.frombuffer(hashed, np.uint8)
    # The maxima of `hash` and `~hash` are complements only if all hashes are equal.
    page["inverse_hash"] = ~page["hash"]
    if transport.rank == 0:
        # Other ranks leave zeros, so the maximum is the text of rank 0.
        text = _links(own).encode(errors="backslashreplace")[: page["text"].size]
        page["text"][: len(text)] = np.frombuffer(text, np.uint8)
    deadline = Deadline("init", own.timeout, own.stall_warning)
    # By messages, because the engine is created with these settings.
    recursive_doubling.allreduce(transport, page.reshape(1).view(np.uint8), reduction.MAX, deadline)

    if not np.array_equal(page["inverse_hash"], ~page["hash"]):
        _check_equal(values, transport, leaders or [0] * transport.size, deadline)
    where = f"[{transport.rank}/{transport.size}]"
    check: settings.Check = levels[page["check"]]
    if check != own.check:
        log.warning(
            "%s UNISONO_CHECK is %s on another rank, so this one, with %s, compares as much",
            where, check, own.check,
        )  # fmt: skip
    if aware and page["staged"]:
        log.warning(
            "%s MPI does not take device memory on all ranks, so all stage device arrays through "
            "the host", where,
        )  # fmt: skip
    text = page["text"].tobytes().rstrip(b"\0")
    # JSON of a list, else the text of rank 0's error.
    if not text.startswith(b"["):
        raise ValueError(text.decode(errors="replace"))
    machine, sources, timeline = json.loads(text)
    known = MeasuredMachine(Machine(*(LinkCost(*numbers) for numbers in machine)), tuple(sources))
    cuda_aware: Literal["on", "off"] = "off" if page["staged"] else "on"
    return dataclasses.replace(
        own, check=check, cuda_aware=cuda_aware, links=known, timeline=timeline
    )


def _abbreviate(value: str) -> str:
    """Return a short value unchanged; cut a long value and append its checksum."""
    # The checksum keeps two long values with equal starts apart.
    if len(value) <= _VALUE_CHARACTERS:
        return value
    return f"{value[:_VALUE_CHARACTERS]}... (CRC-32 {zlib.crc32(os.fsencode(value)):08x})"


def _check_equal(
    values: str, transport: Transport, leaders: Sequence[int], deadline: Deadline
) -> None:
    """All-gather the values, and raise the same error on all ranks if one differs."""
    # Rare, so the cost of 4 KiB per rank does not matter.
    lines = np.zeros((transport.size, _VALUES_BYTES), np.uint8)
    own = values.encode()[:_VALUES_BYTES]
    lines[transport.rank, : len(own)] = np.frombuffer(own, np.uint8)
    bounds = [_VALUES_BYTES * rank for rank in range(transport.size + 1)]
    halving_doubling.allgather(transport, lines.reshape(-1), bounds, deadline)
    by_rank = [json.loads(line.tobytes().rstrip(b"\0")) for line in lines]
    for name in _VERSIONS:
        if len({one[name] for one in by_rank}) > 1:
            text = "versions differ, expected the same on all ranks, got {}; install the same"
            _raise_different(name, f"{text} packages on all nodes", by_rank, transport)
    for variable, scope in settings.EQUAL.items():
        places = leaders if scope == "node" else [0] * transport.size
        # Equal if each place has exactly one value.
        pairs = {(place, one[variable]) for place, one in zip(places, by_rank, strict=True)}
        if len(pairs) > len(set(places)):
            ranks = "all ranks of a node" if scope == "node" else "all ranks"
            text = f"settings differ, expected the same on {ranks}, got {{}}; set it by"
            text += f" `mpirun -x {variable}` or `export` for all ranks"
            _raise_different(variable, text, by_rank, transport)


def _raise_different(
    name: str, text: str, by_rank: Sequence[dict[str, str]], transport: Transport
) -> NoReturn:
    """Raise `text`, with the values of all ranks for `{}`."""
    differences = signature.differences([{name: one[name]} for one in by_rank], transport.name)
    error = LaunchError(f"init: {text.format(differences)} ({transport.where})")
    raise in_turn(error, transport.rank)


def _links(own: Settings) -> str:
    """Return rank 0's links and timeline as JSON, or the text of an error."""
    try:
        text = json.dumps([*tuning_file.load_links(own, os.environ), own.timeline])
    except ValueError as error:
        return str(error)
    except Exception as error:
        # Any error, because the other ranks wait for the page.
        return f"tuned: {type(error).__name__}: {error}"
    room = _PAGE["text"].itemsize
    if len(text) > room:
        # An error instead of a part, because only whole JSON can be read.
        return (
            f"init: the links and the paths UNISONO_TUNED and UNISONO_TIMELINE are too long, "
            f"expected at most {room} bytes of JSON, got {len(text)} (rank 0)"
        )
    return text
