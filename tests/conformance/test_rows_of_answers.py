"""After a push of rows the ps tasks answer with the rows that a worker lacks, not the table."""

from __future__ import annotations

import numpy as np
import pytest

import strategies
from requirements import installed
from served import in_turn, only_workers, scenario
from strategies.variables.partition import fixed_shards

SHAPE = (3000, 4)
WHOLE = 4 * 3000 * 4  # bytes
FEW = WHOLE // 8  # more than some rows and what is said around them


def start():
    return np.random.default_rng(7).standard_normal(SHAPE).astype(np.float32)


def received(server, action):
    """Return how many bytes have come while something was done."""
    channel = server.cluster.comm.channel
    before = channel.received
    action()
    return channel.received - before


@scenario(partitioner=fixed_shards(2))
def test_copies_are_right_whatever_has_changed_them(strategy, server):
    table = strategy.variable(start(), name="table")
    other = strategy.variable(np.ones(3), name="other")
    workers, optimizer = only_workers(server), strategy.optimizer
    expected = start()

    def rows_of(worker):
        return strategies.Rows([worker, 2999, 7, 7], np.full((4, 4), worker + 1, np.float32))

    def push():
        shown = table.value
        before = shown.copy()
        pairs = [(rows_of(workers.rank), table)]
        assert received(server, lambda: strategy.apply_gradients(optimizer, pairs)) < FEW
        np.testing.assert_array_equal(shown, before)  # whoever has an array keeps it

    def follow(worker):
        rows = rows_of(worker)
        np.subtract.at(expected, rows.indices, rows.values)

    in_turn(server, push)
    for worker in range(workers.rank + 1):
        follow(worker)
    np.testing.assert_allclose(table.value, expected, rtol=1e-6)
    for worker in range(workers.rank + 1, workers.size):
        follow(worker)
    assert received(server, strategy.pull) < FEW
    np.testing.assert_allclose(table.value, expected, rtol=1e-6)
    workers.barrier()
    # All rows, by a gradient and by a value; the other variable's three numbers alone.
    ones = np.ones(SHAPE, np.float32)
    if server.cluster.is_chief:
        strategy.apply_gradients(optimizer, [(ones, table)])
    workers.barrier()
    strategy.pull()
    np.testing.assert_allclose(table.value, expected - 1, rtol=1e-5, atol=1e-6)
    workers.barrier()
    if server.cluster.is_chief:
        table.assign(ones)
    workers.barrier()
    strategy.pull()
    np.testing.assert_array_equal(table.value, ones)
    workers.barrier()
    in_turn(server, lambda: strategy.apply_gradients(optimizer, [(np.ones(3), other)]))
    assert received(server, strategy.pull) < FEW
    np.testing.assert_array_equal(table.value, ones)
    np.testing.assert_array_equal(other.value, 1.0 - workers.size)
    workers.barrier()


@scenario()
def test_a_loaded_state_reaches_all_copies(strategy, server):
    table = strategy.variable(start(), name="table")
    workers = only_workers(server)
    rows = strategies.Rows([5], np.ones((1, 4), np.float32))
    if server.cluster.is_chief:
        state = strategy.state_dict()
        strategy.apply_gradients(strategy.optimizer, [(rows, table)])
    workers.barrier()
    strategy.pull()
    assert not np.array_equal(table.value, start())
    workers.barrier()
    if server.cluster.is_chief:
        strategy.load_state_dict(state)
    workers.barrier()
    strategy.pull()
    np.testing.assert_array_equal(table.value, start())
    workers.barrier()


def of_torch(strategy):
    torch = installed("torch")
    table = torch.nn.Embedding(*SHAPE, sparse=True)
    with torch.no_grad():
        table.weight[:] = torch.from_numpy(start())
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), strategy=strategy
    )

    def step(ids):
        before = table.weight.data_ptr()
        optimizer.zero_grad()
        table(torch.tensor(ids)).sum().backward()
        optimizer.step()
        assert table.weight.data_ptr() == before  # a table is not copied for some rows
        return table.weight.detach().numpy()

    def first():  # new memory, which the model has from then on
        optimizer.pull()

    return step, first


def of_jax(strategy):
    optax, jnp = installed("optax"), installed("jax.numpy")
    transformation = strategies.DistributedOptimizer(optax.sgd(1.0), strategy=strategy)
    params = {"table": jnp.asarray(start())}
    state = transformation.init(params)

    def step(ids):
        nonlocal params
        rows = strategies.Rows(ids, np.ones((len(ids), SHAPE[1]), np.float32))
        updates, _ = transformation.update({"table": rows}, state, params)
        params = optax.apply_updates(params, updates)
        return np.asarray(params["table"])

    return step, lambda: None


@pytest.mark.parametrize("make", [of_torch, of_jax])
@pytest.mark.parametrize("synchronous", [False, True])
@scenario(optimizer=lambda: None)
def test_models_with_sparse_embeddings_get_rows(strategy, server, make, synchronous):
    step, first = make(strategy)
    workers = only_workers(server)
    first()
    workers.barrier()
    found: list = []

    def push():
        ids = [workers.rank, 100, 100]
        assert received(server, lambda: found.append(step(ids))) < FEW

    if synchronous:
        push()
        seen, share = range(workers.size), 1 / workers.size
    else:
        in_turn(server, push)
        seen, share = range(workers.rank + 1), 1.0
    expected = start()
    for worker in seen:
        np.subtract.at(expected, [worker, 100, 100], np.float32(share))
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)
    workers.barrier()
