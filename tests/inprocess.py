"""Ranks as threads of one process: the second rung of the tests, over `collectives.testing`."""

import sys
import threading
import traceback
from types import SimpleNamespace

import numpy as np
import pytest

import fakecupy
from collectives.arrays.device import DeviceBuffer
from collectives.arrays.host_arrays import raw_bytes
from collectives.calls.group import Group
from collectives.communicator import Communicator
from collectives.core.settings import Settings
from collectives.testing import thread_transport
from collectives.testing.thread_transport import ThreadMailbox, ThreadTransport
from limits import Limit

__all__ = [
    "MODES", "TIMEOUT", "ThreadGroup", "ThreadMailbox", "ThreadTransport", "memory_of",
    "on_ranks", "run_ranks", "world_settings",
]  # fmt: skip

MODES = ("eager", "synchronous")


# Seconds that a rank waits for another one in a test; far above what any of them needs.
TIMEOUT = 20.0


def world_settings(shared, stores="auto"):
    """Settings for tests: short waits, with or without shared memory, and how ranks store there."""
    return Settings(timeout=TIMEOUT, shared_memory="/dev/shm" if shared else None, stores=stores)


def memory_of(array):
    """View an array's bytes; those of a device as an MPI does that takes device memory: at once."""
    if not isinstance(array, DeviceBuffer):
        return raw_bytes(array)
    interface = array.__cuda_array_interface__
    return fakecupy.memory_at(interface["data"][0], interface["shape"], np.dtype(np.uint8))


class ThreadGroup(thread_transport.ThreadGroup):
    """What the threads of one group share; with arrays of the stand-in for a device."""

    def __init__(self, size, mode):
        super().__init__(size, mode, memory_of)


def _waiting(threads, errors):
    """Describe ranks that are still waiting after their deadline, and errors of the others."""
    frames = sys._current_frames()
    lines = ["a rank is still waiting after its deadline"]
    for rank, (thread, error) in enumerate(zip(threads, errors, strict=True)):
        if error is not None:
            lines += [f"rank {rank}:", *traceback.format_exception(error)]
        elif thread.ident in frames:
            lines += [f"rank {rank} waits:", *traceback.format_stack(frames[thread.ident])]
    return "\n".join(lines)


def run_ranks(size, function, mode="eager", *, timeout=20.0, leaders=None, settings=None):
    """Call `function(comm)` on `size` threads and return the results in rank order.

    The first error by rank is raised, after all threads have ended.
    """
    group = ThreadGroup(size, mode)
    results = [None] * size
    errors = [None] * size

    def body(rank):
        try:
            transport = ThreadTransport(group, rank)
            configuration = settings or Settings(timeout=timeout)
            comm = Communicator(Group(transport, leaders or [0] * size, configuration))
            results[rank] = function(comm)
            comm.close()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    limit = Limit(timeout + 40)
    for thread in threads:
        while thread.is_alive() and (left := limit.left()):
            thread.join(left)
        assert not thread.is_alive(), _waiting(threads, errors)
    for error in errors:
        if error is not None:
            raise error
    return results


def on_ranks(size, **options):
    """Mark a test that takes `comm`: it runs on this many threads, with options of `run_ranks`."""
    ranks = SimpleNamespace(run=lambda function: run_ranks(size, function, **options))
    return pytest.mark.parametrize("comm", [ranks], ids=[f"{size} ranks"])
