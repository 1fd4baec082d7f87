"""Calls of a test that may block, fail or end the program, and folders of all ranks."""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import collectives as cc
from limits import Limit

__all__ = ["LIMIT", "folder_of", "in_thread", "raised", "status_of", "together", "until"]

LIMIT = 20.0  # seconds after which a test that hangs fails


def folder_of(comm):
    """A new folder, the same on all ranks."""
    return comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)


def in_thread(function, *args, **options):
    """Start a call that may block; `.result(LIMIT)` is its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args, **options)
    pool.shutdown(wait=False)
    return future


def together(function, values):
    """Call a function of each value, all at the same time in threads; return the results."""
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(function, values, timeout=3 * LIMIT))


def until(condition):
    """Wait for what another thread brings about."""
    limit = Limit(LIMIT)
    while not condition():
        assert limit.left()
        time.sleep(0.001)


def raised(call):
    """Return the error of a call that is wrong on some rank, None if it has none."""
    try:
        call()
    except (TypeError, ValueError, cc.CollectiveError) as error:
        return error
    return None


def status_of(program):
    """The exit status with which a program leaves."""
    with pytest.raises(SystemExit) as left:
        program()
    return left.value.code
