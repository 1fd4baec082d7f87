"""A killed job is started again, and ends with the bits of one that nobody has disturbed."""

import numpy as np
import pytest

import strategies
from launcher import mpirun, written
from requirements import needs
from strategies.elastic import event_log

HEAD = """
    import os, sys
    import numpy as np
    import collectives as cc
    import strategies
    from strategies.checkpoint import Saver
    from strategies.session import TrainingSession, hooks
    comm = cc.init()
    rows = strategies.input.ShardedInput(
        range(180), lambda row: (row,), rank=comm.rank, size=comm.size, policy="file",
        num_epochs=None, seed=3)

    def go(train_step, steps, sharded=False, **things):
        global session
        checkpoints = strategies.CheckpointManager(sys.argv[1], comm, sharded=sharded)
        saver = Saver(checkpoints, rows=rows, **things)
        around = [hooks.StopAtStep(steps)]
        with checkpoints, TrainingSession(saver, save_steps=4, hooks=around) as session:
            if comm.rank == 0:
                print("begins at", session.step, flush=True)
            while not session.should_stop():
                session.run(train_step)
"""

# Generators of each rank, the place in the input, and what optimizers remember are all used.
PROGRAMS = {
    "numpy": """
        weights, rng = strategies.Variable(np.ones(8), name="w"), np.random.default_rng(comm.rank)
        optimizer = strategies.DistributedOptimizer(strategies.Adam(0.1))
        def train_step():
            x = rng.normal(size=8) * next(rows)
            optimizer.apply_gradients([(x * (x @ weights.value - 1) / 1000, weights)])
        go(train_step, 14, weights=weights, optimizer=optimizer, rng=rng)
    """,
    "torch": """
        import torch
        torch.manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5))
        strategies.broadcast_parameters(model)
        optimizer = strategies.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.1))
        def train_step():
            optimizer.zero_grad()
            model(torch.full((1, 8), next(rows) / 100)).square().sum().backward()
            optimizer.step()
        go(train_step, 14, model=model, optimizer=optimizer, rng=torch.default_generator)
    """,
    "jax": """
        import jax, optax
        transformation = strategies.DistributedOptimizer(optax.adam(0.1))
        params = {"w": jax.numpy.ones(8), "b": jax.numpy.zeros(())}
        key, state = jax.random.key(comm.rank), transformation.init(params)
        gradients = jax.grad(lambda p, x: (p["w"] @ x + p["b"] - 1) ** 2)
        def train_step():
            params, state, key = session["params"], session["state"], session["key"]
            key, one = jax.random.split(key)
            found = gradients(params, jax.random.normal(one, (8,)) * (next(rows) / 100))
            updates, state = transformation.update(found, state, params)
            session.update(params=optax.apply_updates(params, updates), state=state, key=key)
        go(train_step, 14, params=params, state=state, key=key)
    """,
    "jax in parts": """
        import jax, optax
        transformation = strategies.DistributedOptimizer(optax.adam(0.1), shard_state=True)
        params = {"w": jax.numpy.ones(8), "b": jax.numpy.zeros(())}
        gradients = jax.grad(lambda p, x: ((p["w"] * x).sum() + p["b"] - 1) ** 2)
        update = jax.jit(transformation.update)
        def train_step():
            params, slices = session["params"], session["slices"]
            state = transformation.from_slices(slices)
            updates, state = update(gradients(params, next(rows) / 100), state, params)
            params = optax.apply_updates(params, updates)
            session.update(params=params, slices=transformation.to_slices(state, params))
        slices = transformation.to_slices(transformation.init(params), params)
        go(train_step, 14, sharded=True, params=params, slices=slices)
    """,
    # Sums of small integers, halved at most: exact, whoever adds up how many of them.
    "exact": """
        weights, values = np.zeros(3), np.arange(540).reshape(180, 3) % 17 - 8.0
        rule = strategies.Momentum(0.5, 0.5)
        optimizer = strategies.DistributedOptimizer(rule, op=cc.SUM)
        def train_step():
            mine = [next(rows) for _ in range(60 // comm.size)]
            optimizer.apply_gradients([(values[mine].sum(0), weights)])
        go(train_step, 14, weights=weights, optimizer=optimizer)
    """,
}


def start(tmp_path, name, folder, size, faults=""):
    program = written(tmp_path, HEAD, PROGRAMS[name])
    result = mpirun(
        size, program, tmp_path / folder, timeout=100, UNISONO_FAULT=faults,
        UNISONO_EVENTS=str(tmp_path / "events"), UNISONO_RECORDER_DIR=str(tmp_path),
    )  # fmt: skip
    assert (result.status == 0) == (not faults), result
    return result.stdout


def rows_left(node):
    """The rows of two epochs that a checkpoint has not used, in the order in which they come."""
    rows = strategies.input.ShardedInput(
        range(180), lambda row: (row,), rank=0, size=1, policy="file", num_epochs=2, seed=3
    )
    rows.load_state(plain(node))
    return list(rows)


def plain(node):
    """What a checkpoint says of plain values, as values."""
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    if tag == "dict":
        return {plain(key): plain(value) for key, value in content}
    return [plain(part) for part in content]


def deaths(tmp_path):
    told = event_log.read(tmp_path / "events")
    return [(line["step"], line["rank"]) for line in told if line["event"] == "fault"]


@pytest.mark.parametrize(
    ("library", "victim"), [("numpy", 1), ("torch", 0), ("jax", 1), ("jax in parts", 0)]
)
def test_a_killed_job_ends_with_the_same_bits(tmp_path, library, victim):
    needs(*{"numpy": [], "torch": ["torch"]}.get(library, ["jax", "optax"]))
    start(tmp_path, library, "whole", 2)
    start(tmp_path, library, "parts", 2, f"step=10,rank={victim},kind=kill")
    assert deaths(tmp_path) == [(10, victim)]
    assert "begins at 8" in start(tmp_path, library, "parts", 2)
    ends = [
        strategies.CheckpointManager(tmp_path / folder).restore_or_none()
        for folder in ("whole", "parts")
    ]
    assert [end.step for end in ends] == [14, 14]
    # The place in the input is said in as many stages as it was read in: the same rows are left.
    left = [rows_left(end.metadata["things"]["rows"]) for end in ends]
    assert left[0] == left[1]
    assert len(left[0]) == 2 * 180 - 14 * 2
    others = [{**end.metadata["things"], "rows": None} for end in ends]
    assert others[0] == others[1]
    assert list(ends[0].tensors) == list(ends[1].tensors)
    assert len(ends[0].tensors) > 2
    for name, tensor in ends[0].tensors.items():
        assert tensor.tobytes() == ends[1].tensors[name].tobytes(), name


def test_four_three_and_five_ranks_make_the_same_bits_as_one(tmp_path):
    start(tmp_path, "exact", "parts", 4, "step=6,rank=2,kind=kill")
    said = start(tmp_path, "exact", "parts", 3, "step=11,rank=0,kind=kill")
    assert "begins at 4" in said
    assert deaths(tmp_path) == [(6, 2), (11, 0)]
    assert "begins at 8" in start(tmp_path, "exact", "parts", 5)

    rows = strategies.input.ShardedInput(
        range(180), lambda row: (row,), rank=0, size=1, policy="file", num_epochs=None, seed=3
    )
    weights, momentum = np.zeros(3), np.zeros(3)
    values = np.arange(540).reshape(180, 3) % 17 - 8.0
    for _ in range(14):
        momentum = 0.5 * momentum + values[[next(rows) for _ in range(60)]].sum(0)
        weights -= 0.5 * momentum
    end = strategies.CheckpointManager(tmp_path / "parts").restore_or_none()
    assert end.step == 14
    assert end.tensors["weights"].tobytes() == weights.tobytes()
    assert np.abs(weights).max() > 1
