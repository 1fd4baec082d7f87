"""Optimizers against the same formulas in float64, over 100 steps."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from strategies import optimizers
from strategies.optimizers import SGD, Momentum

STEPS = 100
# (shape, how the array lies in memory); the last is longer than one tile and no multiple of it
SHAPES = [(), (1,), (0,), (3, 5), (257, 3), (2 * optimizers._TILE + 7,)]
MAKERS = {
    "sgd": lambda rate: SGD(rate),
    "momentum": lambda rate: Momentum(rate, 0.9),
    "nesterov": lambda rate: Momentum(rate, 0.9, nesterov=True),
}


def oracle(name, weights, gradients, rate):
    """PyTorch's published formulas (dampening 0, no weight decay), in float64."""
    weights = weights.astype(np.float64)
    buffer = None
    for step, gradient in enumerate(gradients):
        direction = gradient.astype(np.float64)
        if name != "sgd":
            buffer = direction if buffer is None else 0.9 * buffer + direction
            direction = direction + 0.9 * buffer if name == "nesterov" else buffer
        weights = weights - rate(step) * direction
    return weights


def rounding_bound(steps, weights, largest_change, eps):
    """Each step rounds the variable once and its change in at most six operations.

    Momentum adds up to 1 / (1 - 0.9) = 10 steps' worth of gradient rounding.
    """
    return steps * eps * (np.abs(weights).max(initial=0) + largest_change * 6 * 10)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_follows_the_formula_for_100_steps(name, shape, dtype):
    rng = np.random.default_rng(7)
    steps = STEPS if np.prod(shape) < 10_000 else 10
    weights = rng.standard_normal(shape).astype(dtype)
    gradients = [np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(steps)]
    expected = oracle(name, np.asarray(weights), gradients, lambda step: 0.05)
    variable = np.array(weights)
    optimizer = MAKERS[name](0.05)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, variable)])
    assert optimizer.step == steps
    bound = rounding_bound(steps, expected, 0.05 * 5 * 20, np.finfo(dtype).eps)
    assert np.abs(variable - expected).max(initial=0) <= bound
    assert variable.dtype == dtype


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_variables_are_computed_in_float32_and_rounded_once_per_step(name, dtype):
    rng = np.random.default_rng(8)
    variable = rng.standard_normal(1000).astype(dtype)
    # The same in float32, rounded to 16 bits after every step, must give the same bits.
    wide = variable.astype(np.float32)
    optimizer, reference = MAKERS[name](0.05), MAKERS[name](0.05)
    for _ in range(STEPS):
        gradient = rng.standard_normal(1000).astype(dtype)
        optimizer.apply_gradients([(gradient, variable)])
        reference.apply_gradients([(gradient.astype(np.float32), wide)])
        wide = wide.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(variable.astype(np.float32), wide)
    assert all(slot.dtype == np.float32 for slot in getattr(optimizer, "_slots", {}).values())


def test_large_float16_gradients_do_not_overflow_in_between():
    variable = np.zeros(3, np.float16)
    optimizer = Momentum(1e-3, 0.9)
    for _ in range(3):
        optimizer.apply_gradients([(np.full(3, 60000, np.float16), variable)])
    assert np.isfinite(variable).all()


def test_callable_learning_rate_is_asked_for_the_steps_already_made():
    asked = []

    def rate(step):
        asked.append(step)
        return np.float64(0.1) / (step + 1)

    variable = np.ones(4, np.float32)
    optimizer = Momentum(rate, 0.9)
    gradients = [np.full(4, 0.5, np.float32)] * 5
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, variable)])
    assert asked == [0, 1, 2, 3, 4]
    expected = oracle("momentum", np.ones(4), gradients, lambda step: 0.1 / (step + 1))
    np.testing.assert_allclose(variable, expected, rtol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("layout", ["F", "strided", "reversed"])
def test_arrays_that_are_not_contiguous(name, layout):
    rng = np.random.default_rng(9)
    base = rng.standard_normal((6, 8))
    views = {"F": lambda a: np.asfortranarray(a), "strided": lambda a: a[::2, ::3],
             "reversed": lambda a: a[::-1]}  # fmt: skip
    variable = views[layout](base.copy())
    gradients = [rng.standard_normal(variable.shape) for _ in range(5)]
    expected = oracle(name, variable.copy(), gradients, lambda step: 0.1)
    optimizer = MAKERS[name](0.1)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(variable, expected, rtol=1e-12)


def test_named_variables_are_changed_in_place_and_may_come_in_any_order():
    first = SimpleNamespace(name="w1", value=np.zeros(2))
    second = SimpleNamespace(name="w2", value=np.zeros(3))
    array = first.value
    optimizer = Momentum(1.0, 0.5)
    optimizer.apply_gradients([(np.ones(2), first), (np.ones(3), second)])
    optimizer.apply_gradients(iter([(np.ones(3), second), (np.ones(2), first)]))
    assert first.value is array
    np.testing.assert_array_equal(first.value, [-2.5, -2.5])
    np.testing.assert_array_equal(second.value, [-2.5] * 3)


def test_gradient_of_none_leaves_variable_and_slot_alone_but_counts_its_position():
    one, two = np.zeros(2), np.zeros(3)
    optimizer = Momentum(1.0, 0.5)
    optimizer.apply_gradients([(None, one), (np.ones(3), two)])
    assert sorted(optimizer.state_dict()) == ["momentum/1", "step"]
    optimizer.apply_gradients([(None, one), (None, two)])
    optimizer.apply_gradients([(np.ones(2), one), (np.ones(3), two)])
    np.testing.assert_array_equal(one, [-1, -1])
    np.testing.assert_array_equal(two, [-2.5] * 3)
    assert optimizer.step == 3


def test_no_pairs_is_a_step_without_effect():
    for make in MAKERS.values():
        optimizer = make(0.1)
        optimizer.apply_gradients([])
        assert optimizer.step == 1


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("gradient", "variable", "error", "facts"),
    [
        (np.ones(3), np.ones(4), ValueError, ["(4,)", "(3,)", "'1'", "position 1"]),
        (np.ones((4, 1)), np.ones(4), ValueError, ["(4,)", "(4, 1)"]),
        (np.ones(4, "f4"), np.ones(4), ValueError, ["float64", "float32", "position 1"]),
        (np.ones(4, "i8"), np.ones(4, "i8"), ValueError, ["int64", "float16"]),
        (np.ones(4, ">f4"), np.ones(4, ">f4"), ValueError, ["unsupported dtype"]),
        ([1.0, 2.0], np.ones(2), TypeError, ["gradient", "list", "position 1"]),
        (np.ones(2), [1.0, 2.0], TypeError, ["variable", "list"]),
        (np.ones(2), np.broadcast_to(np.ones(1), 2), ValueError, ["read-only"]),
        (
            np.ones(2),
            SimpleNamespace(name="w9", value=np.ones(3)),
            ValueError,
            ["'w9'", "position 1"],
        ),
    ],
)
def test_a_wrong_pair_is_named_and_nothing_is_changed(name, gradient, variable, error, facts):
    good = np.ones(2)
    optimizer = MAKERS[name](0.1)
    with pytest.raises(error) as caught:
        optimizer.apply_gradients([(np.ones(2), good), (gradient, variable)])
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)
    assert optimizer.step == 0
    np.testing.assert_array_equal(good, [1, 1])
    optimizer.apply_gradients([(np.ones(2), good)])
    assert optimizer.step == 1


def test_pairs_that_are_no_pairs_and_variables_given_twice():
    with pytest.raises(TypeError, match="pairs, got ndarray"):
        SGD(0.1).apply_gradients([np.ones(2)])
    twice = SimpleNamespace(name="w", value=np.ones(2))
    with pytest.raises(ValueError, match="given twice .*'w', position 1"):
        SGD(0.1).apply_gradients([(np.ones(2), twice), (np.ones(2), twice)])


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("make", [SGD, Momentum])
def test_bad_learning_rates(make, rate):
    with pytest.raises(ValueError, match="learning rate"):
        make(rate)
    variable = np.ones(2)
    optimizer = make(lambda step: rate)
    with pytest.raises(ValueError, match="step: 0"):
        optimizer.apply_gradients([(np.ones(2), variable)])
    np.testing.assert_array_equal(variable, [1, 1])


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_bad_momentum(momentum):
    with pytest.raises(ValueError, match="0 <= momentum < 1"):
        Momentum(0.1, momentum)


@pytest.mark.parametrize("name", MAKERS)
def test_state_goes_on_bit_equal(name):
    rng = np.random.default_rng(10)
    gradients = rng.standard_normal((20, 7)).astype(np.float32)
    straight, resumed = np.ones(7, np.float32), np.ones(7, np.float32)
    optimizer = MAKERS[name](lambda step: 0.1 / (1 + step))
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, straight)])
    first = MAKERS[name](lambda step: 0.1 / (1 + step))
    for gradient in gradients[:10]:
        first.apply_gradients([(gradient, resumed)])
    state = first.state_dict()
    # A checkpoint gives scalars back as arrays without dimensions.
    state = {key: np.asarray(value) for key, value in state.items()}
    second = MAKERS[name](lambda step: 0.1 / (1 + step))
    second.load_state_dict(state)
    assert second.step == 10
    for gradient in gradients[10:]:
        second.apply_gradients([(gradient, resumed)])
    np.testing.assert_array_equal(straight, resumed)


def test_state_is_a_copy_both_ways():
    variable = np.zeros(2)
    optimizer = Momentum(0.1)
    optimizer.apply_gradients([(np.ones(2), variable)])
    state = optimizer.state_dict()
    optimizer.apply_gradients([(np.ones(2), variable)])
    np.testing.assert_array_equal(state["momentum/0"], [1, 1])
    optimizer.load_state_dict(state)
    optimizer.apply_gradients([(np.ones(2), variable)])
    np.testing.assert_array_equal(state["momentum/0"], [1, 1])


@pytest.mark.parametrize(
    ("state", "facts"),
    [
        ({}, "'step'"),
        ({"step": "3"}, "'step'"),
        ({"step": -1}, "step -1"),
        ({"step": 1.5, "momentum/w": np.ones(1)}, "1.5"),
        ({"step": 1}, "incomplete state of step 1"),
        ({"step": 1, "velocity/w": np.ones(1)}, "'velocity/w'"),
        ({"step": 1, "momentum/": np.ones(1)}, "'momentum/'"),
        ({"step": 1, "momentum/w": 3}, "'momentum/w'"),
        ({"step": 1, "momentum/w": np.ones(1, int)}, "int64"),
    ],
)
def test_bad_states(state, facts):
    optimizer = Momentum(0.1)
    optimizer.apply_gradients([(np.ones(2), np.zeros(2))])
    with pytest.raises(ValueError, match="Momentum: ") as caught:
        optimizer.load_state_dict(state)
    assert facts in str(caught.value)
    assert optimizer.step == 1
    assert list(optimizer.state_dict()) == ["step", "momentum/0"]


def test_state_of_another_optimizer_is_refused():
    with pytest.raises(ValueError, match="unknown key.*'momentum/0'"):
        SGD(0.1).load_state_dict({"step": 1, "momentum/0": np.ones(1)})


def test_loaded_slots_must_belong_to_the_variables():
    renamed = SimpleNamespace(name="kernel", value=np.zeros(2))
    optimizer = Momentum(0.1)
    optimizer.load_state_dict({"step": 1, "momentum/w": np.ones(2)})
    with pytest.raises(ValueError, match="slots for w and none for this one .*'kernel'"):
        optimizer.apply_gradients([(np.ones(2), renamed)])
    reshaped = SimpleNamespace(name="w", value=np.zeros(3))
    with pytest.raises(ValueError, match=r"slot does not fit.*\(3,\).*\(2,\).*'w'"):
        optimizer.apply_gradients([(np.ones(3), reshaped)])
    right = SimpleNamespace(name="w", value=np.zeros(2))
    optimizer.apply_gradients([(np.ones(2), right), (np.ones(2), renamed)])
    assert optimizer.step == 2


class OtherMemory(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for an array of a device: NumPy's operators, but never a NumPy array by itself."""

    def __init__(self, data):
        self.data = data

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)

    def copy(self):
        return OtherMemory(self.data.copy())

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a NumPy array")

    def __setitem__(self, key, value):
        self.data[key] = value.data

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        assert all(isinstance(x, (OtherMemory, float)) for x in (*inputs, *out)), inputs
        raw = [x.data if isinstance(x, OtherMemory) else x for x in inputs]
        if out:
            kwargs["out"] = tuple(x.data for x in out)
        result = getattr(ufunc, method)(*raw, **kwargs)
        return out[0] if out else OtherMemory(result)

    def __array_function__(self, function, types, args, kwargs):
        assert function in (np.empty_like, np.zeros_like)
        return OtherMemory(function(args[0].data, *args[1:], **kwargs))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_arrays_of_another_memory_stay_there(name, dtype):
    rng = np.random.default_rng(11)
    host = rng.standard_normal((4, 3)).astype(dtype)
    other = OtherMemory(host.copy())
    on_host, elsewhere = MAKERS[name](0.1), MAKERS[name](0.1)
    for _ in range(5):
        gradient = rng.standard_normal((4, 3)).astype(dtype)
        on_host.apply_gradients([(gradient, host)])
        elsewhere.apply_gradients([(OtherMemory(gradient), other)])
    np.testing.assert_array_equal(other.data, host)


@pytest.mark.parametrize("name", MAKERS)
def test_steady_state_allocates_no_array_of_the_variables_size(name):
    variable, gradient = np.ones(4_000_000, np.float32), np.ones(4_000_000, np.float32)
    optimizer = MAKERS[name](0.1)
    optimizer.apply_gradients([(gradient, variable)])
    tracemalloc.start()
    try:
        optimizer.apply_gradients([(gradient, variable)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < optimizers._TILE * 4 + 65536  # one tile of scratch and small objects
