"""Calls of a test that may block, or that have to be refused."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import collectives as cc
from limits import Limit

__all__ = ["in_thread", "raised", "until"]

LIMIT = 20.0


def in_thread(function, *args, **options):
    """Start a call that may block; `.result(LIMIT)` is its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args, **options)
    pool.shutdown(wait=False)
    return future


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
