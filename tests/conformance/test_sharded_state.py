"""Sharded optimizer state: as without sharding, in a P-th of the memory."""

from __future__ import annotations

import copy
import math
import tempfile

import numpy as np
import pytest
from fronts import Arrays, Torch

import collectives as cc
import strategies
from requirements import installed
from strategies.averaging.sharded_buckets import box_of
from strategies.checkpoint import Saver, Slice
from strategies.checkpoint.boxes import check_tiles, overlap
from strategies.optimizers import LARS, SGD

STEPS = 6
SHAPES = [(6, 4), (2, 9), (1, 1), (7,), (), (0, 3)]


def starts():
    random = np.random.default_rng(3)
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def gradients_of(values, rank, step):
    """Float32, of which every third is missing on one rank, and one on all."""
    random = np.random.default_rng([17, rank, step])
    return [
        None if i == 3 or (i + step) % 3 == rank == 1
        else (random.standard_normal(np.shape(x)) + x).astype(np.float32)
        for i, x in enumerate(values)
    ]  # fmt: skip


def made(front, comm, kind, **options):
    own = front(comm, kind, starts(), **options)
    if front is Torch:
        own.optimizer.param_groups[1]["lr"] = 0.02
    return own


def advance(own, rank, step, **told):
    own.step(gradients_of(own.values, rank, step), **told)


KINDS = ["momentum", "adam", "adamw"]
FRONTS = {"arrays": Arrays, "torch": Torch}


@pytest.fixture(params=FRONTS)
def front(request):
    return FRONTS[request.param]


def assert_alike(comm, values, expected):
    for own, exact in zip(values, expected, strict=True):
        # Sums of `size` float32 numbers in another order, in 6 steps; Adam divides by means down
        # to a tenth of them.
        np.testing.assert_allclose(own, exact, rtol=0, atol=STEPS * comm.size * 10 * 2.0**-22)
        everyones = comm.allgather(own[np.newaxis])
        np.testing.assert_array_equal(everyones, np.broadcast_to(own, everyones.shape))


@pytest.mark.parametrize("size", range(1, 6))
def test_parts_tile_every_array(size):
    for shape in [*SHAPES, (3, 1, 8), (1, 2, 3), (4,)]:
        boxes = [box_of(shape, rank, size) for rank in range(size)]
        check_tiles(shape, boxes if shape else boxes[:1])
        if shape:
            assert all(overlap(a, b) is None for a in boxes for b in boxes if a is not b)
            # Even along an axis of at least as many rows.
            sizes = [box.size for box in boxes]
            extent = min((n for n in shape if n >= size), default=max(shape))
            assert max(sizes) - min(sizes) <= math.prod(shape) / extent or 0 in shape


OPTIONS = {
    "plain": {}, "clipped": {"clip_global_norm": 1.0}, "sum": {"op": cc.SUM},
    "split": {"gradient_predivide_factor": 2.0}, "passes": {"backward_passes_per_step": 2},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("examples", [False, True], ids=["equal ranks", "examples"])
def test_steps_equal_those_without_sharding(comm, front, kind, options, examples):
    told = {"examples": 3 + comm.rank} if examples and options != "sum" else {}
    whole = made(front, comm, kind, **OPTIONS[options])
    own = made(front, comm, kind, shard_state=True, **OPTIONS[options])
    for step in range(STEPS):
        advance(whole, comm.rank, step, **told)
        advance(own, comm.rank, step, **told)
    assert_alike(comm, own.values, whole.values)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_each_rank_holds_a_part_of_the_state(comm, front, kind):
    own = made(front, comm, kind, shard_state=True)
    advance(own, comm.rank, 0)
    numbers = sum(x.array.nbytes for x in own.slots() if isinstance(x, Slice))
    every = comm.allgather(np.array([numbers]))
    slots = {"momentum": 1, "adam": 3 if front is Torch else 2}[kind]
    # Of all but the variable without a gradient, and the one without axes, which is on every rank.
    whole = 4 * slots * sum(math.prod(s) for i, s in enumerate(SHAPES) if i != 3 and s)
    assert every.sum() == whole
    # A part of each of four arrays more or less, along their longest axis.
    assert every.max() <= whole / comm.size + 4 * slots * (4 + 2 + 1)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_a_checkpoint_resumes_with_fewer_ranks_and_without_sharding(comm, front, kind):
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    own = made(front, comm, kind, shard_state=True)
    for step in range(3):
        advance(own, comm.rank, step)
    with strategies.CheckpointManager(folder, comm=comm, sharded=True) as checkpoints:
        Saver(checkpoints, **own.things()).save(3)

    def resumed(some, **options):
        """All ranks of a group go on with the gradients of rank 0."""
        own = made(front, some, kind, **options)
        if some.size > 1:
            advance(own, 0, 0)  # its state is replaced
        with strategies.CheckpointManager(folder, comm=some, sharded=True) as checkpoints:
            saver = Saver(checkpoints, **own.things())
            assert saver.restore() == 3
        for step in range(3, STEPS):
            advance(own, 0, step)
        return [x.copy() for x in own.values]

    same, alone = resumed(comm, shard_state=True), resumed(comm)
    half = comm.split(comm.rank * 2 // comm.size)
    fewer = resumed(half, shard_state=True)
    half.close()
    for other in (alone, fewer):
        assert_alike(comm, same, other)


def test_a_state_without_sharding_is_cut(comm, front):
    whole, own = made(front, comm, "adam"), made(front, comm, "adam", shard_state=True)
    for step in range(3):
        advance(whole, comm.rank, step)
    for variable, x in zip(own.values, whole.values, strict=True):
        variable[...] = x
    own.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    for step in range(3, STEPS):
        advance(whole, comm.rank, step)
        advance(own, comm.rank, step)
    assert_alike(comm, own.values, whole.values)


def test_schedules_and_states_before_the_wrapper_count(comm):
    torch = installed("torch")
    whole, own = made(Torch, comm, "adam"), made(Torch, None, "adam")
    advance(own, 0, 0)
    for variable, x in zip(whole.values, own.values, strict=True):
        variable[...] = x
    whole.optimizer.load_state_dict(copy.deepcopy(own.optimizer.state_dict()))
    own.optimizer = strategies.DistributedOptimizer(own.optimizer, comm=comm, shard_state=True)
    schedules = [torch.optim.lr_scheduler.StepLR(x.optimizer, 2, 0.1) for x in (whole, own)]
    for step in range(1, STEPS):
        for each, schedule in zip((whole, own), schedules, strict=True):
            advance(each, comm.rank, step)
            schedule.step()
    assert own.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert_alike(comm, own.values, whole.values)


def test_a_closure_computes_the_gradients(comm):
    own = made(Torch, comm, "momentum", shard_state=True)

    def closure():
        loss = sum((v * (comm.rank + 1)).sum() for v in own.variables)
        loss.backward()
        return loss

    assert own.optimizer.step(closure) is not None
    mean = (comm.size + 1) / 2
    # The first step of Nesterov's momentum is 1 + 0.9 gradients.
    for i, (value, start) in enumerate(zip(own.values, starts(), strict=True)):
        rate = 0.1 if i < 2 else 0.02
        np.testing.assert_allclose(value, start - rate * 1.9 * mean, rtol=1e-5, atol=1e-6)


REFUSED = {
    "lars": (lambda: LARS(0.1), "expected an elementwise optimizer, .* got LARS"),
    "other": (lambda: type("Own", (), {"apply_gradients": None})(), "has no apply_gradients"),
    "lbfgs": (
        lambda: installed("torch").optim.LBFGS([installed("torch").zeros(2)]),
        "elementwise optimizer of torch.optim, one of ASGD .* got torch.optim.lbfgs.LBFGS",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_that_are_not_elementwise_are_refused(comm, case):
    make, words = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=words):
        strategies.DistributedOptimizer(make(), comm=comm, shard_state=True)


def test_what_needs_whole_averages_is_refused(comm, front):
    own = made(front, comm, "momentum", shard_state=True)
    advance(own, comm.rank, 0)
    with pytest.raises(ValueError, match="expected steps with examples=0"):
        own.optimizer.join()
    with pytest.raises(ValueError, match="of a dead rank is lost"):
        own.optimizer.rebind(comm)
    if front is Torch:
        torch = installed("torch")
        with pytest.raises(ValueError, match="expected clip_global_norm= for clipping"):
            own.optimizer.synchronize()
        with pytest.raises(ValueError, match="the parameters must not change"):
            own.optimizer.add_param_group({"params": [torch.zeros(2)]})
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(own.variables[0].sum()).backward()
        with pytest.raises(ValueError, match="a loss scaler looks for infinities in all"):
            scaler.step(own.optimizer)
    else:
        pairs = [(np.ones(2, np.float32), np.zeros(2, np.float32))]
        with pytest.raises(ValueError, match="expected the parameters of the first step, got 1"):
            own.optimizer.apply_gradients(pairs)
        advance(own, comm.rank, 1)
        optimizer = strategies.DistributedOptimizer(SGD(1.0), comm=comm, shard_state=True)
        rows = strategies.Rows([0], np.ones((1, 2)))
        with pytest.raises(ValueError, match="shard_state is for dense gradients, got a sparse"):
            optimizer.apply_gradients([(rows, np.zeros((3, 2)))])
