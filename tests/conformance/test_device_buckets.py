"""Buckets of arrays on a CUDA device: packed there by one kernel each, reduced where they lie.

A stand-in takes CuPy's place, which is as late as a device and logs what is launched and copied.
"""

import os
import sys

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import fakecupy
import strategies
from collectives.arrays import staging
from collectives.devices.staged import DeviceOperations

SLICE = 4096
SHAPES = [(3, 2), (0, 4), (700,), (1,), (50, 40), (5,)]


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    fake = fakecupy.FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "array_api_compat.cupy", fakecupy.ARRAY_API)
    monkeypatch.setattr(staging, "SLICE_BYTES", SLICE)
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 1)
    return fake


def values_of(rank, step, dtype=np.float32):
    """Multiples of 60, which 1 to 5 ranks divide exactly, of 7 bits."""
    random = np.random.default_rng([rank, step])
    return [(60 * random.integers(-8, 8, shape)).astype(dtype) for shape in SHAPES]


def means(comm, step, dtype=np.float32, scale=1):
    every = zip(*(values_of(rank, step, dtype) for rank in range(comm.size)), strict=True)
    return [np.sum(arrays, axis=0, dtype=np.float64) * scale / comm.size for arrays in every]


def check_results(results, buckets, expected):
    for result, view, wanted in zip(results, buckets.views, expected, strict=True):
        assert isinstance(result, fakecupy.ndarray)
        assert result is view  # it has come back where it was packed
        found = result.get()
        np.testing.assert_array_equal(found, wanted.astype(found.dtype))  # rounded once at most


DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_arrays_of_a_device_are_reduced_there(comm, cupy, dtype, scale):
    like = [cupy.array(x) for x in values_of(0, 0, dtype)]
    with comm.plan_buckets(like, bucket_bytes=2000, first_bucket_bytes=16) as buckets:
        for step in range(3):
            given = [cupy.late(x) for x in values_of(comm.rank, step, dtype)]
            results = buckets.allreduce(given, scale=scale)
            check_results(results, buckets, means(comm, step, dtype, scale))


def logged(comm, cupy, act):
    """Return what `act` returns, and what ranks of this process have launched and copied."""
    here = comm.allgather_object(os.getpid()).count(os.getpid())
    comm.barrier()
    before = len(cupy.log)
    comm.barrier()
    result = act()
    comm.barrier()
    log = cupy.log[before:]
    comm.barrier()
    return result, {
        name: (
            sum(each == name for each, _ in log) / here,
            sum(n for each, n in log if each == name) / here,
        )
        for name in ("pack", "to host", "from host")
    }


def test_one_kernel_and_one_way_there_and_back_for_each_bucket(comm, cupy):
    # Both buckets are longer than a slice: shorter ones go as a whole, which nobody logs.
    sizes = [3000, 2000, 1100, 900, 1500, 2000]
    like = [cupy.array(np.zeros(n, np.float32)) for n in sizes]
    options = {"bucket_bytes": 4 * 5000, "first_bucket_bytes": 4 * 3000}
    with comm.plan_buckets(like, **options) as buckets:
        for step in range(3):
            given = [cupy.late(np.full(n, comm.rank + step, np.float32)) for n in sizes]
            results, log = logged(comm, cupy, lambda given=given: buckets.allreduce(given))
            for result in results:
                assert (result.get() == step + (comm.size - 1) / 2).all()
            launches, nbytes = log["pack"]
            assert launches == 2
            assert 4 * sum(sizes) <= nbytes < 4 * sum(sizes) + 64 * len(sizes)
            for way in ("to host", "from host"):
                assert log[way][1] == (nbytes if comm.size > 1 else 0)


def test_messages_of_device_memory_do_not_come_to_the_host(world, cupy, monkeypatch):
    monkeypatch.setattr(DeviceOperations, "goes_to_mpi", lambda self, algorithm: True)

    def check(comm):
        like = [cupy.array(np.zeros(n, np.float32)) for n in (3000, 2000)]
        with comm.plan_buckets(like) as buckets:
            given = [cupy.late(np.full(n, comm.rank, np.float32)) for n in (3000, 2000)]
            results, log = logged(comm, cupy, lambda: buckets.allreduce(given))
            for result in results:
                assert (result.get() == (comm.size - 1) / 2).all()
            assert log["pack"][0] == 1
            assert log["to host"] == log["from host"] == (0, 0)

    world.run(check)


@pytest.mark.parametrize("in_place", [False, True])
def test_arrays_that_become_ready_one_after_the_other(comm, cupy, in_place):
    like = [cupy.array(x) for x in values_of(0, 0)]
    order = [4, 5, 0, 2, 1, 3]
    with comm.plan_buckets(like, bucket_bytes=2000, first_bucket_bytes=16) as buckets:
        for step in range(3):
            values = values_of(comm.rank, step)
            for i in order:
                if in_place:
                    view = buckets.views[i]
                    cupy.later(lambda v=view, x=values[i]: v.memory.__setitem__(..., x))
                    buckets.ready(i)
                else:
                    given = cupy.late(values[i])
                    buckets.ready(i, given)
                    given[...] = cupy.array(np.full(given.shape, 99, np.float32))
            check_results(buckets.wait(), buckets, means(comm, step))


def test_what_is_missing_in_place_misplaced_or_elsewhere(comm, cupy):
    like = [cupy.array(np.zeros(n, np.float32)) for n in (6, 6, 6, 6)]
    with comm.plan_buckets(like) as buckets:
        first, second, third, _ = buckets.views
        for view, number in ((first, 1), (second, 2), (third, 3)):
            view.memory[...] = number
        strided = cupy.array(np.full((6, 2), 5, np.float32))[:, 0]
        # The first two change their places, the third stays, one comes from the host.
        results = buckets.allreduce([second, first, third, strided])
        assert [float(x.get()[0]) for x in results] == [2, 1, 3, 5]
        results = buckets.allreduce([None, np.full(6, 7, np.float32), third, None])
        assert [float(x.get()[0]) for x in results] == [0, 7, 3, 0]
        cupy.log.clear()
        results = buckets.allreduce(buckets.views)
        assert [float(x.get()[0]) for x in results] == [0, 7, 3, 0]
        if comm.size == 1:
            assert not cupy.log  # everything is where it has to be


@pytest.mark.parametrize("compression", [cc.FP16, cc.FP16.with_feedback()], ids=str)
def test_compressed(comm, cupy, compression):
    like = [cupy.array(x) for x in values_of(0, 0)]
    with comm.plan_buckets(like, compression=compression, bucket_bytes=2000) as buckets:
        for step in range(2):
            given = [cupy.late(x) for x in values_of(comm.rank, step)]
            check_results(buckets.allreduce(given), buckets, means(comm, step))


def test_one_rank_without_a_device_brings_all_to_the_host(comm, cupy):
    make = np.array if comm.rank == comm.size - 1 else cupy.array
    with comm.plan_buckets([make(x) for x in values_of(0, 0)]) as buckets:
        assert all(isinstance(view, np.ndarray) for view in buckets.views)
        results = buckets.allreduce([make(x) for x in values_of(comm.rank, 1)])
        for result, wanted in zip(results, means(comm, 1), strict=True):
            found = result if isinstance(result, np.ndarray) else result.get()
            np.testing.assert_array_equal(found, wanted)


def test_an_array_that_does_not_fit(comm, cupy):
    with comm.plan_buckets([cupy.array(np.zeros(5, np.float32))]) as buckets:
        wrong = cupy.array(np.zeros(6, np.float32))
        with pytest.raises((ValueError, cc.MismatchError)) as caught:
            buckets.allreduce([wrong if comm.rank == 0 else cupy.array(np.ones(5, np.float32))])
        if comm.rank == 0:
            assert "expected float32 of shape (5,), got float32 of shape (6,)" in str(caught.value)
        (result,) = buckets.allreduce([cupy.array(np.ones(5, np.float32))])
        assert (result.get() == 1).all()


def test_an_optimizer_packs_gradients_on_their_device(comm, cupy):
    variables = [cupy.array(np.zeros(shape, np.float32)) for shape in SHAPES]
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    expected = [np.zeros(shape) for shape in SHAPES]
    for step in range(3):
        gradients = [cupy.late(x) for x in values_of(comm.rank, step)]
        pairs = list(zip(gradients, variables, strict=True))
        _, log = logged(comm, cupy, lambda pairs=pairs: optimizer.apply_gradients(pairs))
        assert log["pack"][0] == 1
        expected = [x - g for x, g in zip(expected, means(comm, step), strict=True)]
    for variable, wanted in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(variable.get(), wanted)
    optimizer.close()
