"""Replicas of one process, without MPI."""

import threading

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import inprocess
import strategies
from collectives import extend
from requirements import installed
from strategies.errors import InvalidArgumentError, NotFoundError


def cpus(count):
    return [f"/cpu:{i}" for i in range(count)]


def replica_id():
    return strategies.get_replica_context().replica_id_in_sync_group


GOLDEN = [
    # policy, replicas of one process, rows, batch -> the last step
    ("data", 2, 10, 4, [[8], [9]]),
    ("off", 2, 10, 4, [[8, 9], []]),
    ("data", 2, 9, 4, [[8], []]),
    ("off", 2, 9, 4, [[8], []]),
    ("data", 3, 4, 4, [[0, 1], [2, 3], []]),
    ("off", 3, 4, 4, [[0, 1], [2], [3]]),
    ("auto", 3, 4, 4, [[0, 1], [2, 3], []]),
]


def test_results_are_regrouped_leaf_by_leaf():
    strategy = strategies.MirroredStrategy(cpus(2))
    same = object()

    def step(x):
        return {"id": replica_id(), "same": same, "pair": (x, None), "one": 1}

    values = strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group * 10)
    assert values.values == (0, 10)
    result = strategy.run(step, args=(values,))
    assert result["same"] is same
    assert result["pair"] == (strategies.replicas.PerReplica((0, 10)), None)
    assert result["id"] == strategies.replicas.PerReplica((0, 1))
    assert result["one"] == strategies.replicas.PerReplica((1, 1))  # numbers have no identity
    assert strategy.local_results(result)[1] == {
        "id": 1,
        "same": same,
        "pair": (10, None),
        "one": 1,
    }
    assert strategy.local_results(5) == (5,)
    with pytest.raises(ValueError, match="different structures, got leaf and list of 1"):
        strategy.run(lambda: [0] if replica_id() else 0)
    with pytest.raises(ValueError, match=r"different structures, got list of 1 and tuple of 1"):
        strategy.run(lambda: [0] if replica_id() else (0,))


def test_replicas_run_at_the_same_time():
    strategy = strategies.MirroredStrategy(cpus(3))
    barrier = threading.Barrier(3)
    strategy.run(barrier.wait, args=(10,))  # which none of them passes alone


def test_the_first_replica_computes_where_run_is_called():
    strategy = strategies.MirroredStrategy(cpus(3))
    first, *others = strategy.run(threading.get_ident).values
    assert first == threading.get_ident()
    assert first not in others


def test_all_replicas_compute_in_the_modes_of_the_caller():
    torch = installed("torch")
    strategy = strategies.MirroredStrategy(cpus(2))

    def modes():
        product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
        return product.requires_grad, str(product.dtype), np.geterr()["over"]

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), np.errstate(over="raise"):
        inside = strategy.local_results(strategy.run(modes))
    assert inside == ((False, "torch.bfloat16", "raise"),) * 2
    after = strategy.local_results(strategy.run(modes))
    assert after == ((True, "torch.float32", np.geterr()["over"]),) * 2
    with torch.inference_mode():
        inside = strategy.local_results(strategy.run(torch.is_inference_mode_enabled))
    assert inside == (True, True)


def test_all_replicas_have_the_cache_and_the_default_device_of_pytorch_of_the_caller():
    torch = installed("torch")
    strategy = strategies.MirroredStrategy(cpus(2))

    def modes():
        return torch.is_autocast_cache_enabled(), torch.ones(1).device.type

    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with autocast, torch.device("meta"):
        inside = strategy.local_results(strategy.run(modes))
    assert inside == ((False, "meta"),) * 2
    assert strategy.local_results(strategy.run(modes)) == ((True, "cpu"),) * 2


def test_all_replicas_compute_in_the_modes_of_jax_of_the_caller():
    jax = installed("jax")
    strategy = strategies.MirroredStrategy(cpus(2))
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

    def modes():
        traced = []
        function = jax.jit(lambda x: traced.append(isinstance(x, jax.core.Tracer)) or x * 2)
        product = function(jax.numpy.ones((2, 2)))
        return (
            str(product.dtype),
            traced,
            jax.config.jax_default_matmul_precision,
            jax.config.jax_transfer_guard_device_to_host,
            jax.config.jax_numpy_rank_promotion,
        )

    before = strategy.local_results(strategy.run(modes))
    with (
        x64(True),
        jax.disable_jit(),
        jax.default_matmul_precision("float32"),
        jax.transfer_guard("allow"),
        jax.transfer_guard_device_to_host("log"),
        jax.numpy_rank_promotion("raise"),
    ):
        inside = strategy.local_results(strategy.run(modes))
    assert inside == (("float64", [False], "float32", "log", "raise"),) * 2
    assert before[0] == before[1] != inside[0]
    assert strategy.local_results(strategy.run(modes)) == before


def test_an_interrupt_ends_a_run_without_a_wait_for_the_other_replicas():
    strategy = strategies.MirroredStrategy(cpus(2))
    go_on, ended = threading.Event(), threading.Event()

    def step():
        if replica_id() == 0:
            raise KeyboardInterrupt
        go_on.wait(20)
        try:
            strategies.get_replica_context().all_reduce("sum", 1.0)
        finally:
            ended.set()  # it stops where it would meet

    with pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(20)
    assert strategy.run(replica_id).values == (0, 1)


def test_sparse_tensors_are_gradients_of_rows():
    torch = installed("torch")
    strategy = strategies.MirroredStrategy(cpus(2))
    table = strategy.variable(torch.zeros(4, 2), name="table")

    def step(axes):
        ids = torch.tensor([1, 3, 3]) if replica_id() else torch.tensor([0, 3, 1])
        gradient = torch.sparse_coo_tensor(
            ids[None], torch.ones(3, 2), (4, 2), check_invariants=True
        )
        gradient = gradient if axes == 1 else gradient.to_dense().to_sparse()
        strategy.apply_gradients(strategies.SGD(2.0), [(gradient, table)])

    strategy.run(step, args=(1,))
    assert table.value[:, 0].tolist() == [-1, -2, 0, -3]
    with pytest.raises(TypeError, match="sparse in its first axis alone, got one that is in 2"):
        strategy.run(step, args=(2,))


def test_other_objects_pass_through_run_as_they_are():
    torch = installed("torch")
    strategy = strategies.MirroredStrategy(cpus(2))
    tensor, state = torch.ones(2), {"list": [1]}
    result = strategy.run(lambda t, s: (t is tensor, s is state), args=(tensor, state))
    assert result == (True, True) or strategy.local_results(result) == ((True, True),) * 2


def test_a_result_that_replicas_share_cannot_be_changed_by_one():
    strategy = strategies.MirroredStrategy(cpus(2))

    def step():
        strategies.get_replica_context().all_reduce("sum", np.ones(2))[0] = 7

    with pytest.raises(ValueError, match="read-only"):
        strategy.run(step)


def test_outside_of_any_scope_there_is_one_replica():
    context = strategies.get_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert context.all_reduce("mean", {"a": 3.0})["a"] == 3.0
    assert context.all_gather(np.ones(3)).shape == (3,)

    def merge(strategy, value):
        assert strategies.in_cross_replica_context()
        return value, strategy

    assert context.merge_call(merge, args=(1,)) == (1, strategies.get_strategy())


def test_a_context_is_of_no_use_to_others():
    strategy = strategies.MirroredStrategy(cpus(2))
    contexts = strategy.run(strategies.get_replica_context)
    with pytest.raises(RuntimeError, match="all_reduce: called outside of the replica"):
        contexts.values[0].all_reduce("sum", 1)
    assert strategy.run(replica_id).values == (0, 1)


def test_wrong_contexts_are_errors():
    strategy = strategies.MirroredStrategy(cpus(2))
    other = strategies.MirroredStrategy(cpus(2))
    for call in (
        lambda: strategy.reduce("sum", 1.0),
        lambda: strategy.gather(np.ones(1), 0),
        lambda: strategy.run(abs, args=(1,)),
        lambda: strategy.variable(0.0),
        lambda: strategy.scope().__enter__(),
    ):
        with pytest.raises(RuntimeError, match="called inside a replica"):
            strategy.run(call)
    with strategy.scope():
        for call in (
            lambda: other.run(abs, args=(1,)),
            lambda: other.variable(0.0),
            lambda: other.scope().__enter__(),
        ):
            with pytest.raises(RuntimeError, match="another strategy's scope is open"):
                call()


def test_the_golden_mean_of_uneven_replicas():
    strategy = strategies.MirroredStrategy(cpus(2))
    values = strategies.replicas.PerReplica((np.array([1, 1, 1]), np.array([1, 1, 2])))
    assert strategy.reduce("MEAN", values, axis=0) == pytest.approx(7 / 6)
    assert strategy.reduce("MEAN", values, axis=0).dtype == np.float64
    uneven = strategies.replicas.PerReplica((np.array([1.0, 2.0, 3.0]), np.array([6.0])))
    assert strategy.reduce("mean", uneven, axis=0) == 3.0
    with pytest.raises(InvalidArgumentError, match=r"one shape, got \(3,\), \(1,\)"):
        strategy.reduce("mean", uneven)
    assert strategy.reduce("mean", strategies.replicas.PerReplica((True, False))) == 0.5
    assert strategy.reduce("sum", strategies.replicas.PerReplica((True, True))) == 2


def test_a_value_that_is_the_same_for_all_replicas():
    strategy = strategies.MirroredStrategy(cpus(2))
    assert strategy.reduce("mean", 3.0) == 3.0
    assert strategy.reduce("mean", np.array([1.0, 3.0]), axis=0) == 2.0
    assert strategy.reduce("sum", 0) == 0
    with pytest.raises(ValueError, match="the value is the same for all 2 replicas"):
        strategy.reduce("sum", 1)
    same = np.ones(2)
    assert strategy.gather(same, 0) is same


@pytest.mark.parametrize(
    ("arrays", "axis"),
    [
        (((2, 3), (2, 4)), 0),
        (((2, 3), (3, 3)), 1),
        (((2, 3), (2,)), 0),
        (((), ()), 0),
        (((2,), (2,)), 1),
    ],
)
def test_arrays_that_cannot_be_joined(arrays, axis):
    strategy = strategies.MirroredStrategy(cpus(2))
    values = strategies.replicas.PerReplica(tuple(np.zeros(shape) for shape in arrays))
    with pytest.raises(InvalidArgumentError):
        strategy.gather(values, axis)


@pytest.mark.parametrize(("policy", "replicas", "rows", "batch", "last"), GOLDEN)
def test_golden_batches_of_one_process(policy, replicas, rows, batch, last):
    strategy = strategies.MirroredStrategy(cpus(replicas))
    batches = [np.arange(start, min(start + batch, rows)) for start in range(0, rows, batch)]
    *_, step = strategy.distribute_dataset(batches, policy=policy)
    assert [part.tolist() for part in step.values] == last
    with pytest.raises(ValueError, match="expected one of auto file data off, got 'files'"):
        strategy.distribute_dataset(batches, policy="files")
    with pytest.raises(NotFoundError, match="batches without files, .* got list"):
        strategy.distribute_dataset(batches, policy="file")


@pytest.mark.parametrize("policy", ["data", "off"])
def test_batches_of_other_lengths_keep_all_rows(policy):
    strategy = strategies.MirroredStrategy(cpus(2))
    batches = np.split(np.arange(17), [1, 5, 7, 15])  # of 1, 4, 2, 8 and 2 rows
    steps = strategy.distribute_dataset(batches, policy=policy)
    assert [row for step in steps for part in step.values for row in part] == list(range(17))


def test_options_of_a_call_go_over_those_of_the_strategy():
    earlier = strategies.CommunicationOptions(bytes_per_pack=8, timeout=5)
    later = strategies.CommunicationOptions(compression=cc.FP16, timeout=7)
    assert later.over(earlier) == strategies.CommunicationOptions(8, cc.FP16, 7)
    none = strategies.CommunicationOptions(compression=None)
    assert none.compression is cc.NONE
    assert none.over(later) == later
    with pytest.raises(ValueError, match="bad bytes_per_pack, expected >= 0, got -1"):
        strategies.CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(ValueError, match="bad timeout, expected seconds > 0"):
        strategies.CommunicationOptions(timeout=0)


@inprocess.on_ranks(2, leaders=[0, 1])
def test_mirrored_replicas_are_on_one_node(comm):
    assert comm.num_nodes == 2
    with pytest.raises(ValueError, match="the ranks are on several nodes, expected 1, got 2"):
        strategies.MirroredStrategy(comm=comm)
    assert strategies.MultiWorkerMirroredStrategy(comm).num_replicas_in_sync == 2


def test_how_many_processes_a_launcher_started(monkeypatch):
    for variable in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    assert extend.launcher_world_size() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert extend.launcher_world_size() == 3


def test_gradients_of_a_few_rows_are_averaged_over_replicas():
    strategy = strategies.MirroredStrategy(["/cpu:0", "/cpu:1"])
    with strategy.scope():
        table = strategy.variable(np.zeros((4, 2)), name="table")
    optimizer = strategies.SGD(1.0)

    def step(kinds):
        replica = strategies.get_replica_context().replica_id_in_sync_group
        rows = strategies.Rows([0, replica + 1], np.ones((2, 2)))
        gradient = {"rows": rows, "dense": np.ones((4, 2)), "none": None}[kinds[replica]]
        strategy.apply_gradients(optimizer, [(gradient, table)], examples=1 + 2 * replica)

    strategy.run(step, (["rows", "rows"],))
    assert table.value[:, 0].tolist() == [-1.0, -0.25, -0.75, 0.0]
    strategy.run(step, (["rows", "none"],))
    assert table.value[:, 0].tolist() == [-1.25, -0.5, -0.75, 0.0]
    with pytest.raises(ValueError, match="sparse on some replicas and dense on others"):
        strategy.run(step, (["rows", "dense"],))
    assert table.value[:, 0].tolist() == [-1.25, -0.5, -0.75, 0.0]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_gradients_of_16_bits_are_averaged_in_32(dtype, sparse):
    strategy = strategies.MirroredStrategy(cpus(3))
    w = strategy.variable(np.zeros((3, 1), dtype), name="w")
    optimizer = strategies.SGD(1.0)

    def step():
        gradient = np.full((1 if sparse else 3, 1), 100 + replica_id(), dtype)
        if sparse:
            gradient = strategies.Rows([replica_id()], gradient)
        strategy.apply_gradients(optimizer, [(gradient, w)], examples=1001)

    strategy.run(step)
    mean = [[100 / 3], [101 / 3], [102 / 3]] if sparse else 101
    np.testing.assert_array_equal(w.value, np.broadcast_to(-np.array(mean), (3, 1)).astype(dtype))
