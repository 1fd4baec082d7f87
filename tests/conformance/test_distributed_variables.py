"""Variables that replicas write: on all alike, or each its own."""

import numpy as np
import pytest

import collectives as cc
import strategies

MAKE = {
    "multi worker": lambda comm, devices: strategies.MultiWorkerMirroredStrategy(
        comm, devices=devices
    ),
    "central storage": lambda comm, devices: strategies.CentralStorageStrategy(devices, comm=comm),
}


def cpus(count):
    return [f"/cpu:{i}" for i in range(count)]


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} devices")
def count(request):
    return request.param


def replica_id():
    return strategies.get_replica_context().replica_id_in_sync_group


WRITES = [
    (aggregation, write)
    for aggregation in ("sum", "MEAN", "only_first_replica")
    for write in ("assign", "assign_add", "assign_sub")
]


def test_what_replicas_write_is_combined_on_write(world, make, count):
    def check(comm):
        strategy = make(comm, cpus(count))
        for aggregation, write in WRITES:
            check_one(strategy, comm.size * count, aggregation, write)

    def check_one(strategy, total, aggregation, write):
        v = strategy.variable(1.0, aggregation=aggregation)

        def step():
            getattr(v, write)(replica_id() + 1.0)
            return v.value.item()

        combined = {
            "sum": total * (total + 1) / 2,
            "MEAN": (total + 1) / 2,
            "only_first_replica": 1.0,
        }[aggregation]
        expected = {"assign_add": 1 + combined, "assign_sub": 1 - combined, "assign": combined}
        results = strategy.local_results(strategy.run(step))
        assert set(results) == {expected[write]}  # at once, in every replica
        assert v.value == expected[write]

    world.run(check)


def test_without_an_aggregation_copies_would_differ(comm, make, count):
    strategy = make(comm, cpus(count))
    v = strategy.variable(1.0, name="v")

    def step():
        v.assign_add(replica_id() + 1.0)

    if strategy.num_replicas_in_sync == 1:
        strategy.run(step)
        assert v.value == 2
        return
    with pytest.raises(ValueError, match=r"without an aggregation, .* \(variable: v\)"):
        strategy.run(step)
    assert v.value == 1
    v.assign(3.0)  # outside of replicas, on all ranks
    assert strategy.local_results(strategy.run(lambda: v.value.item()))[0] == 3


def test_a_replica_does_not_change_an_array_that_it_shares(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(2))
    v = strategy.variable(np.zeros(2), name="v")

    def step():
        v.value[...] = 1

    with pytest.raises(ValueError, match="read-only"):
        strategy.run(step)
    v.value[...] = 2
    assert strategy.local_results(strategy.run(lambda: v.value.sum().item()))[0] == 4


@pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
def test_on_read_each_replica_has_its_own(comm, make, count, aggregation):
    strategy = make(comm, cpus(count))
    total = comm.size * count
    v = strategy.variable(1.0, name="v", synchronization="ON_READ", aggregation=aggregation)

    def step():
        v.assign_add(replica_id() + 1.0)
        return v.value.item()

    own = strategy.local_results(strategy.run(step))
    first = comm.rank * count
    assert own == tuple(2.0 + first + i for i in range(count))
    assert tuple(component.item() for component in strategy.local_results(v)) == own
    everyones = [2.0 + i for i in range(total)]
    expected = {
        "sum": sum(everyones),
        "mean": np.mean(everyones),
        "only_first_replica": 2.0,
        "none": 2.0,
    }[aggregation]
    if aggregation == "none" and total > 1:
        with pytest.raises(ValueError, match="is read outside of replicas"):
            assert v.value
    else:
        np.testing.assert_allclose(v.value, expected)
        v.value[...] = -1  # a new array
        assert tuple(component.item() for component in strategy.local_results(v)) == own


def test_a_sum_that_is_assigned_is_shared_among_the_replicas(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    total = comm.size * count
    both = {"synchronization": "on_read", "aggregation": "sum"}
    v = strategy.variable(0.0, name="v", **both)
    n = strategy.variable(0, name="n", **both)
    v.assign(6.0)
    n.assign(7)
    assert v.components[0] == 6 / total
    np.testing.assert_allclose(v.value, 6)
    assert n.value == 7
    if total > 1:
        with pytest.raises(ValueError, match="changed outside of replicas"):
            v.assign_add(1.0)
        with pytest.raises(ValueError, match="changed outside of replicas"):
            v.assign_sub(1.0)
    mean = strategy.variable(1.0, synchronization="on_read", aggregation="mean")
    mean.assign_add(2.0)
    assert all(component == 3 for component in mean.components)
    assert mean.value == 3


def test_a_checkpoint_has_one_value_and_gives_each_replica_its_share(comm, tmp_path):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(2))
    v = strategy.variable(0.0, synchronization="on_read", aggregation="sum")
    strategy.run(lambda: v.assign(replica_id() + 1.0))
    total = comm.size * 2
    saved = v.value  # all ranks take part
    assert saved == total * (total + 1) / 2
    v.assign(np.zeros(()))
    v.assign(saved)
    assert v.value == saved


def test_every_replica_starts_from_the_chiefs_value(comm, make, count):
    strategy = make(comm, cpus(count))
    for kind in ("on_write", "on_read"):
        v = strategy.variable(
            lambda: np.full(3, comm.rank), name=kind, synchronization=kind, aggregation="sum"
        )
        for component in v.components:
            np.testing.assert_array_equal(component, 0)


def test_variables_that_differ_between_ranks_are_one_clear_error_on_all(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    other = comm.rank == 1
    if comm.size == 1:
        return
    with pytest.raises(cc.MismatchError, match=r"'variable b' on rank 0, 'variable w' on rank 1"):
        strategy.variable(np.zeros(2), name="w" if other else "b")
    with pytest.raises(cc.MismatchError, match="dtype is float64 on .*, float32 on rank 1"):
        strategy.variable(np.zeros(2, np.float32 if other else np.float64), name="w")
    with pytest.raises(cc.MismatchError, match=r"shape is \(2,\) on .*, \(3,\) on rank 1"):
        strategy.variable(np.zeros(3 if other else 2), name="w")

    def initial():
        if other:
            raise OSError("no such file: start.npy")
        return np.zeros(2)

    with pytest.raises(OSError if other else RuntimeError, match=r"start\.npy"):
        strategy.variable(initial, name="w")
    assert strategy.variable(np.ones(2), name="w").value.sum() == 2


def test_wrong_values_in_one_replica_are_an_error_on_all(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    v = strategy.variable(np.zeros(2), name="v", aggregation="sum")

    def step(value):
        v.assign(value if replica_id() == 0 else np.ones(2))

    with pytest.raises(ValueError, match=r"expected \(2,\), got \(3,\) \(variable: v\)"):
        strategy.run(step, args=(np.ones(3),))
    with pytest.raises(TypeError, match="expected float64, got complex128"):
        strategy.run(step, args=(np.ones(2) * 1j,))
    np.testing.assert_array_equal(v.value, 0)
    strategy.run(step, args=(np.ones(2),))
    np.testing.assert_array_equal(v.value, comm.size * count)
