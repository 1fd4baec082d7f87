"""Large arrays on a real device: kernels, slices, streams, and MPI that takes device memory."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives.arrays import staging
from collectives.calls.shared_settings import library_takes_device_memory
from collectives.core.settings import Settings
from collectives.kernels import half_loops
from launcher import mpirun

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("device_program.py")
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]

# Elements of float32: ten slices, and a rest.
MANY = 10 * (staging.SLICE_BYTES // 4) + 17


def buffer_of(cupy, values):
    from collectives.arrays.device import Device, DeviceBuffer

    array = cupy.asarray(values)
    return DeviceBuffer(Device(cupy, array.device), array, array.dtype)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("feedback", [False, True])
def test_kernels_give_the_host_s_bits(cupy, half, wide, feedback):
    from collectives.kernels import cuda

    bits = np.random.default_rng(3).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    with np.errstate(all="ignore"):
        values = bits.view(np.float32).astype(wide)
        values[:1000] = np.arange(1000) * wide(2.0**-25)  # subnormals and ties
    # Without a rest in between, so that subnormal numbers come alone, too.
    some = np.resize(np.array([1e-3, 0], wide), values.size)
    left = [some.copy() if feedback else None for _ in range(2)]
    there = None if left[0] is None else buffer_of(cupy, left[0])
    expected = np.empty(values.size, half)
    for divisor in (1, 3):
        half_loops.narrow(values, expected, divisor=divisor, residual=left[1])
        got = cuda.narrow(buffer_of(cupy, values), half, divisor=divisor, residual=there)
        np.testing.assert_array_equal(got.view.get(), expected.view(np.uint16))
        if there is not None:
            np.testing.assert_array_equal(there.view.get().view(np.uint8), left[1].view(np.uint8))
        back, wanted = buffer_of(cupy, np.empty(values.size, wide)), np.empty(values.size, wide)
        cuda.widen(got, back)
        half_loops.widen(expected, wanted)
        np.testing.assert_array_equal(back.view.get().view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("shared", ["/dev/shm", None])
@pytest.mark.parametrize("compression", [cc.NONE, cc.FP16, cc.BF16], ids=str)
def test_slices_pass_while_the_device_still_computes(cupy, shared, compression):
    def check(comm):
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(MANY, np.float32)
            for _ in range(50):
                x += 1  # still under way when the operation begins
            result = comm.allreduce(x, op=cc.SUM, compression=compression)
        with cupy.cuda.Stream(non_blocking=True):  # complete for any stream
            assert bool((result == 50 * comm.size).all())
        assert comm.broadcast(x, 0, out=x) is x
        assert bool((x == 50).all())

    settings = Settings(timeout=60, shared_memory=shared)
    inprocess.run_ranks(3, check, "synchronous", timeout=60, settings=settings)


@inprocess.on_ranks(2, mode="synchronous", timeout=60)
def test_the_caller_s_next_work_sees_the_result(comm, cupy):
    x = cupy.ones(MANY, np.float32)
    for _ in range(10):
        comm.allreduce(x, op=cc.MEAN, out=x)
        x += 1
    assert bool((x == 11).all())


@inprocess.on_ranks(2, mode="synchronous", timeout=60)
def test_asynchronous_operations_come_after_what_computes_their_arrays(comm, cupy):
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.zeros(MANY, np.float32)
        for _ in range(50):
            x += 1
        request = comm.allreduce_async(x, op=cc.SUM)
    assert bool((request.wait() == 50 * comm.size).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "complex64"])
@inprocess.on_ranks(2, mode="synchronous", timeout=60)
def test_tensors_of_torch_pass_in_slices(comm, torch, dtype):
    kind = getattr(torch, dtype)
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros(MANY, device="cuda", dtype=kind)
        for _ in range(20):
            x += 1
        result = comm.allreduce(x, op=cc.SUM)
        assert comm.broadcast(x, 0, out=x) is x
    assert (result.device, result.dtype) == (x.device, kind)
    assert bool((result == 20 * comm.size).all())
    wide = torch.zeros(MANY, 2, device="cuda", dtype=kind)
    comm.allreduce(x, op=cc.SUM, out=wide[:, 0])
    assert bool((wide[:, 0] == 20 * comm.size).all())
    assert not bool(wide[:, 1].any())


@pytest.mark.parametrize("aware", ["off", "on"])
def test_ranks_of_a_job_share_the_devices_there_are(cupy, aware):
    if aware == "on" and not library_takes_device_memory():
        pytest.skip("this MPI library does not take device memory")
    for size in (2, 3):
        done = mpirun(size, PROGRAM, timeout=110, UNISONO_CUDA_AWARE=aware)
        assert done.status == 0, done.stderr
        assert done.stdout.count("all as expected") == size
