"""Variables on ps tasks in checkpoints, and gradients and values of 16 bits on their way."""

import threading
import time
from functools import partial

import numpy as np
import pytest

import collectives as cc
import strategies
from served import LIMIT, in_turn, only_workers, opened, scenario, training
from strategies.errors import FailedPreconditionError
from strategies.parameter_server import ParameterServerStrategy

ROWS = 7


def rate(step):
    return 0.1 / (1 + step)


def made(server, name, parts, **options):
    """A strategy with a table in some parts and a vector."""
    strategy = ParameterServerStrategy(
        server,
        strategies.Adam(rate),
        partitioner=lambda shape, dtype: [parts] + [1] * (len(shape) - 1),
        shared_name=name,
        **options,
    )
    strategy.variable(np.arange(2.0 * ROWS).reshape(ROWS, 2), name="table")
    strategy.variable(np.ones(1, np.float32), name="vector")
    return strategy


def train(strategy, steps):
    """Make updates of the mean of all workers' gradients."""
    for step in steps:
        rng = np.random.default_rng((step, strategy.first_replica_id))
        strategy.apply_gradients(
            strategy.optimizer,
            [
                (rng.standard_normal(v.shape).astype(v.dtype), v)
                for v in strategy.variables.values()
            ],
        )


@pytest.mark.several
@pytest.mark.parametrize("parts", [1, 3], ids=["in one part then", "in as many parts"])
def test_training_goes_on_from_a_state_bit_for_bit(comm, parts, tmp_path):
    with opened(comm) as server:
        first = made(server, "first", 3, synchronous=True, warmup_steps=1)
        second = made(server, "second", parts, synchronous=True, warmup_steps=1)
        if not training(server):
            return
        workers = server.cluster.workers
        train(first, range(1 if not first.is_chief else 4))  # others wait for the warm-up
        if not first.is_chief:
            train(first, range(1, 4))
        workers.barrier()
        if first.is_chief:
            with strategies.CheckpointManager(tmp_path / "run") as checkpoints:
                checkpoints.save(first.state_dict(), step=4)
                second.load_state_dict(checkpoints.restore_or_none().tensors)
        workers.barrier()
        second.pull()
        for strategy in (first, second):
            train(strategy, range(4, 7))
        for name, variable in first.variables.items():
            other = second.variables[name].value
            np.testing.assert_array_equal(other, variable.value)
        assert [r.version for r in second.reports()] == [r.version for r in first.reports()]
        workers.barrier()


@scenario(warmup_steps=2, rate_scale=10.0)
def test_a_state_of_the_warm_up_is_warmed_up_from_there(strategy, server):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)

    push = partial(strategy.apply_gradients, strategy.optimizer, [(np.ones(1), w)])
    if strategy.is_chief:
        push()
        state = strategy.state_dict()
        for value in (-2, -12):
            push()
            assert w.value[0] == value
        strategy.load_state_dict(state)
    workers.barrier()
    strategy.pull()
    workers.barrier()
    push()
    assert strategy.last_push[0].weight == strategy.is_chief
    assert w.value[0] == -2
    workers.barrier()
    if strategy.is_chief:
        push()
        assert w.value[0] == -12
    workers.barrier()


@scenario(optimizer=lambda: strategies.Momentum(1.0, 0.5))
def test_a_state_has_names_and_shapes(strategy, server):
    w = strategy.variable(np.zeros((3, 2), np.float32), name="w")
    strategy.variable(np.arange(4), name="counter")
    if not training(server):
        with pytest.raises(FailedPreconditionError, match="a ps task serves others"):
            strategy.state_dict()
        return
    workers = server.cluster.workers
    before = strategy.state_dict()
    np.testing.assert_array_equal(before["optimizer/momentum/w"], np.zeros((3, 2), np.float32))
    in_turn(
        server,
        lambda: strategy.apply_gradients(strategy.optimizer, [(np.ones((3, 2), np.float32), w)]),
    )
    state = strategy.state_dict()
    assert {name: (a.shape, a.dtype.name) for name, a in state.items()} == {
        "updates": ((len(strategy.reports()),), "int64"),
        "variable/w": ((3, 2), "float32"),
        "optimizer/momentum/w": ((3, 2), "float32"),
        "optimizer/step/w": ((1,), "int64"),
        "variable/counter": ((4,), "int64"),
        "optimizer/step/counter": ((1,), "int64"),
    }
    assert state["optimizer/step/w"].tolist() == [workers.size]
    assert state["variable/counter"].tolist() == [0, 1, 2, 3]
    slots = [0.0]
    for _ in range(workers.size):
        slots.append(slots[-1] * 0.5 + 1)
    np.testing.assert_array_equal(state["optimizer/momentum/w"], slots[-1])
    np.testing.assert_array_equal(state["variable/w"], -sum(slots))
    workers.barrier()


WRONG = [
    (lambda s: s.pop("variable/w"), "the state has no 'variable/w', expected that of"),
    (lambda s: s.pop("optimizer/momentum/w"), "has no 'optimizer/momentum/w', expected"),
    (lambda s: s.update(more=np.ones(1)), r"unknown names, .* got \['more'\]"),
    (lambda s: s.update({"variable/w": np.ones(4)}), "expected float64 of shape .3,., got"),
    (lambda s: s.update({"variable/w": np.ones(3, np.float32)}), "got float32 of shape"),
    (lambda s: s.update(updates=np.array([-1])), "bad counts"),
    (lambda s: s.update(updates=np.array(1)), "bad counts"),
    (lambda s: s.update({"optimizer/step/w": np.array([0.5])}), "bad counts, .* got float64"),
]


@pytest.mark.parametrize(("damage", "message"), WRONG)
@scenario(optimizer=lambda: strategies.Momentum(1.0, 0.5))
def test_a_state_that_does_not_fit_changes_nothing(strategy, server, damage, message):
    strategy.variable(np.arange(3.0), name="w")
    only_workers(server)
    before = strategy.state_dict()
    state = {name: value.copy() for name, value in before.items()}
    state["variable/w"] += 1
    damage(state)
    with pytest.raises(ValueError, match=message):
        strategy.load_state_dict(state)
    after = strategy.state_dict()
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


@scenario(synchronous=True)
def test_a_state_is_not_loaded_between_gradients_of_one_update(strategy, server):
    w = strategy.variable(np.zeros(1), name="w")
    if not training(server) or server.cluster.workers.size == 1:
        return
    workers = server.cluster.workers
    state = strategy.state_dict()
    workers.barrier()

    push = partial(strategy.apply_gradients, strategy.optimizer, [(np.ones(1), w)])
    first = threading.Thread(target=push)
    if workers.rank == 0:
        first.start()
    elif workers.rank == 1:
        refused = ""
        until = time.monotonic() + LIMIT
        while not refused and time.monotonic() < until:  # until that gradient is there
            try:
                strategy.load_state_dict(state)
            except FailedPreconditionError as error:
                refused = str(error)
        assert "gradients wait to be applied" in refused
        assert f"tasks [{server.cluster.training_ranks[0]}]" in refused
    workers.barrier()
    if workers.rank:
        push()
    else:
        first.join(LIMIT)
    assert w.value[0] == -1
    workers.barrier()


@pytest.mark.several
@pytest.mark.parametrize(
    ("compression", "sums"),
    [
        # 1 + 2^-9 lies between two bfloat16, nearer to 1.
        (cc.NONE, [1 + 2**-9, 2 + 2**-8, 3 + 3 * 2**-9, 4 + 2**-7]),
        (None, [1 + 2**-9, 2 + 2**-8, 3 + 3 * 2**-9, 4 + 2**-7]),
        (cc.BF16, [1, 2, 3, 4]),
        (cc.FP16, [1 + 2**-9, 2 + 2**-8, 3 + 3 * 2**-9, 4 + 2**-7]),
        # What is left over adds up to half of the step between two, and then to more.
        (cc.BF16.with_feedback, [1, 2, 3 + 2**-7, 4 + 2**-7]),
    ],
    ids=["NONE", "none", "bfloat16", "float16", "feedback"],
)
def test_gradients_travel_as_16_bits(comm, compression, sums):
    with opened(comm) as server:
        strategy = ParameterServerStrategy(
            server,
            strategies.SGD(1.0),
            synchronous=True,
            compression=compression() if callable(compression) else compression,
            value_compression=None,
            partitioner=lambda shape, dtype: [2],
        )
        w = strategy.variable(np.zeros(40_000, np.float32), name="w")
        few = strategy.variable(np.zeros(3, np.float32), name="few")
        number = strategy.variable(np.zeros(2), name="float64")
        if not training(server):
            return
        for total in sums:
            strategy.apply_gradients(
                strategy.optimizer,
                [(np.full(v.shape, 1 + 2**-9, v.dtype), v) for v in (w, few, number)],
            )
            for variable in (w, few, number):
                assert (variable.value == -total).all(), variable
        server.cluster.workers.barrier()


@scenario(synchronous=True, compression=cc.BF16.with_feedback(), value_compression=cc.BF16)
def test_rows_and_values_travel_as_16_bits(strategy, server):
    start = np.full((4, 2), 1 + 2**-9, np.float32)
    table = strategy.variable(start, name="table", resident=False)
    w = strategy.variable(start, name="w")
    count = strategy.variable(np.int64(1 << 40), name="count")
    only_workers(server)
    strategy.pull()
    np.testing.assert_array_equal(w.value, start)  # nothing has changed, and nothing travels
    server.cluster.workers.barrier()
    if server.cluster.is_chief:
        w.assign(start)
        count.assign(np.int64(1 << 40))
    server.cluster.workers.barrier()
    strategy.pull()
    np.testing.assert_array_equal(w.value, 1)  # rounded, while the ps has all digits
    assert w.value.dtype == np.float32
    assert count.value == 1 << 40
    np.testing.assert_array_equal(strategy.look_up(table, [2, 2]), np.ones((2, 2)))
    server.cluster.workers.barrier()
    for _ in range(3):  # rows are rounded alike each time: nothing is kept for them
        rows = strategies.Rows(np.array([1]), start[:1])
        strategy.apply_gradients(strategy.optimizer, [(rows, table), (None, w)])
    server.cluster.workers.barrier()
    state = strategy.state_dict()
    np.testing.assert_array_equal(state["variable/w"], start)
    np.testing.assert_array_equal(state["variable/table"][[0, 2, 3]], start[:3])
    np.testing.assert_array_equal(state["variable/table"][1], start[1] - 3)
    server.cluster.workers.barrier()


@pytest.mark.several
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": cc.FP16.on("network")}, "rounded everywhere or not at all"),
        ({"value_compression": cc.FP16.on("network")}, "rounded everywhere or not at all"),
        ({"value_compression": cc.FP16.with_feedback()}, "feedback is for gradients"),
        ({"compression": cc.TOPK(0.1)}, "expected one of none float16 bfloat16, got top-k 0.1"),
        ({"value_compression": cc.TOPK(0.1)}, "expected one of none .*, got top-k 0.1"),
    ],
)
def test_compression_of_no_use_is_an_error_on_all(comm, options, message):
    with opened(comm) as server, pytest.raises(ValueError, match=message):
        ParameterServerStrategy(server, strategies.SGD(1.0), **options)
