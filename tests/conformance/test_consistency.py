"""Parameters and settings that differ between ranks are an error on all before the first step."""

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import strategies


def last(comm):
    """Whether this is the rank that differs."""
    return comm.rank == comm.size - 1 > 0


def changed(array, comm):
    """The same array on all ranks, but for the last bit of the last one's last element."""
    if last(comm):
        array = array.copy()
        array.reshape(-1).view(np.uint8)[-array.itemsize] ^= 1
    return array


def assert_differs(comm, words, function):
    """All ranks raise the same error, or none if there is only one."""
    if comm.size == 1:
        function()
        return
    with pytest.raises(cc.MismatchError, match=words) as caught:
        function()
    assert len(set(comm.allgather_object(str(caught.value)))) == 1


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(5, dtype=np.int64),
        np.ones(3, np.float16),
        np.ones(3, ml_dtypes.bfloat16),
        np.array(2.5),
        np.arange(12.0).reshape(3, 4).T,
        np.array([True, False]),
        np.full(2, np.nan),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_one_bit_of_one_array_is_found(comm, array):
    strategies.check_consistent({"w": array, "empty": np.empty((0, 2))}, comm=comm)
    words = rf"check_consistent: .* values, w: {array.dtype} of shape .* on rank {comm.size - 1} is"
    given = {"w": changed(array.copy(), comm)}
    assert_differs(comm, words, lambda: strategies.check_consistent(given, comm=comm))
    strategies.check_consistent([array], comm=comm)


def test_values_of_every_kind(comm):
    variable = strategies.Variable(np.ones(2), name="v")
    alike = [variable, {"rate": 0.1, "text": "adam", "none": None}]
    strategies.check_consistent(alike, comm=comm)
    strategies.check_consistent([], comm=comm)
    mine = {"step": 7 + last(comm)}
    words = rf"step: int is 7 on rank 0, 8 on rank {comm.size - 1}"
    assert_differs(comm, words, lambda: strategies.check_consistent(mine, comm=comm))
    zero = [-0.0 if last(comm) else 0.0]
    assert_differs(comm, "is 0.0 on rank 0", lambda: strategies.check_consistent(zero, comm=comm))
    fewer = {} if last(comm) else {"w": np.ones(2)}
    words = rf"w: float64 of shape \(2,\) on rank 0, nothing on rank {comm.size - 1}"
    assert_differs(comm, words, lambda: strategies.check_consistent(fewer, comm=comm))
    wrong = object() if last(comm) or comm.size == 1 else 1
    with pytest.raises(TypeError, match=r"expected arrays, numbers and text, got object \(a\)"):
        strategies.check_consistent({"a": wrong}, comm=comm)


def step(optimizer, variable):
    optimizer.apply_gradients([(np.ones(3), variable)])


def test_a_forgotten_broadcast_is_an_error_before_the_first_step(comm):
    w = strategies.Variable(np.full(3, float(comm.rank)), name="w")
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    others = "rank 1" if comm.size == 2 else "ranks 1 2"
    words = rf"w: .* on {others}.* is not as on rank 0; call strategies.broadcast_parameters\("
    before = w.value.copy()
    if comm.size > 1:
        assert_differs(comm, words, lambda: step(optimizer, w))
        np.testing.assert_array_equal(w.value, before)
    strategies.broadcast_parameters([w], comm=comm)
    step(optimizer, w)
    np.testing.assert_array_equal(w.value, np.full(3, -1.0))


def test_a_rank_without_a_gradient_is_compared_too(comm):
    w = strategies.Variable(np.full(3, float(last(comm))), name="w")
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    pairs = [(None if last(comm) else np.ones(3), w)]
    assert_differs(comm, "broadcast_parameters", lambda: optimizer.apply_gradients(pairs))


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("learning_rate is 0.1 on rank 0, 0.2", lambda odd: strategies.SGD(0.2 if odd else 0.1)),
        ("class is 'SGD' on rank 0, 'Adam'", lambda odd: (strategies.SGD, strategies.Adam)[odd](1)),
        ("momentum is 0.9 on rank 0, 0.8", lambda odd: strategies.Momentum(1, 0.8 if odd else 0.9)),
        (
            "learning_rate is 0.1 on rank 0, 0.2",
            lambda odd: strategies.SGD(lambda step: 0.2 if odd else 0.1),
        ),
    ],
)
def test_other_settings_are_an_error_unless_they_are_meant(comm, words, make):
    def optimizer(compare="all"):
        return strategies.DistributedOptimizer(make(last(comm)), comm=comm, compare=compare)

    w = strategies.Variable(np.ones(3), name="w")
    assert_differs(comm, f"in their settings, {words}", lambda: step(optimizer(), w))
    w = strategies.Variable(np.ones(3), name="w")
    step(optimizer("parameters"), w)
    w = strategies.Variable(np.full(3, float(comm.rank)), name="w")
    step(optimizer("nothing"), w)


@pytest.mark.parametrize("every", [None, 2])
def test_a_rate_that_differs_in_a_later_step_is_an_error_in_that_step(comm, every):
    rates = [0.0, 0.5, 1.0 if last(comm) else 0.5, 0.5]
    rate = strategies.SGD(lambda step: rates[step])
    optimizer = strategies.DistributedOptimizer(rate, comm=comm, compare_every=every)
    w = strategies.Variable(np.ones(3), name="w")
    step(optimizer, w)
    step(optimizer, w)
    words = (
        rf"in their settings, learning_rate is 0.5 on rank 0, 1.0 on rank {comm.size - 1}; "
        r"give all ranks the same options, and a schedule .*comm.allreduce\(loss\); compare="
    )
    if comm.size > 1:
        assert_differs(comm, words, lambda: step(optimizer, w))
        rates[2] = 0.5
    np.testing.assert_array_equal(w.value, 0.5)
    step(optimizer, w)
    step(optimizer, w)
    np.testing.assert_array_equal(w.value, -0.5)


def test_rates_that_differ_on_purpose_and_integers_among_floats_are_no_error(comm):
    rates = [1, 1.0, 2.0 if last(comm) else 1.0]
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(lambda step: rates[step]), comm=comm, compare="parameters"
    )
    w = strategies.Variable(np.ones(3), name="w")
    for _ in rates:
        step(optimizer, w)
    typed = strategies.SGD(lambda step: (int, float)[last(comm)](step))
    optimizer = strategies.DistributedOptimizer(typed, comm=comm)
    for _ in range(3):
        step(optimizer, strategies.Variable(np.ones(3), name="w"))


def test_a_schedule_that_fails_on_one_rank_is_an_error_on_all(comm):
    def rate(count):
        if count == 2 and comm.rank == comm.size - 1:
            raise ValueError("no rate for step 2")
        return 0.5

    optimizer = strategies.DistributedOptimizer(strategies.SGD(rate), comm=comm)
    w = strategies.Variable(np.ones(3), name="w")
    step(optimizer, w)
    step(optimizer, w)
    with pytest.raises(ValueError, match="no rate for step 2"):
        step(optimizer, w)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_strategies_compare_schedules_where_every_rank_updates(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm=comm)
    rates = [0.5, 1.0 if last(comm) else 0.5]
    optimizer = strategies.SGD(lambda step: rates[step])
    w = strategy.variable(np.ones(3), name="w")

    def apply():
        strategy.run(lambda: strategy.apply_gradients(optimizer, [(np.ones(3), w)]))

    apply()
    words = f"learning_rate is 0.5 on rank 0, 1.0 on rank {comm.size - 1}; give all ranks"
    assert_differs(comm, words, apply)


def test_defaults_that_are_written_out_are_the_same_settings(comm):
    inner = strategies.Momentum(np.float64(1), 0.9) if last(comm) else strategies.Momentum(1)
    optimizer = strategies.DistributedOptimizer(inner, comm=comm)
    step(optimizer, strategies.Variable(np.ones(3), name="w"))


def test_a_state_that_one_rank_has_loaded_is_an_error_until_all_have_it(comm):
    inner = strategies.Momentum(0.1)
    if last(comm):
        inner.load_state_dict({"step": 5, "momentum/w": np.ones(3, np.float32)})
    optimizer = strategies.DistributedOptimizer(inner, comm=comm)
    w = strategies.Variable(np.ones(3, np.float32), name="w")
    if comm.size > 1:
        words = "optimizer state, .*; call strategies.broadcast_optimizer_state"
        assert_differs(comm, words, lambda: step(optimizer, w))
    strategies.broadcast_optimizer_state(optimizer, comm.size - 1, comm=comm)
    step(optimizer, w)
    assert optimizer.step == (6 if comm.size > 1 else 1)


def test_comparing_again_finds_what_has_changed_since(comm):
    w = strategies.Variable(np.ones(3), name="w")
    optimizer = strategies.DistributedOptimizer(strategies.SGD(0.5), comm=comm, compare_every=3)
    step(optimizer, w)
    w.value[:] += last(comm)
    step(optimizer, w)
    words = "parameters, w: .*, which were alike in an earlier step$"
    assert_differs(comm, words, lambda: step(optimizer, w))


def test_parameters_that_come_later_are_compared_then(comm):
    w = strategies.Variable(np.ones(3), name="w")
    optimizer = strategies.DistributedOptimizer(strategies.SGD(0.5), comm=comm)
    step(optimizer, w)
    later = strategies.Variable(np.full(3, float(last(comm))), name="later")
    pairs = [(np.ones(3), w), (np.ones(3), later)]
    words = r"later: float64 of shape \(3,\) on rank \d is not as on rank 0; call"
    assert_differs(comm, words, lambda: optimizer.apply_gradients(pairs))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"compare": "weights"},
            "no such compare, expected one of all parameters nothing, got 'weights'",
        ),
        ({"compare_every": 0}, "bad compare_every, expected an integer >= 1, got 0"),
        ({"compare_every": 1.5}, "bad compare_every, expected an integer >= 1, got 1.5"),
    ],
)
def test_options_that_make_no_sense(comm, options, words):
    with pytest.raises(ValueError, match=words):
        strategies.DistributedOptimizer(strategies.SGD(0.5), comm=comm, **options)
