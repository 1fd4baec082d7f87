"""Optimizers and functions as words, and back."""

import copy
import math

import msgpack
import numpy as np
import pytest

import strategies
from strategies.errors import InvalidArgumentError, NotFoundError
from strategies.variables import stored_variable as descriptions

MADE = [
    strategies.SGD(0.5),
    strategies.SGD(learning_rate=np.float32(0.25)),
    strategies.Momentum(0.1, 0.5, nesterov=True),
    strategies.LARS(0.1, weight_decay=0.01),
    strategies.Adagrad(0.1, initial_total=1),
    strategies.RMSProp(0.1, momentum=0.5, centered=True),
    strategies.Adam(),
    strategies.AdamW(weight_decay=0.1, amsgrad=True),
]


def schedule(step):
    return 1.0 / (1 + step)


@pytest.mark.parametrize("optimizer", MADE, ids=lambda made: type(made).__name__)
def test_an_optimizer_that_was_described_takes_the_same_steps(optimizer):
    words = msgpack.unpackb(msgpack.packb(descriptions.optimizer_to_dict(optimizer, "test")))
    twin = descriptions.make_optimizer(words)
    original = copy.deepcopy(optimizer)
    assert original.arguments == optimizer.arguments
    variables = [np.linspace(-1, 1, 6).reshape(2, 3) for _ in range(2)]
    for step in range(3):
        for made, variable in zip((original, twin), variables, strict=True):
            made.apply_gradients([(np.full((2, 3), 0.5 + step), variable)])
    np.testing.assert_array_equal(*variables)


def test_equal_optimizers_have_equal_words():
    one = descriptions.optimizer_to_dict(strategies.Momentum(0.1), "test")
    other = descriptions.optimizer_to_dict(strategies.Momentum(0.1, momentum=0.9), "test")
    assert one == other
    assert one != descriptions.optimizer_to_dict(strategies.Momentum(0.2), "test")
    assert descriptions.optimizer_to_dict(None, "test") is None


def test_a_rate_that_is_a_function_goes_by_its_name():
    words = descriptions.optimizer_to_dict(strategies.SGD(schedule), "test")
    assert words == {"class": "SGD", "learning_rate": f"{__name__}:schedule"}
    variable = descriptions.StoredVariable("v")
    variable.initialize(np.zeros(1), descriptions.make_optimizer(words))
    variable.step(np.ones(1))
    variable.step(np.ones(1), factor=0.5, rate=1.0)
    assert variable.value.tolist() == [-1.5]
    with pytest.raises(ValueError, match="test: learning rate: another task cannot import"):
        descriptions.optimizer_to_dict(strategies.SGD(strategies.schedules.constant(1.0)), "test")


def test_only_our_own_optimizers():
    class Own(strategies.SGD):
        pass

    for wrong in (Own(0.1), object()):
        with pytest.raises(TypeError, match="expected one of Adagrad Adam AdamW LARS Momentum"):
            descriptions.optimizer_to_dict(wrong, "test")


def test_functions_have_names():
    assert descriptions.name_of(math.hypot, "test") == "math:hypot"
    assert descriptions.function_named("math:hypot") is math.hypot
    assert descriptions.name_of(np.linalg.norm, "test") == "numpy.linalg:norm"
    assert descriptions.name_of(schedule, "test") == f"{__name__}:schedule"
    for missing in ("no_such_module:f", "math:no", "math", ""):
        with pytest.raises(NotFoundError, match="no function of this name"):
            descriptions.function_named(missing)
    with pytest.raises(InvalidArgumentError, match="expected a function, got 'math:pi', float"):
        descriptions.function_named("math:pi")
