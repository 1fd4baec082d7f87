"""Buckets on a real device: packed there, reduced, and back as views of the same memory."""

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import inprocess
import strategies

pytestmark = pytest.mark.gpu

SIZES = [(300, 7), (0, 2), (2_000_000,), (1,), (123_457,), (5, 5, 5)]
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def values_of(rank, step, dtype):
    """Multiples of 12, of few bits, which 1 to 4 ranks divide exactly."""
    random = np.random.default_rng([rank, step])
    return [(12 * random.integers(-4, 4, shape)).astype(dtype) for shape in SIZES]


def means(size, step, dtype):
    every = zip(*(values_of(rank, step, dtype) for rank in range(size)), strict=True)
    wide = np.result_type(dtype, np.float64)
    return [np.mean(np.array(arrays, wide), axis=0).astype(dtype) for arrays in every]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_cupy(cupy, size, dtype, scale):
    def check(comm):
        like = [cupy.asarray(x) for x in values_of(0, 0, dtype)]
        with comm.plan_buckets(like, bucket_bytes=4 << 20) as buckets:
            for step in range(3):
                given = [cupy.asarray(x) for x in values_of(comm.rank, step, dtype)]
                results = buckets.allreduce(given, scale=scale)
                expected = means(size, step, dtype)
                for result, view, wanted in zip(results, buckets.views, expected, strict=True):
                    assert result is view
                    np.testing.assert_array_equal(result.get(), (wanted * scale).astype(dtype))

    inprocess.run_ranks(size, check, "synchronous", timeout=60)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_tensors(torch, dtype, scale):
    def tensors(rank, step):
        wide = values_of(rank, step, np.float32)
        return [torch.from_numpy(x).cuda().to(getattr(torch, dtype)) for x in wide]

    def check(comm):
        with comm.plan_buckets(tensors(0, 0), bucket_bytes=4 << 20) as buckets:
            for step in range(3):
                with torch.cuda.stream(torch.cuda.Stream()):
                    results = buckets.allreduce(tensors(comm.rank, step), scale=scale)
                for result, view, wanted in zip(
                    results, buckets.views, means(2, step, np.float32), strict=True
                ):
                    assert result.data_ptr() == view.data_ptr()
                    assert result.dtype == getattr(torch, dtype)
                    np.testing.assert_array_equal(result.float().cpu().numpy(), wanted * scale)

    inprocess.run_ranks(2, check, "synchronous", timeout=60)


@inprocess.on_ranks(2, mode="synchronous", timeout=60)
def test_tensors_that_become_ready_one_after_the_other(comm, torch):
    like = [torch.zeros(n, device="cuda") for n in (1000, 3_000_000, 7)]
    with comm.plan_buckets(like) as buckets:
        for step in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                for i, view in enumerate(buckets.views):
                    view.zero_()
                    for _ in range(20):
                        view += step + comm.rank  # still under way when it is ready
                    buckets.ready(i)
                for result in buckets.wait():
                    assert bool((result == 20 * (step + 0.5)).all())


@pytest.mark.parametrize("overlap", [False, True])
@inprocess.on_ranks(2, mode="synchronous", timeout=60)
def test_gradients_of_a_model_are_views_of_buckets(comm, torch, overlap):
    w = torch.nn.Parameter(torch.zeros(1_000_000, device="cuda"))
    b = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD([w, b], lr=1.0),
        named_parameters=[("w", w), ("b", b)],
        comm=comm,
        overlap=overlap,
    )
    places = set()
    for step in range(3):
        optimizer.zero_grad()
        ((comm.rank + step) * (w.sum() + b.sum())).backward()
        optimizer.step()
        places.add(w.grad.data_ptr())
    assert len(places) == 1
    assert bool((w == -(0.5 + 1.5 + 2.5)).all())
    assert bool((b == -(0.5 + 1.5 + 2.5)).all())
    optimizer.close()


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_the_kernels_scale_as_float32(cupy, half):
    from collectives.arrays.device import Device, DeviceBuffer
    from collectives.kernels import cuda

    values = np.random.default_rng(5).standard_normal(1000).astype(half)
    source, out = (cupy.asarray(x.view(np.uint16)) for x in (values, np.zeros(1100, half)))
    packed = DeviceBuffer(Device(cupy, out.device), out, half)
    cuda.PackKernel()(packed, [(source.data.ptr, 50, 1000)], 0.3)
    expected = np.zeros(1100, half)
    expected[50:1050] = (values.astype(np.float32) * np.float32(0.3)).astype(half)
    np.testing.assert_array_equal(out.get(), expected.view(np.uint16))


@inprocess.on_ranks(3, mode="synchronous", timeout=60)
def test_compression_rounds_a_bucket_on_its_device(comm, cupy):
    like = [cupy.zeros(n, np.float32) for n in (1_000_000, 17)]
    with comm.plan_buckets(like, compression=cc.FP16) as buckets:
        for result in buckets.allreduce([x + comm.rank for x in like]):
            assert bool((result == (comm.size - 1) / 2).all())
