"""Arrays of more bytes than a C int counts, with every byte moved or refused."""

import gc
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives.communicator import group_of
from collectives.core.settings import Settings
from requirements import require

COUNT = 2**31 + 5
PLACES = [0, 2**30, 2**31 - 1, 2**31, COUNT - 1]  # where ranks differ

# Two ranks' arrays, and as much again for everything else on the machine.
NEEDED = 2 * COUNT + (4 << 30)


def why_not():
    """Say what is missing for two shared arrays of 2 GiB, or None."""
    if not Path("/dev/shm").is_dir():
        return "there is no /dev/shm"
    free = shutil.disk_usage("/dev/shm").free
    if free < 2 * COUNT:
        return f"/dev/shm has {free >> 20} MiB free, needs {2 * COUNT >> 20}"
    found = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    available = int(found[1]) << 10 if found else 0
    if available < NEEDED:
        return f"{available >> 20} MiB of memory are available, needs {NEEDED >> 20}"
    return None


def check_two_ranks(comm):
    """Reduce to all, reduce to one and broadcast in place, so that there are but two arrays."""
    x = comm.shared_empty(COUNT, np.uint8, timeout=60)
    assert group_of(comm).node_engine is not None
    engine = group_of(comm).node_engine
    assert engine.shared.location_of_pair(x) is not None, "there was no room for the shared arrays"

    def fill(base):
        x[...] = base
        for number, place in enumerate(PLACES):
            x[place] = base + 10 * (number + 1)

    def verify(base, step):
        for number, place in enumerate(PLACES):
            assert x[place] == base + step * (number + 1), place
            x[place] = base
        assert x.min() == x.max() == base

    fill(1 + comm.rank)
    comm.allreduce(x, op=cc.SUM, out=x, timeout=60)
    verify(3, 20)
    fill(1 + comm.rank)
    comm.reduce(x, 1, op=cc.SUM, out=x, timeout=60)  # through the slots
    if comm.rank == 1:
        verify(3, 20)
    fill(5 + comm.rank)
    comm.broadcast(x, 1, out=x, timeout=60)
    verify(6, 10)


def test_more_than_2_gib_in_shared_memory_are_reduced_and_broadcast():
    reason = why_not()
    if reason is not None:
        require("memory", reason)
    settings = Settings(timeout=60, shared_memory="/dev/shm")
    inprocess.run_ranks(2, check_two_ranks, timeout=60, settings=settings)
    gc.collect()  # the arrays go with the communicator; other tests need the memory


def test_mpis_own_alltoall_of_too_many_bytes_on_one_rank_is_refused_on_all(comm, world):
    if "native" not in world.algorithms("alltoall"):
        return
    from mpi4py import MPI

    if MPI.Get_version() >= (4, 0):
        return  # whose counts are long
    # Never touched: rank 0 sends to itself, the others send nothing.
    count = 2**31 if comm.rank == 0 else 0
    x = np.empty(count, np.uint8)
    splits = [count if rank == comm.rank else 0 for rank in range(comm.size)]
    with pytest.raises(ValueError, match="expected at most 2147483647 bytes, got 2147483648"):
        comm.alltoall(x, counts=splits, algorithm="native")
