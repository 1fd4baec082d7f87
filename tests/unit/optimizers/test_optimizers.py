"""Optimizers against their formulas in float64, over 100 steps; their pairs, errors and state."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from optimizer_table import MAKERS, WITH_SLOTS, follow, rounding_bound
from strategies import LARS, SGD, Adagrad, Adam, AdamW, Momentum, RMSProp, Variable
from strategies.checkpoint import checkpoint

STEPS = 100
SHAPES = [(), (1,), (0,), (3, 5), (257, 3), (0, 4), (33000,)]  # the last: several 16-bit tiles


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_follows_the_formula_for_100_steps(name, shape, dtype):
    rng = np.random.default_rng(7)
    steps = STEPS if np.prod(shape) < 10_000 else 10
    weights = rng.standard_normal(shape).astype(dtype)
    gradients = [np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(steps)]
    expected, change = follow(name, weights, gradients, lambda step: 0.05 / (1 + step))
    variable = np.array(weights)
    optimizer = MAKERS[name](lambda step: 0.05 / (1 + step))
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, variable)])
    assert optimizer.step == steps
    bound = rounding_bound(steps, expected, change, np.finfo(dtype).eps)
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
    slots, expected = (
        {key: value for key, value in of.state_dict().items() if hasattr(value, "dtype")}
        for of in (optimizer, reference)
    )
    assert bool(slots) == (name in WITH_SLOTS)
    assert slots.keys() == expected.keys()
    for key, slot in slots.items():
        assert slot.dtype == np.float32
        np.testing.assert_array_equal(slot, expected[key])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("dtype", "bits", "nan"),
    [(np.float32, "u4", 0x7FC00000), (ml_dtypes.bfloat16, "u2", 0x7FC0)],
    ids=["float32", "bfloat16"],
)
def test_every_nan_of_a_variable_and_its_slots_is_numpys(name, dtype, bits, nan):
    sign = np.dtype(bits).type(1 << (8 * np.dtype(bits).itemsize - 1))
    given = [np.full(70, nan + sign + payload, bits) for payload in (1, 2, 3)]
    variable, *gradients = (array.view(dtype) for array in given)
    optimizer = MAKERS[name](0.05)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(variable.view(bits), nan)
    for slot in optimizer.state_dict().values():
        if hasattr(slot, "dtype"):
            np.testing.assert_array_equal(slot.view("u4"), 0x7FC00000)


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
    expected, _ = follow("momentum", np.ones(4), gradients, lambda step: 0.1 / (step + 1))
    np.testing.assert_allclose(variable, expected, rtol=1e-6)


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


@pytest.mark.parametrize("name", MAKERS)
def test_a_variable_without_dimensions_takes_a_number_of_numpy(name):
    one, other = np.array(1.0), np.array([1.0])
    MAKERS[name](0.1).apply_gradients([(np.float64(2), one)])
    MAKERS[name](0.1).apply_gradients([(np.array([2.0]), other)])
    assert one == other[0] != 1


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
        (np.float64(1), np.float64(1), TypeError, ["variable", "number", "position 1"]),
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


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "0.1", None, 1j])
@pytest.mark.parametrize("make", [SGD, Momentum, LARS, Adagrad, RMSProp, Adam, AdamW])
def test_bad_learning_rates(make, rate):
    with pytest.raises(ValueError, match="learning rate"):
        make(rate)
    variable = np.ones(2)
    optimizer = make(lambda step: rate)
    with pytest.raises(ValueError, match="step: 0"):
        optimizer.apply_gradients([(np.ones(2), variable)])
    np.testing.assert_array_equal(variable, [1, 1])


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_equal_gradients_have_a_variance_of_zero_and_no_root_of_a_negative_number(momentum):
    gradient = np.linspace(0.1, 10, 1000, dtype=np.float32)
    variable = np.zeros(1000, np.float32)
    optimizer = RMSProp(1e-3, momentum=momentum, centered=True)
    for _ in range(300):
        optimizer.apply_gradients([(gradient, variable)])
    assert np.isfinite(variable).all()
    assert (variable < 0).all()


FRACTIONS = [-0.1, 1.0, 1.5, float("nan"), float("inf"), "0.5"]
POSITIVE = [-1e-8, float("nan"), float("inf"), "1"]
HYPER_PARAMETERS = [
    *[(Momentum, "momentum", value) for value in FRACTIONS],
    *[(LARS, "momentum", value) for value in FRACTIONS],
    *[(LARS, name, value) for name in ("weight_decay", "trust") for value in POSITIVE],
    *[(Adagrad, name, value) for name in ("initial_total", "epsilon") for value in POSITIVE],
    *[(RMSProp, name, value) for name in ("decay", "momentum") for value in FRACTIONS],
    *[(make, name, value) for make in (Adam, AdamW) for name in ("beta1", "beta2")
      for value in FRACTIONS],
    *[(AdamW, "weight_decay", value) for value in POSITIVE],
    # As a float32, a smaller one would be zero.
    *[(make, "epsilon", value) for make in (Adagrad, RMSProp, Adam, AdamW)
      for value in (*POSITIVE, 0, 1e-39)],
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "value"), HYPER_PARAMETERS)
def test_bad_hyper_parameters(make, name, value):
    with pytest.raises(
        ValueError, match=f"^{make.__name__}: bad {name}, expected .*, got {value!r}"
    ):
        make(0.1, **{name: value})


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
        ({"step": -1}, "got -1"),
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


ADAM_STATE = {"step": 3, "updates/w": 2, "first/w": np.ones(2), "second/w": np.ones(2)}


@pytest.mark.parametrize("missing", ["updates/w", "first/w", "second/w"])
def test_each_variable_needs_all_of_its_state(missing):
    state = {key: value for key, value in ADAM_STATE.items() if key != missing}
    with pytest.raises(ValueError, match="Adam: incomplete state.*variable: w"):
        Adam().load_state_dict(state)


@pytest.mark.parametrize("updates", [-1, 1.5, "2", None])
def test_how_often_a_variable_was_changed_is_a_count(updates):
    with pytest.raises(ValueError, match="Adam: bad 'updates/w' in state, expected an integer"):
        Adam().load_state_dict({**ADAM_STATE, "updates/w": updates})


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_of_steps_without_any_gradient(name, tmp_path):
    made = [MAKERS[name](lambda step: 0.1 / (1 + step)) for _ in range(3)]
    for optimizer in made[:2]:
        optimizer.apply_gradients([(None, np.ones(2))])
        optimizer.apply_gradients([])
    checkpoint.save(tmp_path, made[1].state_dict(), step=2)
    made[2].load_state_dict(checkpoint.restore(tmp_path).tensors)
    assert made[2].step == 2
    results = []
    for optimizer in (made[0], made[2]):
        variable = np.ones(2)
        optimizer.apply_gradients([(np.ones(2), variable)])
        assert "variables" not in optimizer.state_dict()
        results.append(variable)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    "state",
    [{"step": 2, "variables": 1}, {"step": 2, "variables": -1}, {**ADAM_STATE, "variables": 0}],
)
def test_the_slots_of_all_variables_have_to_be_there(state):
    with pytest.raises(ValueError, match=r"Adam: .*variables"):
        Adam().load_state_dict(state)


def test_state_of_a_variable_whose_name_is_a_path():
    variable = Variable(np.ones(2), name="block/1/weights")
    optimizer = Adam()
    optimizer.apply_gradients([(np.ones(2), variable)])
    state = optimizer.state_dict()
    slots = {f"{kind}/block/1/weights" for kind in ("first", "second", "updates")}
    assert state.keys() == {"step", *slots}
    again = Adam()
    again.load_state_dict(state)
    np.testing.assert_equal(again.state_dict(), state)


def test_the_correction_of_biases_counts_the_changes_of_each_variable():
    early, late = np.zeros(2), np.zeros(2)
    optimizer = Adam(0.1)
    for _ in range(5):
        optimizer.apply_gradients([(np.ones(2), early), (None, late)])
    optimizer.apply_gradients([(None, early), (np.ones(2), late)])
    np.testing.assert_allclose(late, [-0.1, -0.1])
    assert optimizer.state_dict()["updates/1"] == 1


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_is_kept_by_a_checkpoint(name, tmp_path):
    variable = Variable(np.ones((2, 3), np.float32), name="w")
    optimizer = MAKERS[name](0.1)
    for _ in range(3):
        optimizer.apply_gradients([(np.full((2, 3), 0.5, np.float32), variable)])
    checkpoint.save(tmp_path, {**optimizer.state_dict(), "w": variable.value}, step=3)
    tensors = checkpoint.restore(tmp_path).tensors
    resumed = Variable(tensors.pop("w"), name="w")
    again = MAKERS[name](0.1)
    again.load_state_dict(tensors)
    for one, other in ((optimizer, variable), (again, resumed)):
        one.apply_gradients([(np.full((2, 3), -0.5, np.float32), other)])
    np.testing.assert_array_equal(resumed.value, variable.value)
    np.testing.assert_equal(again.state_dict(), optimizer.state_dict())


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


def test_a_swapped_pair_is_called_that():
    w = Variable(np.ones(3), name="w")
    words = r"SGD: the pair is swapped, .* \(variable 'w', position 1\)"
    with pytest.raises(TypeError, match=words):
        SGD(0.1).apply_gradients([(np.ones(3), np.ones(3)), (w, np.ones(3))])


def test_text_in_place_of_a_number_is_quoted():
    with pytest.raises(ValueError, match="learning rate, expected a number >= 0, got '0.1'$"):
        Adam("0.1")
