"""Grouped calls of arrays on a real device, packed there."""

import numpy as np
import pytest

import collectives as cc
import inprocess

pytestmark = pytest.mark.gpu

SHAPES = [(300, 7), (0, 2), (2_000_000,), (1,), (123_457,), (5, 5, 5)]


@pytest.mark.parametrize("out", ["new", "same"])
@inprocess.on_ranks(3, mode="synchronous", timeout=60)
def test_cupy(comm, cupy, out):
    for step in range(3):
        with cupy.cuda.Stream(non_blocking=True):
            xs = [cupy.zeros(shape, np.float32 if i % 2 else np.int64) for i, shape in
                  enumerate(SHAPES)]  # fmt: skip
            for x in xs:
                for _ in range(20):
                    x += step + comm.rank  # still under way when the call begins
            results = comm.grouped_allreduce(xs, op=cc.SUM, out=xs if out == "same" else None)
        expected = sum(20 * (step + rank) for rank in range(comm.size))
        for x, result in zip(xs, results, strict=True):
            assert (result is x) is (out == "same")
            assert (result.shape, result.dtype) == (x.shape, x.dtype)
            assert bool((result == expected).all())


@pytest.mark.parametrize("out", ["new", "same"])
@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16", "float32", "int64")])
@inprocess.on_ranks(2, mode="synchronous", timeout=60)
def test_tensors(comm, torch, out, dtypes):
    for step in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            xs = [
                torch.zeros(shape, device="cuda", dtype=getattr(torch, dtypes[i % len(dtypes)]))
                for i, shape in enumerate(SHAPES)
            ]
            for x in xs:
                for _ in range(10):
                    x += step + comm.rank
            results = comm.grouped_allreduce(xs, op=cc.SUM, out=xs if out == "same" else None)
            expected = sum(10 * (step + rank) for rank in range(comm.size))
            for x, result in zip(xs, results, strict=True):
                assert (result is x) is (out == "same")
                assert (result.shape, result.dtype, result.device) == (
                    x.shape,
                    x.dtype,
                    x.device,
                )
                assert bool((result == expected).all())


@inprocess.on_ranks(2, mode="synchronous", timeout=60)
def test_results_are_the_caller_s_own(comm, torch):
    """What is freed may be given to the next call, but what is held may not."""
    xs = [torch.full((1_000_000,), float(comm.rank + 1), device="cuda") for _ in range(3)]
    first = comm.grouped_allreduce(xs, op=cc.SUM)
    for _ in range(5):
        second = comm.grouped_allreduce([-x for x in xs], op=cc.SUM)
    total = comm.size * (comm.size + 1) / 2
    assert all(bool((x == total).all()) for x in first)
    assert all(bool((x == -total).all()) for x in second)
