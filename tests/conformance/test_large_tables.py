"""Variables that no task has all of: made part by part, looked up, changed and saved by rows."""

import itertools

import numpy as np
import pytest

import strategies
from requirements import installed
from served import cluster_test, in_turn, only_workers, opened, scenario, training
from strategies.parameter_server import ParameterServerStrategy
from strategies.variables import initializers
from strategies.variables.partition import fixed_shards

SHAPE = (1001, 3)
NORMAL = initializers.normal(seed=5)
WHOLE = NORMAL(0, SHAPE[0], SHAPE, np.float32)


@scenario(partitioner=fixed_shards(3))
def test_each_ps_makes_its_own_rows_and_nobody_else_any(strategy, server):
    asked = []

    def make(first, last, shape, dtype):
        asked.append((first, last, shape, dtype))
        return NORMAL(first, last, shape, dtype)

    table = strategy.variable(make, shape=SHAPE, name="table", resident=False)
    servers = server.cluster.ranks_of("ps")
    rank = server.cluster.comm.rank
    mine = [n for n, part in enumerate(table.parts) if servers[part.task] == rank]
    ends = table.offsets
    assert asked == [(ends[n], ends[n + 1], SHAPE, np.float32) for n in mine]
    assert (table.shape, table.dtype, len(table.parts)) == (SHAPE, np.float32, 3)
    with pytest.raises(ValueError, match="the variable has no copy on this task"):
        table.value  # noqa: B018
    workers = only_workers(server)
    ids = [1000, 0, 500, 0]
    np.testing.assert_array_equal(strategy.look_up(table, ids), WHOLE[ids])
    workers.barrier()
    rows = strategies.Rows(ids, np.ones((4, 3), np.float32))
    in_turn(server, lambda: strategy.apply_gradients(strategy.optimizer, [(rows, table)]))
    expected = WHOLE.copy()
    for _ in range(workers.size):
        np.subtract.at(expected, [1000, 500], 1)
        expected[0] -= 2
    np.testing.assert_array_equal(strategy.look_up(table, range(1001)), expected)
    workers.barrier()


@scenario(partitioner=fixed_shards(2))
def test_a_resident_one_is_made_by_every_task(strategy, server):
    table = strategy.variable(NORMAL, shape=SHAPE)
    np.testing.assert_array_equal(table.value, WHOLE)
    if training(server):
        strategy.pull()
        np.testing.assert_array_equal(table.value, WHOLE)
        server.cluster.workers.barrier()


KINDS = ["own", "view", "read-only", "torch"]


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_the_caller_stay_as_they_are(world, kind):
    torch = installed("torch") if kind == "torch" else None

    def body(strategy, server):
        own = WHOLE.copy()

        def make(first, last, shape, dtype):
            if kind == "own":  # of which this is all that is needed
                return parts[first, last]
            rows = own[first:last]
            if kind == "read-only":
                rows.flags.writeable = False
            return torch.from_numpy(rows) if torch else rows

        ends = (0, 501, SHAPE[0])
        parts = {(low, high): own[low:high].copy() for low, high in itertools.pairwise(ends)}
        table = strategy.variable(make, shape=SHAPE, name="table", resident=False)
        before = [part.copy() for part in parts.values()]
        if training(server):
            rows = strategies.Rows([0, 1000], np.ones((2, 3), np.float32))
            in_turn(server, lambda: strategy.apply_gradients(strategy.optimizer, [(rows, table)]))
            assert np.all(strategy.look_up(table, [0, 1000]) <= WHOLE[[0, 1000]] - 1)
        server.cluster.comm.barrier()
        np.testing.assert_array_equal(own, WHOLE)
        for part, was in zip(parts.values(), before, strict=True):
            np.testing.assert_array_equal(part, was)

    cluster_test(body, partitioner=fixed_shards(2))(world)


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_copies_have_the_dtype_of_the_variable_whatever_makes_it(world, kind):
    library = installed(kind) if kind != "numpy" else None

    def body(strategy, server):
        def make(first, last, shape, dtype):
            rows = np.arange(first * 2.0, last * 2.0).reshape(-1, 2)  # float64
            if kind == "torch":
                return library.from_numpy(rows)
            return library.numpy.asarray(rows) if library else rows

        expected = np.arange(10.0).reshape(5, 2)
        dtypes = [np.float32, np.float64] + ([library.float32] if kind == "torch" else [])
        for number, dtype in enumerate(dtypes):
            table = strategy.variable(make, shape=(5, 2), dtype=dtype, name=f"table {number}")
            wanted = np.dtype(str(dtype).removeprefix("torch.")) if number == 2 else np.dtype(dtype)
            assert table.dtype == table.value.dtype == wanted
            if training(server):
                strategy.pull()
                assert table.value.dtype == wanted
                rows = strategies.Rows([4], np.ones((1, 2), wanted))
                in_turn(
                    server,
                    lambda: strategy.apply_gradients(
                        strategy.optimizer,
                        [(rows, table)],  # noqa: B023
                    ),
                )
                strategy.pull()
                expected[4] -= server.cluster.workers.size
                assert table.value.dtype == wanted
                np.testing.assert_array_equal(table.value, expected)
                expected[4] += server.cluster.workers.size

    cluster_test(body, partitioner=fixed_shards(2))(world)


@scenario(partitioner=fixed_shards(3))
def test_an_initializer_that_fails_on_one_ps_leaves_nothing_behind(strategy, server):
    last = max(server.cluster.ranks_of("ps"))

    def make(first, stop, shape, dtype):
        if server.cluster.comm.rank == last:
            raise LookupError("no numbers today")
        return np.zeros((stop - first, *shape[1:]), dtype)

    with pytest.raises((LookupError, RuntimeError), match="no numbers today"):
        strategy.variable(make, shape=SHAPE, name="table", resident=False)
    table = strategy.variable(NORMAL, shape=SHAPE, name="table", resident=False)
    after = strategy.variable(np.zeros(2, np.float32), name="after")
    if training(server):
        in_turn(
            server,
            lambda: strategy.apply_gradients(strategy.optimizer, [(np.ones(2, np.float32), after)]),
        )
        np.testing.assert_array_equal(strategy.look_up(table, [7, 1000]), WHOLE[[7, 1000]])
        server.cluster.workers.barrier()


@scenario()
def test_wrong_initializers_are_an_error_on_all_tasks(strategy, server):
    for given, shape, message in [
        (
            np.zeros(3),
            (3,),
            "expected an initializer, and a shape of at least one axis, got nd",
        ),
        (NORMAL, (), "a shape of at least one axis"),
        (
            lambda first, last, shape, dtype: np.zeros((1, 1)),
            SHAPE,
            "the value has the wrong sh",
        ),
    ]:
        for resident in (False, True):
            with pytest.raises(ValueError, match=message):
                strategy.variable(given, shape=shape, name="wrong", resident=resident)


@pytest.mark.several
@pytest.mark.parametrize("optimizer", [strategies.SGD(0.5), strategies.Adam(0.1)])
def test_a_checkpoint_is_written_and_read_by_parts(comm, tmp_path, optimizer):
    path = str(tmp_path / "run")

    def table_of(server, name):
        cut = fixed_shards(len(server.cluster.ranks_of("ps")))
        strategy = ParameterServerStrategy(server, optimizer, partitioner=cut, shared_name=name)
        return strategy, strategy.variable(
            NORMAL, shape=SHAPE, name="table", resident=False
        ), strategy.variable(np.zeros(2), name="bias")  # fmt: skip

    def push(strategy, table, bias, step):
        rows = strategies.Rows([3 + step, 900], np.full((2, 3), 1.0 + step, np.float32))
        pairs = [(rows, table), (np.ones(2), bias)]
        strategy.apply_gradients(strategy.optimizer, pairs)

    with opened(comm) as server:
        cluster, found = server.cluster, []
        paths = cluster.comm.broadcast_object(path)  # ranks as processes have others
        first = table_of(server, "first")
        chief = cluster.is_chief
        for step in range(2 * chief):
            push(*first, step)
        checkpoints = strategies.CheckpointManager(paths, cluster.comm, sharded=True)
        slices = first[0].state_slices()  # a ps waits here for the updates of the chief
        updates = [s.array.tolist() for name, s in slices.items() if name == "updates"]
        assert updates == ([[2]] if cluster.job == "ps" else [])
        checkpoints.save(slices, step=2)
        second = table_of(server, "second")
        state = checkpoints.restore_or_none(slices=second[0].state_boxes())
        if cluster.job == "ps":
            with pytest.raises(ValueError, match=r"^load_state_slices: the state has no 'updates'"):
                second[0].load_state_slices({})
        second[0].load_state_slices(state.tensors)
        cluster.comm.barrier()
        for strategy, table, bias in (first, second):
            if chief:
                strategy.pull()
                push(strategy, table, bias, 2)
                found.append((strategy.look_up(table, range(SHAPE[0])), bias.value))
                assert strategy.reports()[0].version == 3
        for one, other in zip(*found, strict=True) if found else ():
            np.testing.assert_array_equal(one, other)
            assert np.any(one[:2])
        checkpoints.close()
        cluster.comm.barrier()
