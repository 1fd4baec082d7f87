"""Moving averages of variables, of this process and of strategies."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

import strategies
from strategies.variables import MovingAverages, moving_averages


@pytest.mark.parametrize("ramped", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_averages_are_those_of_the_formula(ramped, dtype):
    w = strategies.Variable(np.zeros((3, 2), dtype), name="w")
    b = strategies.Variable(dtype(2), name="b")
    averages = MovingAverages([w, b], decay=0.9, ramped=ramped)
    assert averages["b"] == 2
    expected, decays = np.zeros((3, 2)), []
    for step in range(50):
        w.value[...] = values = np.random.default_rng(step).standard_normal((3, 2)).astype(dtype)
        averages.update()
        decays.append(min(0.9, (1 + step) / (10 + step)) if ramped else 0.9)
        expected = decays[-1] * expected + (1 - decays[-1]) * values.astype(np.float64)
    # Three roundings in a step, of which older ones count less, in the dtype of the averages.
    kind = np.float32 if dtype == np.float16 else dtype
    bound = 3 * 50 * np.finfo(kind).eps * 4
    assert averages["w"].dtype == kind
    np.testing.assert_allclose(averages["w"], expected, rtol=0, atol=bound)
    np.testing.assert_allclose(averages["b"], 2, rtol=bound)
    assert averages.updates == 50


def test_values_come_back_after_a_block_even_if_it_fails():
    w = strategies.Variable(np.ones(2), name="w")
    averages = MovingAverages([w], decay=0.5)
    w.value[...] = 3
    averages.update()

    def evaluate():
        with averages.in_place():
            assert w.value.tolist() == [2, 2]
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert w.value.tolist() == [3, 3]


def test_a_state_goes_on_and_another_is_refused():
    w = strategies.Variable(np.ones(2), name="w")
    first, second = (MovingAverages([w], decay=0.5, ramped=True) for _ in range(2))
    w.value[...] = 3
    first.update()
    second.load_state_dict(first.state_dict())
    for averages in (first, second):
        w.value[...] = 7
        averages.update()
    np.testing.assert_array_equal(first["w"], second["w"])
    for wrong in ({}, {"updates": 1}, {"updates": 1, "average/w": np.ones(3)}):
        with pytest.raises(ValueError, match="expected the averages of these variables"):
            second.load_state_dict(wrong)
    np.testing.assert_array_equal(first["w"], second["w"])
    with pytest.raises(ValueError, match="decay"):
        MovingAverages([w], decay=1.0)


def test_those_of_spare_replicas_are_of_every_step():
    with strategies.SpareReplicaStrategy() as strategy:
        w = strategy.variable(np.zeros(2), name="w")
        averages, optimizer = MovingAverages([w], decay=0.5), strategies.SGD(1.0)
        for _ in range(3):
            strategy.apply_gradients(optimizer, [(np.full(2, -4.0), w)], examples=5)
            averages.update()
        assert averages["w"].tolist() == [(0 + 4 * 1 + 8 * 2 + 12 * 4) / 8] * 2


def test_examples():
    result = doctest.testmod(moving_averages)
    assert result.attempted >= 5
    assert result.failed == 0
