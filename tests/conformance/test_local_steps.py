"""Local steps: as one process that makes the steps of all ranks, and averages their parameters."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
from fronts import Arrays, Compiled, Optax, Torch

import collectives as cc
import strategies
from conftest import UNDER_MPI
from requirements import installed
from strategies.checkpoint import PerRank, Saver
from strategies.optimizers import SGD, Momentum, Nesterov

STEPS = 12
SHAPES = [(3, 2), (5,), ()]


def starts():
    return [np.full(shape, 1 + i, np.float32) for i, shape in enumerate(SHAPES)]


def gradients_of(values, rank, step):
    """Multiples of 1/8, and a quarter of the values."""
    random = np.random.default_rng([13, rank, step])
    return [
        (random.integers(-8, 8, np.shape(x)) / 8 + np.asarray(x) / 4).astype(np.float32)
        for x in values
    ]


def made(front, *args, **options):
    return front(*args, starts(), **options)


def advance(own, rank, step):
    own.step(gradients_of(own.values, rank, step))


FRONTS = {"arrays": Arrays, "torch": Torch, "optax": Optax, "compiled": Compiled}
EVERY = {
    "1": 1, "4": 4, "post-local": lambda step: 1 + 3 * (step >= 4),
}  # fmt: skip


@pytest.fixture(params=FRONTS)
def front(request, world):
    if request.param == "compiled" and not UNDER_MPI and world.size > 1:
        pytest.skip("compiled programs of several ranks need a process for each")
    return FRONTS[request.param]


def simulated(front, size, every, inner, outer):
    """One process with the parameters of all ranks."""
    ranks = [made(front, None, inner, outer=outer) for _ in range(size)]
    anchors, slots, since = starts(), [0, 0, 0], 0
    for step in range(STEPS):
        for rank, own in enumerate(ranks):
            advance(own, rank, step)
        since += 1
        if since < (every(step) if callable(every) else every):
            continue
        since, each = 0, [own.values for own in ranks]
        for i, anchor in enumerate(anchors):
            mean = sum(anchor - values[i] for values in each) * np.float32(1 / size)
            slots[i] = 0.9 * slots[i] + mean
            change = mean if outer is None else 0.7 * (mean + 0.9 * slots[i])
            anchors[i] = np.asarray(anchor - change, np.float32)
        for own in ranks:
            own.assign(anchors)
    return [own.values for own in ranks]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("inner", ["sgd", "adam"])
@pytest.mark.parametrize("outer", [None, "nesterov"])
def test_equals_one_process_that_makes_the_steps_of_all_ranks(comm, front, every, inner, outer):
    expected = simulated(front, comm.size, EVERY[every], inner, outer)[comm.rank]
    own = made(front, comm, inner, outer=outer, sync_every=EVERY[every])
    for step in range(STEPS):
        advance(own, comm.rank, step)
    for value, exact in zip(own.values, expected, strict=True):
        if outer is None and comm.size <= 2 and front in (Arrays, Torch):
            # The same steps, and sums of at most two numbers, which have no order.
            np.testing.assert_array_equal(value, exact)
        # Per synchronization, `size + 6` roundings of numbers below 8; a step of Adam moves by at
        # most 0.01, and divides by means of gradients, which differ by as little.
        bound = 12 * (comm.size + 6) * 8 * 2.0**-24
        np.testing.assert_allclose(value, exact, rtol=0, atol=bound)


def test_all_ranks_have_the_same_bits_after_a_round(comm, front):
    own = made(front, comm, "adam", outer="nesterov", sync_every=4)
    for step in range(8):
        advance(own, comm.rank, step)
        same = [np.ptp(comm.allgather(x[np.newaxis]), axis=0).max() for x in own.values]
        # Optax adds an update to parameters that differ: exact for numbers of one magnitude.
        assert (max(same) <= 2.0**-22) == (step % 4 == 3 or comm.size == 1)


COMPRESSIONS = {
    "none": cc.NONE, "16": cc.FP16, "16 with feedback": cc.FP16.with_feedback, "8": cc.INT8,
    "8 with feedback": cc.INT8.with_feedback, "top-k": cc.TOPK(0.3),
    "top-k with feedback": cc.TOPK(0.3).with_feedback,
}  # fmt: skip


def compression_of(name):
    made = COMPRESSIONS[name]
    return made() if callable(made) else made


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("stop", [4, 6])
def test_a_state_of_any_step_resumes_to_the_same_bits(comm, front, compression, stop):
    if front in (Optax, Compiled):  # whose rounding errors are not part of the state
        compression = compression.split()[0]

    def new():
        chosen = compression_of(compression)
        options = {"sync_every": 4, "compression": chosen}
        return made(front, comm, "adam", outer="nesterov", **options)

    whole, first, second = new(), new(), new()
    for step in range(STEPS):
        advance(whole, comm.rank, step)
    for step in range(stop):
        advance(first, comm.rank, step)
    second.load(first.state())
    for step in range(stop, STEPS):
        advance(second, comm.rank, step)
    for value, exact in zip(second.values, whole.values, strict=True):
        np.testing.assert_array_equal(value, exact)


@pytest.mark.parametrize("bits", ["16", "16 with feedback", "8 with feedback"])
def test_differences_travel_with_few_bits(comm, front, bits):
    exact = made(front, comm, "sgd", sync_every=3)
    own = made(front, comm, "sgd", sync_every=3, compression=compression_of(bits))
    for step in range(STEPS):
        advance(exact, comm.rank, step)
        advance(own, comm.rank, step)
    for value, other in zip(own.values, exact.values, strict=True):
        # Differences below 4 are rounded twice per round; a quarter of an error is left after a
        # round, so that the errors of all rounds are at most 4/3 of the last.
        rounding = 2.0**-11 if bits.startswith("16") else 0.004
        np.testing.assert_allclose(value, other, rtol=0, atol=2 * 4 / 3 * 4 * rounding * 2)


def test_a_checkpoint_in_the_middle_of_a_round_holds_the_parameters_of_each_rank(comm):
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)

    def make():
        own = made(Arrays, comm, "adam", outer="nesterov", sync_every=4)
        checkpoints = strategies.CheckpointManager(folder, comm=comm)
        things = {"values": PerRank(own.variables), "optimizer": PerRank(own.optimizer)}
        return own, Saver(checkpoints, **things)

    whole, saver = make()
    for step in range(STEPS):
        advance(whole, comm.rank, step)
        if step == 5:
            saver.save(step)
    own, saver = make()
    assert saver.restore() == 5
    for step in range(6, STEPS):
        advance(own, comm.rank, step)
    for value, exact in zip(own.values, whole.values, strict=True):
        np.testing.assert_array_equal(value, exact)


def test_a_state_without_rounds_begins_one(comm):
    own = made(Arrays, comm, "adam", sync_every=4)
    alone = made(Arrays, None, "adam")
    for step in range(3):
        advance(own, 0, step)
        advance(alone, 0, step)
    own.load(alone.state())
    for step in range(3, 7):
        advance(own, 0, step)
        advance(alone, 0, step)
    # All ranks have made the same steps, whose mean is one of them up to the rounding of a sum.
    for value, exact in zip(own.values, alone.values, strict=True):
        np.testing.assert_allclose(value, exact, rtol=0, atol=comm.size * 2.0**-21)


def test_a_variable_may_come_in_the_middle_of_a_round(comm):
    optimizer = strategies.DistributedOptimizer(SGD(1.0), comm=comm, sync_every=2)
    a, b = (strategies.Variable(np.zeros(2, np.float32), name=name) for name in "ab")
    for variables in ([a], [a, b], [a, b], [a, b]):
        optimizer.apply_gradients([(np.full(2, -1.0 - comm.rank), v) for v in variables])
    mean = 1 + (comm.size - 1) / 2
    # The gradients of float64 are rounded to the dtype of their variables.
    np.testing.assert_allclose(a.value, 4 * mean, rtol=2.0**-22 * comm.size)
    np.testing.assert_allclose(b.value, 3 * mean, rtol=2.0**-22 * comm.size)


@pytest.mark.several
def test_ranks_that_differ_are_told_in_what(comm):
    last = comm.rank == comm.size - 1
    for key, values in {
        "sync_every": (2, None), "outer": (None, Nesterov(0.7)), "compression": (cc.NONE, cc.INT8),
    }.items():  # fmt: skip
        options = {"sync_every": 2, key: values[last]}
        with pytest.raises(cc.MismatchError, match=f"{key}=.* on rank 0, .*{key}=.* on rank"):
            strategies.DistributedOptimizer(SGD(1.0), comm=comm, **options)
    w = np.full(2, 1.0 + last)
    optimizer = strategies.DistributedOptimizer(SGD(1.0), comm=comm, sync_every=2)
    optimizer.apply_gradients([(w, w)])
    with pytest.raises(cc.MismatchError, match="differ in their parameters, .*call strategies.bro"):
        optimizer.apply_gradients([(w, w)])
    optimizer = strategies.DistributedOptimizer(SGD(0.1 * (1 + last)), comm=comm, sync_every=2)
    w = np.ones(2)
    optimizer.apply_gradients([(w, w)])
    with pytest.raises(cc.MismatchError, match="settings, learning_rate is 0.1 on rank 0, 0.2 on"):
        optimizer.apply_gradients([(w, w)])
    w = np.ones(2)
    optimizer = strategies.DistributedOptimizer(
        SGD(1.0), comm=comm, sync_every=lambda step: 1 if last else 2
    )
    optimizer.load_state_dict({"step": 0, "local_steps": {
        "step": 1, "since": 1, "anchors": {}, "feedback": [],
    }})  # fmt: skip
    with pytest.raises(cc.MismatchError, match="sync_every is 2.0 on rank 0, 1.0 on rank"):
        optimizer.apply_gradients([(w, w)])


def test_an_error_is_raised_at_once_here_and_by_all_ranks_at_the_end_of_the_round(comm):
    optimizer = strategies.DistributedOptimizer(SGD(1.0), comm=comm, sync_every=3)
    w, last = np.zeros(3), comm.rank == comm.size - 1
    optimizer.apply_gradients([(np.ones(3), w)])
    if last:
        with pytest.raises(ValueError, match=r"expected .*\(3,\), got .*\(4,\)"):
            optimizer.apply_gradients([(np.ones(4), w)])
    else:
        optimizer.apply_gradients([(np.ones(3), w)])
    with pytest.raises(ValueError, match=r"expected .*\(3,\), got .*\(4,\)"):
        optimizer.apply_gradients([(np.ones(3), w)])
    optimizer.apply_gradients([(np.ones(3), w)])  # the round ends here instead
    np.testing.assert_allclose(w, -4 + 1 / comm.size, rtol=1e-15 * comm.size)


@pytest.mark.several
def test_a_rank_without_data_takes_part_until_all_join(comm):
    optimizer = strategies.DistributedOptimizer(SGD(1.0), comm=comm, sync_every=2)
    w = np.zeros(2)
    for _ in range(4 if comm.rank else 2):
        optimizer.apply_gradients([(np.full(2, -1.0 - comm.rank), w)])
    optimizer.join()
    comm.broadcast(w, comm.size - 1, out=w)
    strategies.broadcast_optimizer_state(optimizer, comm.size - 1, comm=comm)
    # Two steps of all ranks, and from there two of ranks 1, 2, ... alone.
    size = comm.size
    expected = 2 * sum(range(1, size + 1)) / size + 2 * sum(range(2, size + 1)) / (size - 1)
    np.testing.assert_allclose(w, expected, rtol=1e-15 * size)
    optimizer.apply_gradients([(np.ones(2), w)])
    optimizer.apply_gradients([(np.ones(2), w)])
    np.testing.assert_allclose(w, expected - 2, rtol=1e-15 * size)


def test_pytorch_refuses_a_loss_scaler(comm):
    torch = installed("torch")
    own = made(Torch, comm, "sgd", sync_every=2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(own.variables[0].sum()).backward()
    with pytest.raises(ValueError, match="a loss scaler skips the steps of this rank alone"):
        scaler.step(own.optimizer)


def test_optax_needs_the_parameters(comm):
    own = made(Optax, comm, "sgd", sync_every=2)
    with pytest.raises(ValueError, match=r"expected update\(gradients, state, params\)"):
        own.tx.update(own.params, own.inside)


def test_a_loaded_state_belongs_to_its_parameters(comm):
    own = made(Arrays, comm, "sgd", sync_every=3)
    advance(own, 0, 0)
    state = own.optimizer.state_dict()
    for other in (np.zeros(2), np.zeros((2, 2))):
        optimizer = strategies.DistributedOptimizer(Momentum(1.0), comm=comm, sync_every=3)
        optimizer.load_state_dict({"step": 0, "local_steps": state["local_steps"]})
        with pytest.raises(ValueError, match="loaded state belongs to other parameters"):
            optimizer.apply_gradients([(other, strategies.Variable(other, name="v/1"))])
    with pytest.raises(ValueError, match="bad state of local steps, got no .'anchors'"):
        own.optimizer.load_state_dict(
            {"step": 0, "local_steps": {"step": 1, "since": 0, "feedback": []}}
        )
