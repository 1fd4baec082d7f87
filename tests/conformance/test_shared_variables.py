"""The same behaviour of a variable here and of a variable on another rank; and what ranks share."""

import threading

import ml_dtypes
import numpy as np
import pytest
from calls import LIMIT, in_thread

import collectives as cc
import strategies
from strategies import Rows
from strategies.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from strategies.variables import initializers, partition

F32 = np.float32

OPTIMIZERS = {
    "SGD": lambda: strategies.SGD(0.1),
    "Momentum": lambda: strategies.Momentum(0.1, 0.9, nesterov=True),
    "LARS": lambda: strategies.LARS(0.1),
    "Adagrad": lambda: strategies.Adagrad(0.1),
    "RMSProp": lambda: strategies.RMSProp(0.1, momentum=0.5),
    "Adam": lambda: strategies.Adam(0.1),
    "AdamW": lambda: strategies.AdamW(0.1, weight_decay=0.1),
}

behaviours = []


def behaviour(function):
    """A property of variables, wherever they are; gets a function that makes one."""
    behaviours.append(function)
    return function


@pytest.mark.parametrize("place", ["here", "on another rank"])
@pytest.mark.parametrize("check", behaviours, ids=lambda check: check.__name__)
def test_behaviour(comm, place, check):
    with strategies.rpc.Service(comm) as service:
        rank = comm.size - 1
        if comm.rank != rank:
            return

        def make(value=None, *, name="v", partitioner=None, **options):
            options = {"service": service, "shared_name": name, "container": "test"} | options
            task = rank if place == "here" else 0
            if partitioner is None:
                return strategies.variables.shared_variable(value, task=task, **options)
            tasks = [task, rank]
            return strategies.variables.shared_partitioned_variable(
                value, partitioner=partitioner, tasks=tasks, **options
            )

        make.reset = lambda: strategies.variables.reset_container("test", service=service)
        check(make)


@behaviour
def every_change_counts_and_is_read_with_its_version(make):
    v = make(np.arange(3.0))
    seen = [(v.read().value.tolist(), v.read().version)]
    for change, argument in ((v.assign, [1, 1, 1]), (v.assign_add, [1, 2, 3]), (v.assign_sub, 1)):
        version = change(np.broadcast_to(np.asarray(argument, float), 3))
        seen.append((v.read().value.tolist(), v.read().version))
        assert version == seen[-1][1]
    assert seen == [([0, 1, 2], 0), ([1, 1, 1], 1), ([2, 3, 4], 2), ([1, 2, 3], 3)]
    assert (v.shape, v.dtype, v.is_initialized()) == ((3,), np.float64, True)


@behaviour
def what_was_read_does_not_change_and_cannot_be_changed(make):
    v = make(np.zeros(4, F32))
    first = v.read().value
    v.assign_add(np.ones(4, F32))
    second = v.read().value
    v.assign(np.full(4, 7, F32))
    v.scatter_add([0], np.ones(1, F32))
    assert (first.tolist(), second.tolist()) == ([0] * 4, [1] * 4)
    assert v.read().value.tolist() == [8, 7, 7, 7]
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


@behaviour
def the_initial_value_is_copied(make):
    mine = np.zeros(3)
    v = make(mine)
    mine[:] = 5
    assert v.read().value.tolist() == [0, 0, 0]


@behaviour
def all_shapes_and_numeric_dtypes_work(make):
    for number, dtype in enumerate(("int8", "uint64", "float16", "complex64", ml_dtypes.bfloat16)):
        for shape in ((), (0,), (2, 3)):
            value = np.ones(shape, dtype)
            v = make(value, name=f"v{number}-{len(shape)}")
            v.assign_add(value)
            got = v.read().value
            assert (got.dtype, got.shape) == (value.dtype, shape)
            np.testing.assert_array_equal(got, value + value)


@behaviour
def large_values_arrive_whole(make):
    value = np.arange(300_000, dtype=F32).reshape(300, 1000)
    v = make(value)
    np.testing.assert_array_equal(v.read().value, value)
    v.assign(value.T.reshape(1000, 300).T)  # not contiguous
    np.testing.assert_array_equal(v.read().value, value.T.reshape(1000, 300).T)
    np.testing.assert_array_equal(v.read_rows(10, 12).value, v.read().value[10:12])


@behaviour
def a_function_is_called_only_if_there_is_no_value(make):
    calls = []

    def initial():
        calls.append(1)
        return np.ones(2)

    assert make(initial).read().value.tolist() == [1, 1]
    assert make(initial).read().value.tolist() == [1, 1]
    assert make(None).read().value.tolist() == [1, 1]
    assert make(np.zeros(2)).read().value.tolist() == [1, 1]  # there is one already
    assert len(calls) == 1


@behaviour
def readers_wait_for_the_initial_value(make):
    v = make(None)
    assert not v.is_initialized()
    with pytest.raises(DeadlineExceededError, match="0.02 s.*; no initial value yet of v$"):
        v.read(timeout=0.02)
    with pytest.raises(DeadlineExceededError):
        v.assign(np.zeros(2), timeout=0.02)
    waiting = [in_thread(v.read), in_thread(v.assign_add, np.ones(2)), in_thread(lambda: v.shape)]
    make(np.full(2, 3.0))
    assert waiting[0].result(LIMIT).value[0] in (3, 4)
    assert waiting[1].result(LIMIT) == 1
    assert waiting[2].result(LIMIT) == (2,)
    assert v.read().value.tolist() == [4, 4]


@behaviour
def who_waits_for_a_value_learns_of_a_reset(make):
    v = make(None)
    waiting = in_thread(v.read, timeout=LIMIT)
    with pytest.raises(DeadlineExceededError):
        v.read(timeout=0.1)  # so that the other one waits, most probably
    make.reset()
    with pytest.raises((CancelledError, NotFoundError)):
        waiting.result(LIMIT)
    with pytest.raises(NotFoundError, match="'v' in container 'test'"):
        v.read()
    again = make(np.ones(1))
    with pytest.raises(AbortedError, match="another resource has this name"):
        v.read()
    assert again.read().version == 0


@behaviour
def calls_that_mean_something_else_are_refused(make):
    make(np.zeros(3), optimizer=strategies.SGD(0.1))
    with pytest.raises(InvalidArgumentError, match=r"another shape, expected \[3\], got \[2\]"):
        make(np.zeros(2))
    with pytest.raises(InvalidArgumentError, match="another dtype, expected float64, got float32"):
        make(np.zeros(3, F32))
    with pytest.raises(InvalidArgumentError, match="another optimizer"):
        make(np.zeros(3), optimizer=strategies.SGD(0.2))
    with pytest.raises(InvalidArgumentError, match="another kind of object"):
        strategies.queues.shared_queue(
            strategies.queues.FIFOQueue, 1, "int8", service=make(None).service, shared_name="v",
            container="test", task=make(None).task,
        )  # fmt: skip
    with pytest.raises(ValueError, match="cannot import this function"):
        make(np.zeros(3), name="w", optimizer=strategies.SGD(lambda step: 0.1))
    with pytest.raises(TypeError, match="expected one of Adagrad Adam AdamW LARS"):
        make(np.zeros(3), name="w", optimizer=strategies.DistributedOptimizer)
    assert make(None).read().value.tolist() == [0, 0, 0]


@behaviour
def wrong_values_are_refused_and_change_nothing(make):
    v = make(np.zeros((4, 2), F32), optimizer=strategies.SGD(0.1))
    wrong = (
        (lambda: v.assign(np.zeros(3)), r"expected \(4, 2\), got \(3,\)"),
        (lambda: v.assign(np.zeros((4, 2), complex)), "expected float32, got complex128"),
        (lambda: v.assign_add(np.zeros((4, 1), F32)), "wrong shape"),
        (lambda: v.scatter_add([4], np.zeros((1, 2), F32)), r"expected 0 .. 3, got 4 .. 4"),
        (lambda: v.scatter_add([-1], np.zeros((1, 2), F32)), "out of range"),
        (lambda: v.scatter_add([0.5], np.zeros((1, 2), F32)), "expected integers"),
        (lambda: v.scatter_update([0, 1], np.zeros((1, 2), F32)), "a row for every index"),
        (lambda: v.gather([9]), "out of range"),
        (lambda: v.gather(["a"]), "not integers"),
        (lambda: v.read_rows(2, 1), "start <= stop"),
        (lambda: v.apply_gradients(np.zeros((4, 1), F32)), "gradient does not fit"),
        (lambda: v.apply_gradients(Rows([4], np.zeros((1, 2), F32))), "out of range"),
        (lambda: v.apply_gradients(np.zeros((4, 2), F32), seen=1), "not been there yet"),
    )
    for call, message in wrong:
        with pytest.raises(InvalidArgumentError, match=message):
            call()
    assert v.read().version == 0
    number = make(1.0, name="number")
    for call in (lambda: number.gather([0]), lambda: number.scatter_add([0], [1.0])):
        with pytest.raises(InvalidArgumentError, match="variable of 0 dimensions"):
            call()
    with pytest.raises(InvalidArgumentError, match="has no rows"):
        number.read_rows(0, 1)
    with pytest.raises(FailedPreconditionError, match="no optimizer"):
        make(np.zeros(1), name="w").apply_gradients(np.zeros(1))


@behaviour
def rows_are_added_subtracted_and_set(make):
    v = make(np.zeros((5, 2), np.int64))
    rows = np.array([[1, 1], [2, 2], [4, 4]])
    assert v.scatter_add([3, 0, 3], rows) == 1
    assert v.read().value[:, 0].tolist() == [2, 0, 0, 5, 0]
    assert v.scatter_sub([3, 3, 4], rows) == 2
    assert v.read().value[:, 0].tolist() == [2, 0, 0, 2, -4]
    assert v.scatter_update([1, 2, 1], rows) == 3
    assert v.read().value[:, 1].tolist() == [2, 4, 2, 2, -4]
    assert v.scatter_add(np.empty(0, np.int64), np.empty((0, 2), np.int64)) == 4
    found = v.gather([[4, 0], [4, 1]])
    assert (found.value[..., 0].tolist(), found.version) == ([[-4, 2], [-4, 4]], 4)
    assert v.gather(np.empty(0, int)).value.shape == (0, 2)
    assert v.gather([[0, 1], [2, 3]]).value.shape == (2, 2, 2)


@behaviour
def sums_of_rows_are_those_of_floats(make):
    for dtype in ("float16", ml_dtypes.bfloat16, "float64"):
        v = make(np.zeros(3, dtype), name=np.dtype(dtype).name)
        v.scatter_add([1, 1, 2], np.array([1, 2, 4], dtype))
        assert v.read().value.astype(float).tolist() == [0, 3, 4]


@behaviour
def optimizers_do_what_they_do_elsewhere(make):
    random = np.random.default_rng(3)
    for name, optimizer in OPTIMIZERS.items():
        start = random.standard_normal((6, 3)).astype(F32)
        v, twin, mine = make(start, name=name, optimizer=optimizer()), optimizer(), start.copy()
        for step in range(3):
            gradient = random.standard_normal((6, 3)).astype(F32)
            twin.apply_gradients([(gradient, mine)])
            assert v.apply_gradients(gradient) == (2 * step + 1, None, True)
            rows = Rows([5, 1, 5], random.standard_normal((3, 3)).astype(F32))
            twin.apply_gradients([(rows, mine)])
            v.apply_gradients(rows)
            np.testing.assert_array_equal(v.read().value, mine, err_msg=name)


@behaviour
def staleness_is_counted_dropped_and_scaled(make):
    v = make(np.zeros(2), optimizer=strategies.SGD(1.0))
    one = np.ones(2)
    assert v.apply_gradients(one, seen=0) == (1, 0, True)
    assert v.apply_gradients(one, seen=0) == (2, 1, True)
    assert v.apply_gradients(one, seen=0, most_stale=1) == (2, 2, False)
    assert v.apply_gradients(one, seen=1, most_stale=1) == (3, 1, True)
    assert v.read().value.tolist() == [-3, -3]
    assert v.apply_gradients(one, seen=2, scale_stale=True) == (4, 1, True)
    assert v.read().value.tolist() == [-3.5, -3.5]
    v.apply_gradients(one, learning_rate=0.25)
    assert v.read().value.tolist() == [-3.75, -3.75]
    v.apply_gradients(one)
    assert v.read().value.tolist() == [-4.75, -4.75]
    with pytest.raises(ValueError, match="bad rate"):
        v.apply_gradients(one, learning_rate=-1)


def halved(step):
    return 0.5**step


@behaviour
def a_learning_rate_may_be_a_function_with_a_name(make):
    v = make(np.zeros(1), optimizer=strategies.SGD(halved))
    for _ in range(3):
        v.apply_gradients(np.ones(1))
    assert v.read().value.tolist() == [-1.75]


@behaviour
def values_travel_as_16_bits_on_request(make):
    value = np.array([1 / 3, 1e-3, 1000.5, np.inf], F32)
    for compression, dtype in ((cc.FP16, np.float16), (cc.BF16, ml_dtypes.bfloat16)):
        rounded = value.astype(dtype).astype(F32)
        v = make(value, name=dtype.__name__, optimizer=strategies.SGD(1.0))
        got = v.read(compression=compression).value
        assert got.dtype == F32
        np.testing.assert_array_equal(got, rounded)
        np.testing.assert_array_equal(v.read().value, value)
        v.assign(value, compression=compression)
        np.testing.assert_array_equal(v.read().value, rounded)
        np.testing.assert_array_equal(
            v.gather([2, 0], compression=compression).value, rounded[[2, 0]]
        )
        v.assign(np.zeros(4, F32))
        v.apply_gradients(value[:4], compression=compression)
        np.testing.assert_array_equal(v.read().value, -rounded)
        v.assign(np.zeros(4, F32), compression=None)
        v.apply_gradients(value, compression=None)
        np.testing.assert_array_equal(v.read(compression=None).value, -value)
    whole = make(np.arange(3), name="integers")
    assert whole.read(compression=cc.FP16).value.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="everywhere or not at all"):
        whole.read(compression=cc.FP16.on("network"))
    with pytest.raises(ValueError, match="expected one of none float16 bfloat16, got int8"):
        whole.assign(np.arange(3), compression=cc.INT8)


@behaviour
def what_rounding_leaves_over_is_not_lost_with_feedback(make):
    v = make(np.zeros(1, F32), optimizer=strategies.SGD(1.0))
    feedback = cc.BF16.with_feedback()
    step = np.array([1 + 2**-10], F32)  # would round to 1 every time
    for _ in range(8):
        v.apply_gradients(step, compression=feedback)
    assert abs(v.read().value[0] + 8 * step[0]) <= 2**-8
    assert v.read().value[0] != -8


@behaviour
def many_are_read_and_changed_together(make):
    names = [f"v{n}" for n in range(20)]
    values = [np.full(n, n, F32) for n in range(20)]
    pairs = zip(names, values, strict=True)
    optimizer = strategies.SGD(1.0)
    made = [make(value, name=name, optimizer=optimizer) for name, value in pairs]
    for reading, value in zip(strategies.variables.read_all(made), values, strict=True):
        np.testing.assert_array_equal(reading.value, value)
        assert reading.version == 0
    gradients = [None if n == 3 else np.ones(n, F32) for n in range(20)]
    updates = strategies.variables.apply_all(zip(gradients, made, strict=True), seen=[0] * 20)
    assert updates == [None if n == 3 else (1, 0, True) for n in range(20)]
    strategies.variables.assign_all([(np.zeros(2, F32), made[2])])
    after = strategies.variables.read_all(made)
    assert [r.version for r in after[:4]] == [1, 1, 2, 0]
    assert [r.value.tolist() for r in after[:4]] == [[], [0], [0, 0], [3, 3, 3]]
    assert strategies.variables.read_all([]) == []
    assert strategies.variables.apply_all([]) == []
    with pytest.raises(InvalidArgumentError, match="v5"):
        strategies.variables.assign_all(
            [(np.zeros(n), made[n]) if n != 5 else (1, made[n]) for n in (4, 5)]
        )


@behaviour
def updates_of_many_threads_add_up(make):
    v = make(np.zeros(50_000), optimizer=strategies.SGD(1.0))
    torn = []

    def push():
        for _ in range(5):
            v.apply_gradients(np.full(50_000, -1.0))
            value = v.read().value
            torn.extend(value[value != value[0]])

    threads = [in_thread(push) for _ in range(3)]
    for thread in threads:
        thread.result(LIMIT)
    assert not torn
    assert v.read().version == 15
    assert set(v.read().value) == {15.0}


@behaviour
def parts_are_used_as_one(make):
    value = np.arange(20.0).reshape(10, 2)
    v = make(value, partitioner=partition.fixed_size(3))
    assert [part.name for part in v.parts] == ["v/part_0", "v/part_1", "v/part_2"]
    assert [part.shape for part in v.parts] == [(4, 2), (3, 2), (3, 2)]
    assert (v.shape, v.dtype, v.offsets) == ((10, 2), np.float64, (0, 4, 7, 10))
    np.testing.assert_array_equal(v.read().value, value)
    np.testing.assert_array_equal(v.read_rows(3, 8).value, value[3:8])
    np.testing.assert_array_equal(v.read_rows(8, 99).value, value[8:])
    found = v.gather([[9, 0], [0, 1]])
    np.testing.assert_array_equal(found.value, value[[[9, 0], [0, 1]]])
    assert found.version == (0, None, 0)
    assert v.gather(np.empty(0, int)).value.shape == (0, 2)
    assert v.gather([[0, 1], [2, 3]]).value.shape == (2, 2, 2)
    assert v.scatter_update([9, 0, 9], np.ones((3, 2))) == (1, None, 1)
    assert v.scatter_add([5, 5], np.ones((2, 2))) == (None, 1, None)
    value[[9, 0]] = 1
    value[5] += 2
    np.testing.assert_array_equal(v.read().value, value)
    assert v.assign_add(np.ones((10, 2))) == (2, 2, 2)
    assert v.assign(value) == (3, 3, 3)
    for wrong in (lambda: v.gather([10]), lambda: v.scatter_add([-1], np.ones((1, 2)))):
        with pytest.raises(InvalidArgumentError, match="out of range, expected 0 .. 9"):
            wrong()
    with pytest.raises(InvalidArgumentError, match="wrong shape"):
        v.assign(np.ones((9, 2)))
    np.testing.assert_array_equal(make(None, partitioner=partition.fixed_size(3), shape=(10, 2),
                                       dtype=float).read().value, value)  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="another"):
        make(value, partitioner=partition.fixed_size(2))


def counted(first, last, shape, dtype):
    """Rows by number, at the top of a module: other tasks find it by its name."""
    return np.arange(first * 2.0, last * 2.0).reshape(-1, 2).astype(dtype)


@behaviour
def parts_are_made_one_by_one_and_where_they_live_if_that_is_possible(make):
    shape, asked = (100_001, 2), []
    normal = initializers.normal(0.5, mean=1.0, seed=3)

    def own(first, last, shape, dtype):  # which no other task can import
        asked.append((first, last, shape, dtype))
        return counted(first, last, shape, dtype)

    cases = {"normal": normal, "zeros": initializers.zeros(), "counted": counted, "own": own}
    for name, initializer in cases.items():
        for axis, count in ((0, 1), (0, 3), (1, 2)):
            v = make(
                initializer, partitioner=partition.fixed_size(count, axis), shape=shape,
                name=f"{name} {axis} {count}", optimizer=strategies.SGD(1.0),
            )  # fmt: skip
            whole = initializer(0, shape[0], shape, np.dtype(F32))
            assert (v.dtype, len(v.parts)) == (F32, count)
            found = v.read()
            np.testing.assert_array_equal(found.value, whole)
            v.apply_gradients(np.ones(shape, F32))
            np.testing.assert_array_equal(v.read().value, whole - 1)
    ends = [(0, 33334), (33334, 66668), (66668, 100_001)]
    assert [(first, last) for first, last, *_ in asked if last - first < shape[0]] == ends
    again = make(  # whose value is there
        lambda *_: 1 / 0, partitioner=partition.fixed_size(3), shape=shape, name="own 0 3"
    )
    np.testing.assert_array_equal(again.read().value[1], [1, 2])


def too_few(first, last, shape, dtype):
    return np.zeros((1, 2), dtype)


@behaviour
def initializers_of_no_use_are_refused_and_another_one_may_follow(make):
    def wrong(initializer, error, match, shape=(10, 2)):
        with pytest.raises(error, match=match):
            make(initializer, partitioner=partition.fixed_size(2), shape=shape)

    for initializer in (too_few, lambda *asked: too_few(*asked)):
        wrong(initializer, InvalidArgumentError, r"expected \(5, 2\), got \(1, 2\) \(variable: v\)")
    wrong(lambda *_: [["text"] * 2] * 5, (InvalidArgumentError, TypeError), "not an array of numb")
    wrong(counted, ValueError, "expected a shape of at least one axis for an initializer", ())
    wrong(counted, ValueError, "expected an array, or shape and dtype", None)
    v = make(counted, partitioner=partition.fixed_size(2), shape=(10, 2))
    np.testing.assert_array_equal(v.read().value, counted(0, 10, (10, 2), F32))


@behaviour
def an_array_that_an_initializer_returns_stays_as_it_is(make):
    own = np.zeros((10, 2), F32)
    v = make(lambda first, last, *_: own[first:last], partitioner=partition.fixed_size(2),
             shape=(10, 2))  # fmt: skip
    v.assign_add(np.ones((10, 2), F32))
    assert v.read().value.sum() == 20
    assert not own.any()


@behaviour
def parts_may_be_along_another_axis_or_only_one(make):
    value = np.arange(12.0).reshape(2, 6)
    v = make(value, partitioner=partition.fixed_size(4, axis=1))
    assert [part.shape for part in v.parts] == [(2, 2), (2, 2), (2, 1), (2, 1)]
    np.testing.assert_array_equal(v.read().value, value)
    np.testing.assert_array_equal(v.read_rows(1, 2).value, value[1:2])
    with pytest.raises(InvalidArgumentError, match="partitioned along axis 0"):
        v.gather([0])
    one = make(np.float64(3.0), name="one", partitioner=partition.fixed_shards(4))
    assert (one.read().value.tolist(), one.shape) == (3.0, ())
    with pytest.raises(ValueError, match="shape and dtype"):
        make(None, name="unknown", partitioner=partition.fixed_shards(4))


@behaviour
def gradients_of_parts_are_those_of_the_whole(make):
    random = np.random.default_rng(5)
    for name in ("Momentum", "Adam"):
        start = random.standard_normal((7, 2)).astype(F32)
        v = make(
            start, name=name, partitioner=partition.fixed_size(3), optimizer=OPTIMIZERS[name]()
        )
        twin, mine = OPTIMIZERS[name](), start.copy()
        gradient = random.standard_normal((7, 2)).astype(F32)
        twin.apply_gradients([(gradient, mine)])
        assert v.apply_gradients(gradient, seen=(0, 0, 0)) == ((1, 1, 1), 0, True)
        rows = Rows([6, 0, 6, 3], random.standard_normal((4, 2)).astype(F32))
        twin.apply_gradients([(rows, mine)])
        assert v.apply_gradients(rows, seen=(0, 1, None)) == ((2, 2, 2), 1, True)
        np.testing.assert_array_equal(v.read().value, mine)
        only = Rows([6], np.ones((1, 2), F32))
        updates = strategies.variables.apply_all(
            [(only, v), (None, v)], seen=[v.read().version, None]
        )
        assert updates == [((None, None, 3), 0, True), None]
        assert strategies.variables.read_all([v])[0].version == (2, 2, 3)


def test_all_ranks_update_one_variable(comm):
    with strategies.rpc.Service(comm) as service:
        start = np.zeros(4) if comm.rank == comm.size - 1 else None
        v = strategies.variables.shared_variable(
            start, service=service, shared_name="v", task=0, optimizer=strategies.SGD(1.0)
        )
        versions = []
        for _ in range(5):
            reading = v.read(timeout=LIMIT)
            versions.append(reading.version)
            update = v.apply_gradients(-np.full(4, comm.rank + 1.0), seen=reading.version)
            assert update.version == reading.version + update.staleness + 1
        assert versions == sorted(versions)
        comm.barrier()
        total = 5 * sum(range(1, comm.size + 1))
        assert v.read().value.tolist() == [total] * 4
        assert v.read().version == 5 * comm.size


def test_functions_run_on_tasks(comm):
    with strategies.rpc.Service(comm) as service:
        task = strategies.rpc.Task(service, 0)
        assert task.run("math:hypot", 3, 4) == 5.0
        assert task.run("builtins:sorted", [3, 1, 2], reverse=True) == [3, 2, 1]
        array = np.arange(100_000.0) + comm.rank
        futures = [task.submit("numpy:multiply", array, n) for n in range(3)]
        for n, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(LIMIT), n * array)
        nested = {"a": (1, None, [b"x", "ä"]), 2: np.float32(0.5), "c": 1j}
        got = task.run("copy:copy", nested)
        assert got == nested
        assert type(got[2]) is np.float32
        with pytest.raises(ZeroDivisionError, match="math domain|modulo|division") as caught:
            task.run("operator:truediv", 1, 0)
        if comm.rank:
            assert "Traceback" in str(caught.value.__cause__)
        with pytest.raises(NotFoundError, match="no function of this name"):
            task.run("no_such_module:f")
        with pytest.raises(KeyError, match="'x'"):
            task.run("operator:getitem", {}, "x")
        with pytest.raises(ValueError, match="cannot import this function"):
            task.run(lambda: 1)
        if comm.rank:
            with pytest.raises(TypeError, match="cannot be sent"):
                task.run("builtins:len", object())
            with pytest.raises(TypeError, match="cannot be sent"):
                task.run("builtins:object")
        done = threading.Event()
        future = task.submit("math:sqrt", 4.0)
        future.add_done_callback(lambda _: done.set())
        assert done.wait(LIMIT)
