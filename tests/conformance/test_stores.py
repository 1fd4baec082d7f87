"""How ranks of a node store for each other: chosen or forced, it changes no result."""

import dataclasses
import time

import numpy as np
import pytest

import collectives as cc
import oracle
from collectives.communicator import group_of
from collectives.transport.backoff import Deadline


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_how_a_rank_stores_changes_no_bit(comm, dtype):
    whole = comm.split(0)  # settings of its own
    whole.barrier()
    own = np.random.default_rng(comm.rank)

    def results(count):
        # Not aligned to lines of the cache.
        x = oracle.data(comm.rank, (count + 1,), np.dtype(dtype))[1:]
        for op in (cc.SUM, cc.MAX):
            yield whole.allreduce(x, op=op)
            yield whole.allreduce(x.copy(), op=op, out=x.copy())
            yield whole.reduce_scatter(x, op=op)
        yield whole.reduce(x, 0, op=cc.SUM)
        yield whole.broadcast(x, comm.size - 1)
        yield whole.allgather(x)

    for count in (5, 4099, 70_001, 600_011):
        expected = list(results(count))
        for _ in range(2):
            found = []
            for result in results(count):
                found.append(result)
                if group_of(whole).node_engine:  # ranks do otherwise, and change between two calls
                    group_of(whole).node_engine.set_store_mode(
                        str(own.choice(["plain", "streaming"]))
                    )
            for one, other in zip(expected, found, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.several
def test_the_way_of_storing_is_a_setting_and_is_told(comm):
    for way in ("plain", "streaming"):
        part = comm.split(0)
        group_of(part).settings = dataclasses.replace(comm.settings, stores=way)
        x = np.ones(100_000)
        np.testing.assert_array_equal(part.allreduce(x, op=cc.SUM), comm.size)
        assert group_of(part).node_engine is None or group_of(part).node_engine.stores == (way, 0)
    part = comm.split(0)
    part.barrier()
    if group_of(part).node_engine:
        assert group_of(part).node_engine.stores == ("plain", 0)
        part.allreduce(np.ones(1 << 20))
        way, time = group_of(part).node_engine.stores
        assert time > 0
        assert way in ("plain", "streaming")


@pytest.mark.parametrize("kibibytes", [64, 1024])
def test_who_comes_late_changes_nothing_in_a_comparison(comm, world, kibibytes):
    """A call is timed but for its waits, also where a rank waits for longer than a kernel does."""
    if world.kind != "shared":
        pytest.skip("about the node engine")
    late = 0.2
    if comm.size == 1:
        return
    part = comm.split(0)
    part.barrier()
    engine, x = group_of(part).node_engine, np.ones(kibibytes << 8, np.float32)
    engine.set_store_mode("auto")
    work = engine.plan_allreduce(x, x, cc.MAX, 1)
    compared = []
    for _ in range(2 + 2 * 3):
        if comm.rank == comm.size - 1:
            time.sleep(late)
        assert engine.run(work, Deadline("allreduce", 60.0))
        compared.append(list(work.block.tune_best_ns))
    assert compared[0] == [0, 0]
    assert 0 < max(compared[-2]) < late * 1e9 / 2, compared
    assert min(compared[-2]) > 0
    assert (x == 1).all()
