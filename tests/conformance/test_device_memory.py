"""Large device arrays: in slices through the host, and as messages of device memory.

A stand-in takes CuPy's place. Its device memory is host memory, but it is as late as a device's, so
that a wait that is missing gives wrong numbers; and any MPI takes its addresses.
"""

import sys

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import fakecupy
import inprocess
import oracle
from collectives.arrays import staging
from collectives.communicator import group_of
from collectives.core.settings import Settings
from collectives.devices.staged import DeviceOperations

# Bytes of a slice in these tests.
SLICE = 4096

ROUTES = ["staged", "aware"]


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    fake = fakecupy.FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(staging, "SLICE_BYTES", SLICE)
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 1)
    return fake


def on(comm, route):
    """The communicator, as it is where MPI does or does not take device memory."""
    group_of(comm).state_of(DeviceOperations).aware = route == "aware"
    return comm


COUNTS = [1025, 5 * SLICE // 4, 20_001]


@pytest.mark.algorithms("allreduce")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.MAX])
def test_an_allreduce_is_exact_and_complete(comm, algorithm, cupy, route, op):
    on(comm, route)
    for count in COUNTS:
        everyone = [np.arange(count, dtype=np.float32) * (r + 1) for r in range(comm.size)]
        values = everyone[comm.rank]
        x = cupy.late(values)
        result = comm.allreduce(x, op=op, algorithm=algorithm)
        assert isinstance(result, fakecupy.ndarray)
        total = np.sum(everyone, axis=0, dtype=np.float64)
        expected = {cc.SUM: total, cc.MEAN: total / comm.size, cc.MAX: everyone[-1]}[op]
        np.testing.assert_allclose(result.memory, expected, rtol=2**-22)
        np.testing.assert_array_equal(x.memory, values)
        same = comm.broadcast(result.memory.copy(), 0)
        np.testing.assert_array_equal(result.memory, same)  # the same bits on all ranks


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_every_dtype_passes(comm, cupy, route, dtype):
    on(comm, route)
    op = cc.MAX if dtype == oracle.BOOL else cc.SUM
    values = oracle.data(comm.rank, (6000,), dtype)
    result = comm.allreduce(cupy.late(values), op=op)
    expected = comm.allreduce(values, op=op)
    assert result.dtype == dtype
    if dtype.kind in "fcV" or dtype == oracle.BFLOAT16:  # by messages another order of ranks
        np.testing.assert_allclose(
            result.memory.astype(complex), expected.astype(complex),
            atol=8 * comm.size * float(ml_dtypes.finfo(dtype).eps),
        )  # fmt: skip
    else:
        np.testing.assert_array_equal(result.memory, expected)


@pytest.mark.parametrize("route", ROUTES)
def test_results_go_where_the_caller_wants_them(comm, cupy, route):
    on(comm, route)
    values = np.full((50, 60), comm.rank + 1, np.float32)
    expected = np.full((50, 60), comm.size * (comm.size + 1) / 2, np.float32)
    x = cupy.late(values)
    assert comm.allreduce(x, op=cc.SUM, out=x) is x
    np.testing.assert_array_equal(x.memory, expected)
    x, out = cupy.late(values), cupy.late(values)
    assert comm.allreduce(x, op=cc.SUM, out=out) is out
    np.testing.assert_array_equal(out.memory, expected)
    wide = cupy.late(np.zeros((50, 120), np.float32))
    strided = wide[:, ::2]
    assert comm.allreduce(x, op=cc.SUM, out=strided) is strided
    np.testing.assert_array_equal(strided.memory, expected)
    np.testing.assert_array_equal(wide.memory[:, 1::2], 0)
    strided[...] = x  # computed late, and not contiguous
    assert comm.allreduce(strided, op=cc.SUM, out=strided) is strided
    np.testing.assert_array_equal(strided.memory, expected)
    host = np.zeros((50, 60), np.float32)
    assert comm.allreduce(x, op=cc.SUM, out=host) is host
    np.testing.assert_array_equal(host, expected)


@pytest.mark.parametrize("route", ROUTES)
def test_an_out_may_overlap_the_array(comm, cupy, route):
    on(comm, route)
    both = cupy.late(np.arange(9000, dtype=np.float32))
    x, out = both[:6000], both[3000:]
    comm.allreduce(x, op=cc.MAX, out=out)
    np.testing.assert_array_equal(out.memory, np.arange(6000))


@pytest.mark.parametrize("route", ROUTES)
def test_another_library_s_stream_is_waited_for(comm, cupy, route):
    on(comm, route)
    stream = fakecupy.Stream()
    cupy.streams[stream.ptr] = stream
    buffer = fakecupy.Buffer(cupy, np.zeros(5000, np.float32), stream.ptr)
    stream.queue.append(lambda: buffer.memory.fill(1))
    result = comm.allreduce(buffer, op=cc.SUM)
    assert (result.memory == comm.size).all()
    del cupy.streams[stream.ptr]


@pytest.mark.algorithms("broadcast")
@pytest.mark.parametrize("route", ROUTES)
def test_a_broadcast_copies_from_the_root_only(comm, algorithm, cupy, route):
    on(comm, route)
    root = comm.size - 1
    for out in (False, True):
        values = np.arange(5000, dtype=np.float32) + comm.rank
        x = cupy.late(values)
        result = comm.broadcast(x, root, out=x if out else None, algorithm=algorithm)
        assert (result is x) is out
        np.testing.assert_array_equal(result.memory, np.arange(5000) + root)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("compression", [cc.FP16, cc.BF16, cc.INT8], ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_compressed_arrays_have_the_host_s_bits(comm, cupy, route, compression, algorithm):
    on(comm, route)
    values = oracle.data(comm.rank, (7000,), np.dtype(np.float32))
    # By messages the host's arrays are compressed, whichever algorithm is named; blocks of 8
    # bits are made on the host.
    alike = algorithm if compression is cc.INT8 else "ring"
    for op in (cc.SUM, cc.MEAN):
        expected = comm.allreduce(values, op=op, algorithm=alike, compression=compression)
        result = comm.allreduce(
            cupy.late(values), op=op, algorithm=algorithm, compression=compression
        )
        np.testing.assert_array_equal(result.memory, expected)


@pytest.mark.parametrize("compression", [cc.NONE, cc.FP16], ids=str)
def test_later_calls_run_what_the_first_one_has_planned(comm, cupy, compression):
    on(comm, "staged")
    values = oracle.data(comm.rank, (7000,), np.dtype(np.float32))
    results = []
    for step in range(3):
        x = cupy.late(values)
        results.append(comm.allreduce(x, op=cc.SUM, compression=compression).memory)
        if step == 0 and (engine := group_of(comm).node_engine) is not None:
            engine.plan_allreduce = None  # who plans now, fails
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_half_of_the_bytes_leave_the_device(comm, cupy):
    on(comm, "staged")
    cupy.log.clear()
    comm.barrier()
    comm.allreduce(cupy.late(np.ones(7000, np.float32)), compression=cc.FP16)
    comm.barrier()
    if comm.size > 1:
        one_way = sum(n for name, n in cupy.log if name == "to host")
        assert one_way % (2 * 7000) == 0  # threads share the log


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_feedback_on_a_device_is_the_host_s(comm, cupy, route, algorithm):
    on(comm, route)
    here, there = cc.FP16.with_feedback(), cc.FP16.with_feedback()
    values = oracle.data(comm.rank, (7000,), np.dtype(np.float32))
    for step in range(4):
        scaled = values * np.float32(1.1**step)
        expected = comm.allreduce(scaled, algorithm="ring", compression=here, name="w")
        x = cupy.late(scaled)
        result = comm.allreduce(x, algorithm=algorithm, compression=there, name="w")
        if algorithm == "ring":
            np.testing.assert_array_equal(result.memory, expected)
        else:  # in shared memory nothing is rounded
            np.testing.assert_allclose(result.memory, expected, atol=2**-8)


@pytest.mark.parametrize("count", [3, 5000])
def test_asynchronous_operations_come_after_what_computes_their_arrays(comm, cupy, count):
    requests = []
    for step in range(3):
        x = cupy.late(np.full(count, step, np.float32))
        requests.append(comm.allreduce_async(x, op=cc.SUM))
        requests.append(comm.broadcast_async(x, out=x))
    for number, request in enumerate(requests):
        scale = 1 if number % 2 else comm.size
        assert (request.wait().memory == number // 2 * scale).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shared", ["/dev/shm", None])
@pytest.mark.parametrize("compression", [cc.NONE, cc.FP16, cc.FP16.on("network")], ids=str)
def test_arrays_cross_nodes_of_several_ranks(cupy, route, shared, compression):
    def check(comm):
        on(comm, route)
        everyone = [oracle.data(r, (9000,), np.dtype(np.float32)) for r in range(comm.size)]
        total = np.sum(everyone, axis=0, dtype=np.float64)
        result = comm.allreduce(cupy.late(everyone[comm.rank]), op=cc.SUM, compression=compression)
        tolerance = 2**-20 if compression is cc.NONE else 2**-8
        np.testing.assert_allclose(result.memory, total, atol=tolerance * comm.size)
        x = cupy.late(everyone[comm.rank])
        assert comm.broadcast(x, 3, out=x) is x
        np.testing.assert_array_equal(x.memory, everyone[3])
        return result.memory

    settings = Settings(timeout=20, shared_memory=shared)
    results = inprocess.run_ranks(5, check, leaders=[0, 0, 2, 2, 2], settings=settings)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


GROUPED = [("float32", (40, 30)), ("int64", (700,)), ("float32", (0, 3)), ("float32", (1,)),
           ("float64", (900,)), ("int64", ()), ("float32", (600,))]  # fmt: skip


def gradients(rank):
    return [oracle.data(rank, shape, np.dtype(dtype)) for dtype, shape in GROUPED]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("out", ["new", "same", "other"])
def test_grouped_arrays_are_packed_where_they_are(comm, cupy, route, out):
    on(comm, route)
    every = [gradients(rank) for rank in range(comm.size)]
    for step in range(3):  # the later ones by what the first one has planned
        xs = [cupy.late(x + x.dtype.type(step)) for x in every[comm.rank]]
        into = {"new": None, "same": xs, "other": [cupy.late(np.zeros_like(x)) for x in
                                                  every[0]]}[out]  # fmt: skip
        results = comm.grouped_allreduce(xs, op=cc.SUM, out=into)
        for i, result in enumerate(results):
            assert isinstance(result, fakecupy.ndarray)
            assert into is None or result is into[i]
            parts = [one[i] + one[i].dtype.type(step) for one in every]
            assert (result.dtype, result.shape) == (parts[0].dtype, parts[0].shape)
            expected = np.sum(parts, axis=0, dtype=np.result_type(parts[0].dtype, np.int64))
            np.testing.assert_allclose(result.memory, expected, atol=2**-20 * comm.size)
            if out != "same":
                np.testing.assert_array_equal(xs[i].memory, parts[comm.rank])


@inprocess.on_ranks(2, settings=Settings(timeout=20))
def test_grouped_arrays_take_one_copy_for_each_dtype(comm, cupy):
    xs = [cupy.late(np.ones(300, np.float32)) for _ in range(40)]
    comm.grouped_allreduce(xs)
    comm.barrier()
    cupy.log.clear()
    comm.barrier()
    comm.grouped_allreduce(xs)
    comm.barrier()
    copies = [n for name, n in cupy.log if name == "to host"]
    assert sum(copies) == 2 * 40 * 300 * 4
    assert len(copies) == 2 * -(-40 * 300 * 4 // SLICE)
    comm.barrier()
    cupy.log.clear()
    comm.barrier()
    comm.grouped_allreduce(xs, out=xs)
    comm.barrier()
    kernels = [name for name, _ in cupy.log if name in ("pack", "unpack")]
    assert sorted(kernels) == 2 * ["pack"] + 2 * ["unpack"]


@pytest.mark.parametrize("compression", [cc.FP16, cc.BF16, cc.INT8], ids=str)
def test_grouped_arrays_are_compressed_as_one(comm, cupy, compression):
    on(comm, "staged")
    xs = [x for x in gradients(comm.rank) if x.dtype == np.float32]
    flat = np.concatenate([x.reshape(-1) for x in xs])
    expected = comm.allreduce(cupy.late(flat), compression=compression).memory
    results = comm.grouped_allreduce([cupy.late(x) for x in xs], compression=compression)
    found = np.concatenate([x.memory.reshape(-1) for x in results])
    np.testing.assert_array_equal(found, expected)


def test_grouped_arrays_of_host_and_device(comm, cupy):
    large, small = np.ones(2000, np.float32), np.ones(3, np.float32)
    for one in (large, small) if comm.size > 1 else ():
        mine = [cupy.late(one), cupy.late(one)] if comm.rank else [one, one]
        with pytest.raises(cc.MismatchError, match="memory is absent on rank 0, device on"):
            comm.grouped_allreduce(mine, op=cc.SUM)
    xs = [cupy.late(large), large]  # of both kinds, on all ranks
    for x, result in zip(xs, comm.grouped_allreduce(xs, op=cc.SUM), strict=True):
        assert type(result) is type(x)
        assert (np.asarray(getattr(result, "memory", result)) == comm.size).all()
    hosts = [np.zeros_like(large) for _ in range(2)]
    there = [cupy.late(large), cupy.late(large)]
    assert comm.grouped_allreduce(there, op=cc.SUM, out=hosts)[1] is hosts[1]
    assert (hosts[0] == comm.size).all()
    with pytest.raises(ValueError, match="out must have an array for each"):
        comm.grouped_allreduce(there, out=hosts[:1])
    with pytest.raises(ValueError, match="out has the wrong shape"):
        comm.grouped_allreduce(there, out=[there[0], cupy.late(small)])
    halves = comm.grouped_allreduce(there, op=cc.SUM, prescale=0.5)
    assert (halves[1].memory == comm.size / 2).all()


@pytest.mark.parametrize("route", ROUTES)
def test_host_and_device_in_one_call_are_an_error_on_all_ranks(comm, cupy, route):
    on(comm, route)
    values = np.ones(5000, np.float32)
    for run in (lambda x: comm.allreduce(x, op=cc.SUM), lambda x: comm.broadcast(x, 0)):
        if comm.size > 1:
            with pytest.raises(cc.MismatchError, match="memory is device on rank 0.*absent"):
                run(values if comm.rank else cupy.late(values))
        assert run(values)[0] in (1, comm.size)
        assert run(cupy.late(values)).memory[0] in (1, comm.size)


@pytest.mark.parametrize("out", ["new", "same", "other"])
def test_arrays_of_one_slice_are_found_again(world, cupy, monkeypatch, out):
    monkeypatch.setattr(staging, "SMALL_BYTES", 256)

    def check(comm):
        for count in (50, 1000):  # as the host's, and in a window
            made = 0
            for step in range(4):
                everyone = [np.arange(count, dtype=np.float32) + r + step for r in range(comm.size)]
                x = cupy.late(everyone[comm.rank])
                if step == 2 and comm.rank == 0:
                    x = cupy.array(np.repeat(everyone[0], 2))[::2]  # takes the long way
                to = {"new": None, "same": x, "other": cupy.late(np.zeros(count, np.float32))}
                result = comm.allreduce(x, op=cc.SUM, out=to[out])
                assert result is to[out] or out == "new"
                np.testing.assert_array_equal(result.memory, np.sum(everyone, axis=0))
                if out != "same":
                    np.testing.assert_array_equal(x.memory, everyone[comm.rank])
                made = made or len(group_of(comm).plans)
                if count == 50 or (world.shared and comm.size > 1):
                    assert len(group_of(comm).plans) == made > 0
            if comm.size > 1 and count == 1000:
                x = cupy.late(np.ones(count, np.float32))
                with pytest.raises(cc.MismatchError, match="MAX on rank 1"):
                    comm.allreduce(x, op=cc.MAX if comm.rank == 1 else cc.SUM)
                with pytest.raises(cc.MismatchError, match="memory is device on rank 0.*absent"):
                    comm.allreduce(np.ones(count, np.float32) if comm.rank else x, op=cc.SUM)
                comm.allreduce(np.ones(count, np.float32), op=cc.SUM)  # of the host, likewise
                assert comm.allreduce(x, op=cc.SUM).memory[0] == comm.size
                wide = cupy.array(np.ones((count, 2), np.float32))
                with pytest.raises(ValueError, match="out has the wrong shape"):
                    comm.allreduce(x, op=cc.SUM, out=wide)
            group_of(comm).plans.clear()

    world.run(check)


def test_wrong_calls_are_refused_on_all_ranks(comm, cupy):
    x = cupy.late(np.ones(5000, np.float32))
    with pytest.raises(ValueError, match="unknown algorithm"):
        comm.allreduce(x, algorithm="star")
    with pytest.raises(ValueError, match="no such root"):
        comm.broadcast(x, comm.size)
    with pytest.raises(TypeError, match="MEAN of int32 is not defined"):
        comm.allreduce(cupy.late(np.ones(5000, np.int32)))
    with pytest.raises(ValueError, match="out has the wrong shape"):
        comm.allreduce(x, out=cupy.late(np.ones(6000, np.float32)))
    assert (comm.allreduce(x, op=cc.SUM).memory == comm.size).all()


def test_pinned_memory_is_bounded_and_given_back(world, cupy):
    def check(comm):
        for _ in range(20):
            comm.allreduce(cupy.late(np.ones(50_000, np.float32)))
        comm.barrier()
        most = staging.WINDOWS * SLICE
        assert sum(cupy.registered.values()) <= comm.size * most
        assert all(n <= most for n in cupy.registered.values())
        if comm.size > 1:  # where ranks share memory, the device copies to and from there
            assert bool(cupy.registered) is world.shared
        comm.barrier()

    world.run(check)
    assert not cupy.registered
