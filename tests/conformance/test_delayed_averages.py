"""Delayed averages: as one process that applies the gradients of all ranks a step later."""

from __future__ import annotations

import copy
import tempfile

import numpy as np
import pytest
from fronts import Arrays, Torch

import collectives as cc
import strategies
from requirements import installed
from strategies.checkpoint import Saver
from strategies.optimizers import SGD

STEPS = 7
SHAPES = [(3, 2), (5,), ()]
FRONTS = {"arrays": Arrays, "torch": Torch}


@pytest.fixture(params=FRONTS)
def front(request):
    return FRONTS[request.param]


def starts():
    return [np.full(shape, 1 + i, np.float32) for i, shape in enumerate(SHAPES)]


def gradients_of(values, rank, step):
    """Of the second variable on some ranks or on none."""
    random = np.random.default_rng([19, rank, step])
    return [
        None if i == 1 and (step % 3 == 0 or rank == 0)
        else (random.standard_normal(np.shape(x)) + x / 4).astype(np.float32)
        for i, x in enumerate(values)
    ]  # fmt: skip


def advance(own, rank, step, **told):
    own.step(gradients_of(own.values, rank, step), **told)


def weighted(gradients, weights):
    """Mean of all ranks' gradients; one that is missing counts as zero, unless all are."""
    known = [(g, w) for g, w in zip(gradients, weights, strict=True) if g is not None]
    total = sum(np.float64(w) * g for g, w in known)
    return np.asarray(total / sum(weights), np.float32) if known else None


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("examples", [False, True], ids=["equal ranks", "examples"])
def test_equals_one_process_that_is_a_step_behind(comm, front, kind, examples):
    own, alone, last = front(comm, kind, starts(), delay=1), front(None, kind, starts()), None
    weights = [1 + rank for rank in range(comm.size)] if examples else [1] * comm.size
    for step in range(STEPS):
        ranks = [gradients_of(alone.values, rank, step) for rank in range(comm.size)]
        if last is not None:
            alone.step(last)
        last = [weighted(each, weights) for each in zip(*ranks, strict=True)]
        advance(own, comm.rank, step, **({"examples": weights[comm.rank]} if examples else {}))
        for value, exact in zip(own.values, alone.values, strict=True):
            # `size + 3` roundings of numbers below 8 per step; a step of Adam is at most 0.01
            # times a ratio of means, which differ by as little.
            bound = STEPS * (comm.size + 3) * 8 * 2.0**-24
            np.testing.assert_allclose(value, exact, rtol=0, atol=bound)
            everyones = comm.allgather(value[np.newaxis])
            np.testing.assert_array_equal(everyones, np.broadcast_to(value, everyones.shape))


@pytest.mark.parametrize("stop", [1, 4])
def test_a_checkpoint_resumes_to_the_same_bits(comm, front, stop):
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    whole, first, second = (front(comm, "adam", starts(), delay=1) for _ in range(3))
    for step in range(STEPS):
        advance(whole, comm.rank, step)
    for step in range(stop):
        advance(first, comm.rank, step)
        advance(second, comm.rank, step + 1)  # in flight when the state is replaced
    Saver(strategies.CheckpointManager(folder, comm=comm), **first.things()).save(stop)
    Saver(strategies.CheckpointManager(folder, comm=comm), **second.things()).restore()
    for step in range(stop, STEPS):
        advance(second, comm.rank, step)
    for value, exact in zip(second.values, whole.values, strict=True):
        np.testing.assert_array_equal(value, exact)


def test_a_state_without_means_applies_nothing_at_first(comm, front):
    own, alone = front(comm, "sgd", starts(), delay=1), front(None, "sgd", starts())
    advance(own, comm.rank, 0)
    own.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
    advance(own, comm.rank, 1)
    for value, start in zip(own.values, starts(), strict=True):
        np.testing.assert_array_equal(value, start)


def test_averages_are_clipped_when_they_are_applied(comm):
    optimizer = strategies.DistributedOptimizer(
        SGD(1.0), comm=comm, delay=1, clip_global_norm=1.0, compression=cc.FP16.with_feedback()
    )
    a, b = np.zeros(2, np.float32), np.zeros(1, np.float32)
    for _ in range(3):
        optimizer.apply_gradients([([3, 0], a), ([4], b)])
    np.testing.assert_allclose([*a, *b], [-1.2, 0, -1.6], rtol=1e-6)
    optimizer.close()
    optimizer.apply_gradients([([0, 0], a), ([0], b)])
    np.testing.assert_allclose([*a, *b], [-1.8, 0, -2.4], rtol=1e-6)


def test_an_error_of_one_rank_is_raised_on_all_and_the_last_means_stay(comm):
    optimizer = strategies.DistributedOptimizer(SGD(1.0), comm=comm, delay=1)
    w, last = np.zeros(3), comm.rank == comm.size - 1
    optimizer.apply_gradients([(np.ones(3), w)])
    with pytest.raises(ValueError, match=r"expected \(3,\), got \(4,\)"):
        optimizer.apply_gradients([(np.ones(4 if last else 3), w)])
    np.testing.assert_array_equal(w, 0)
    optimizer.apply_gradients([(np.full(3, 2.0), w)])
    np.testing.assert_array_equal(w, -1)
    optimizer.apply_gradients([(np.ones(3), w)])
    np.testing.assert_array_equal(w, -3)


def test_a_variable_may_come_later(comm):
    optimizer = strategies.DistributedOptimizer(SGD(1.0), comm=comm, delay=1)
    a, b = (strategies.Variable(np.zeros(2), name=name) for name in "ab")
    for variables in ([a], [a, b], [b, a], [a]):
        optimizer.apply_gradients([(np.ones(2), v) for v in variables])
    np.testing.assert_array_equal([a.value, b.value], [[-3, -3], [-1, -1]])


def test_what_needs_the_averages_of_this_step_is_refused(comm):
    torch = installed("torch")
    own = Torch(comm, "sgd", starts(), delay=1)
    with pytest.raises(ValueError, match="expected no closure"):
        own.optimizer.step(lambda: None)
    with pytest.raises(ValueError, match="expected steps with examples=0"):
        own.optimizer.join()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(own.variables[0].sum()).backward()
    with pytest.raises(ValueError, match="the averages have the scale of the last step"):
        scaler.step(own.optimizer)
    optimizer = strategies.DistributedOptimizer(SGD(1.0), comm=comm, delay=1)
    rows = strategies.Rows([0], np.ones((1, 2)))
    with pytest.raises(ValueError, match="delay is for dense gradients, got a sparse one"):
        optimizer.apply_gradients([(rows, np.zeros((3, 2)))])
    with pytest.raises(ValueError, match="a compiled step waits for its averages, .* got Gradient"):
        strategies.DistributedOptimizer(installed("optax").sgd(1.0), comm=comm, delay=1)
