"""Clipping by the norm of all ranks' gradients."""

import math

import numpy as np
import pytest

import collectives as cc
from strategies import Rows
from strategies.optimizers import clip_by_global_norm


def of(rank, dtype=np.float32):
    """Return the gradients of a rank: another number of them on each."""
    rng = np.random.default_rng(50 + rank)
    return [rng.standard_normal((rank + 3, 5)).astype(dtype) for _ in range(rank + 1)]


def test_the_norm_is_that_of_all_gradients_joined(world):
    def clip(comm):
        gradients = of(comm.rank)
        clipped, norm = clip_by_global_norm(gradients, 0.5, comm)
        joined = [g.astype(np.float64).ravel() for r in range(comm.size) for g in of(r)]
        expected = np.linalg.norm(np.concatenate(joined))
        assert norm == pytest.approx(expected, rel=1e-14)
        for new, old in zip(clipped, gradients, strict=True):
            np.testing.assert_allclose(new, old * (0.5 / expected), rtol=1e-6)
        norms = comm.allgather(np.array([norm]))
        assert np.all(norms == norm)  # to the last bit
        return norm

    assert len(set(world.run(clip))) == 1


def test_scaled_gradients_average_to_the_scaled_average(comm):
    gradient = np.full(8, comm.rank + 1.0)
    (clipped,), norm = clip_by_global_norm([gradient], 1.0, comm)
    total = comm.allreduce(clipped, op=cc.SUM)
    np.testing.assert_allclose(total, comm.size * (comm.size + 1) / 2 / norm, rtol=1e-14)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_infinity_or_nan_on_one_rank_is_seen_by_all(comm, bad):
    gradient = np.full(3, 1e6)
    if comm.rank == comm.size - 1:
        gradient[1] = bad
    (clipped,), norm = clip_by_global_norm([gradient], 1.0, comm)
    assert clipped is gradient
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


def test_squares_that_overflow_on_some_ranks(comm):
    gradients = [np.full(4, 1e200)] if comm.rank == 0 else [np.full(4, 3.0)]
    (clipped,), norm = clip_by_global_norm(gradients, 2.0, comm)
    assert norm == pytest.approx(2e200, rel=1e-14)
    np.testing.assert_allclose(clipped, gradients[0] * 1e-200, rtol=1e-14)


def test_ranks_without_gradients_and_with_rows(comm):
    gradients = [Rows([1, 1], np.array([[1.0], [3.0]])), None] if comm.rank == 0 else []
    clipped, norm = clip_by_global_norm(gradients, 2.0, comm)
    assert norm == 4
    assert len(clipped) == len(gradients)
    if clipped:
        np.testing.assert_array_equal(clipped[0].values, [[2.0]])


@pytest.mark.parametrize("mistake", ["kind", "limit"])
def test_wrong_use_on_one_rank_is_an_error_on_all(comm, mistake):
    last = comm.rank == comm.size - 1
    gradients = [np.ones(2), [1.0] if last and mistake == "kind" else np.ones(2)]
    limit = -1.0 if last and mistake == "limit" else 1.0
    error = TypeError if mistake == "kind" else ValueError
    with pytest.raises(error, match="clip_by_global_norm") as caught:
        clip_by_global_norm(gradients, limit, comm)
    assert ("position 1" if mistake == "kind" else "max_norm") in str(caught.value)
    assert last or f"rank {comm.size - 1}" in str(caught.value)
    assert clip_by_global_norm([np.ones(1)], 1.0, comm)[1] == pytest.approx(comm.size**0.5)


@pytest.mark.several
def test_ranks_that_differ_in_the_limit(comm):
    with pytest.raises(ValueError, match="ranks differ in max_norm"):
        clip_by_global_norm([np.ones(2)], 1.0 + (comm.rank == 1), comm)
    comm.barrier()
