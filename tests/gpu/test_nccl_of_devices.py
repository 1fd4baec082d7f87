"""NCCL on real devices: a rank on each of them, as many as there are."""

from pathlib import Path

import numpy as np
import pytest

import collectives as cc
import inprocess
import oracle
from launcher import mpirun
from requirements import require

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("nccl_program.py")
DTYPES = [dtype for dtype in oracle.DTYPES if dtype.kind not in "bc" and dtype.itemsize != 2]
DTYPES = [dtype for dtype in DTYPES if dtype.name not in ("int16", "uint16")]


@pytest.fixture
def nccl(cupy):
    from cupy.cuda import nccl

    if not nccl.available:
        require("gpu", "CuPy finds no NCCL")
    return nccl


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 300_001])
@inprocess.on_ranks(1, timeout=60)
def test_one_rank_gets_what_it_brings(comm, cupy, nccl, dtype, count):
    values = oracle.data(0, (count,), dtype)
    x = cupy.asarray(values)
    for result in (
        comm.allreduce(x, op=cc.SUM, algorithm="nccl"),
        comm.allreduce(x, op=cc.SUM, algorithm="nccl", out=x),
        comm.broadcast(x, algorithm="nccl"),
    ):
        assert isinstance(result, cupy.ndarray)
        np.testing.assert_array_equal(result.get(), values)


@inprocess.on_ranks(1, timeout=60)
def test_what_the_stream_still_computes_comes_first(comm, cupy, nccl):
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.zeros(1 << 26, np.float32)
        for _ in range(20):
            x += 1
        assert bool((comm.allreduce(x, op=cc.SUM, algorithm="nccl") == 20).all())


@inprocess.on_ranks(1, timeout=60)
def test_a_tensor_goes_the_same_way(comm, torch, nccl):
    x = torch.arange(1000, device="cuda", dtype=torch.bfloat16)
    result = comm.allreduce(x, op=cc.MEAN, algorithm="nccl")
    assert (result.device, result.dtype) == (x.device, x.dtype)
    assert torch.equal(result, x)


@inprocess.on_ranks(2, timeout=60)
def test_two_ranks_on_one_gpu_are_told(comm, cupy, nccl):
    x = cupy.ones(1000, np.float32)
    with pytest.raises(ValueError, match="a GPU for each rank, got one for ranks 0, 1"):
        comm.allreduce(x, algorithm="nccl")
    assert bool((comm.allreduce(x, op=cc.SUM) == 2).all())


def test_ranks_of_a_job_each_on_a_gpu(cupy, nccl):
    devices = cupy.cuda.runtime.getDeviceCount()
    if devices < 2:
        pytest.skip("needs two devices")
    ranks = min(devices, 4)
    done = mpirun(ranks, PROGRAM, timeout=170)
    assert done.status == 0, done.stderr
    assert done.stdout.count("all as expected") == ranks
