"""Gossip: as one process that makes the steps of all ranks, and mixes their parameters."""

from __future__ import annotations

import numpy as np
import pytest
from fronts import Arrays, Torch

import collectives as cc
import strategies
from requirements import installed
from strategies.optimizers import SGD, Momentum

STEPS = 7
SHAPES = [(3, 2), (5,), ()]
FRONTS = {"arrays": Arrays, "torch": Torch}


def starts():
    return [np.full(shape, 1 + i, np.float32) for i, shape in enumerate(SHAPES)]


def gradients_of(values, rank, step):
    """Multiples of 1/8, and a quarter of the values."""
    random = np.random.default_rng([13, rank, step])
    return [
        (random.integers(-8, 8, np.shape(x)) / 8 + np.asarray(x) / 4).astype(np.float32)
        for x in values
    ]


def advance(own, rank, step):
    own.step(gradients_of(own.values, rank, step))


def around(size):
    matrix = np.eye(size)
    for r in range(size):
        others = {(r - 1) % size, (r + 1) % size} - {r}
        for n in others:
            matrix[r, n] += 1 / (1 + len(others))
            matrix[r, r] -= 1 / (1 + len(others))
    return matrix


def hop(size, step):
    far = 1 << step % max(1, (size - 1).bit_length())
    return (np.eye(size) + np.roll(np.eye(size), far, axis=0)) / 2 if size > 1 else np.eye(1)


def uneven(size):
    return 0.75 * np.eye(size) + 0.25 * np.roll(np.eye(size), 1, axis=1)


# Name -> graph of some ranks, and the matrix of a step.
GRAPHS = {
    "ring": (lambda size: "ring", lambda size, step: around(size)),
    "exponential": (lambda size: "exponential", hop),
    "weights": (uneven, lambda size, step: uneven(size)),
}


@pytest.fixture(params=FRONTS)
def front(request):
    if request.param == "torch":
        installed("torch")
    return FRONTS[request.param]


def simulated(front, size, inner, matrix):
    """One process with the parameters of all ranks."""
    ranks = [front(None, inner, starts()) for _ in range(size)]
    for step in range(STEPS):
        for rank, own in enumerate(ranks):
            advance(own, rank, step)
        columns = [np.stack(each) for each in zip(*(own.values for own in ranks), strict=True)]
        mixed = [np.tensordot(matrix(size, step), x.astype(float), 1) for x in columns]
        for rank, own in enumerate(ranks):
            own.assign([x[rank].astype(np.float32) for x in mixed])
    return [own.values for own in ranks]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_equals_one_process_that_mixes_the_parameters_of_all_ranks(comm, front, graph, inner):
    make, matrix = GRAPHS[graph]
    expected = simulated(front, comm.size, inner, matrix)[comm.rank]
    own = front(comm, inner, starts(), neighbours=make(comm.size))
    for step in range(STEPS):
        advance(own, comm.rank, step)
    # Per step at most `size + 6` roundings of numbers below 8; gradients and the means of Adam
    # differ by as little.
    bound = STEPS * (comm.size + 6) * 8 * 2.0**-24
    for value, exact in zip(own.values, expected, strict=True):
        np.testing.assert_allclose(value, exact, rtol=0, atol=bound)


def test_a_state_resumes_to_the_same_bits(comm, front):
    whole, first, second = (
        front(comm, "adam", starts(), neighbours="exponential") for _ in range(3)
    )
    for step in range(STEPS):
        advance(whole, comm.rank, step)
    for step in range(4):
        advance(first, comm.rank, step)
    second.load(first.state())
    for step in range(4, STEPS):
        advance(second, comm.rank, step)
    for value, exact in zip(second.values, whole.values, strict=True):
        np.testing.assert_array_equal(value, exact)


def test_surviving_ranks_average_with_their_new_neighbours(comm):
    value = np.full(3, float(comm.rank), np.float32)
    variable = strategies.Variable(np.zeros(3, np.float32), name="w")
    optimizer = wrapped(comm, SGD(1.0))
    optimizer.apply_gradients([(-value, variable)])
    pair = comm.split(comm.rank // 2)
    optimizer.rebind(pair)
    variable.assign(value)
    optimizer.apply_gradients([(0 * value, variable)])
    assert (np.asarray(variable.value) == pair.allreduce(value)).all()


def test_dtypes_of_one_step_have_the_same_neighbours(comm):
    variables = [
        strategies.Variable(np.full(2, comm.rank, dtype), name=dtype)
        for dtype in ("float32", "float64", "float16")
    ]
    optimizer = wrapped(comm, neighbours="exponential", compare="nothing")
    for step in range(3):
        before = [comm.allgather(np.asarray(v.value)[np.newaxis]) for v in variables]
        optimizer.apply_gradients([(np.zeros_like(v.value), v) for v in variables])
        row = hop(comm.size, step)[comm.rank]
        for variable, each in zip(variables, before, strict=True):
            # Halves of multiples of 1/8 are exact in 16 bits.
            np.testing.assert_array_equal(variable.value, row @ each.astype(float))


def wrapped(comm, optimizer=None, **options):
    return strategies.DistributedOptimizer(
        optimizer or SGD(0.1), comm=comm, **{"neighbours": "ring", **options}
    )


# Call, error, and its text.
REFUSED = {
    "name": (lambda comm: wrapped(comm, neighbours="torus"), "unknown graph"),
    "op": (lambda comm: wrapped(comm, op=cc.SUM), "neighbours excludes op"),
    "rounds": (lambda comm: wrapped(comm, sync_every=2), "neighbours excludes sync_every"),
    "compression": (lambda comm: wrapped(comm, compression=cc.FP16), "send all bits"),
    "shards": (lambda comm: wrapped(comm, shard_state=True), "neighbours excludes shard_state"),
    "delay": (lambda comm: wrapped(comm, delay=1), "excludes delay: .* after the step"),
    "join": (lambda comm: wrapped(comm).join(), "equally many steps"),
    "state": (lambda comm: wrapped(comm).load_state_dict({"step": 1, "local_steps": {"step": -1}}),
              "'step' in state"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks(comm, name):
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        call(comm)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_compiled_steps_are_refused(comm):
    optax = installed("optax")
    with pytest.raises(ValueError, match="neighbours is for arrays and PyTorch"):
        wrapped(comm, optax.sgd(0.1))


@pytest.mark.several
def test_ranks_that_differ_are_told_apart(comm):
    last = comm.rank == comm.size - 1
    with pytest.raises(cc.MismatchError, match="neighbours"):
        wrapped(comm, neighbours="exponential" if last else "ring")

    def variable(number=0.0):
        return strategies.Variable(np.full(2, number, np.float32), name="w")

    gradient = np.ones(2, np.float32)
    with pytest.raises(cc.MismatchError, match=r"broadcast_parameters"):
        wrapped(comm).apply_gradients([(gradient, variable(float(last)))])
    with pytest.raises(cc.MismatchError, match="learning_rate is 0.1"):
        wrapped(comm, SGD(0.1 + last)).apply_gradients([(gradient, variable())])
    other = wrapped(comm, Momentum(0.1 + last, 0.9), compare="parameters")
    other.apply_gradients([(gradient, variable())])
    with pytest.raises(ValueError, match="shape|dtype"):
        wrapped(comm).apply_gradients([(np.ones(2 + last, np.float32), variable())])
    assert comm.allreduce(1, op=cc.SUM) == comm.size
