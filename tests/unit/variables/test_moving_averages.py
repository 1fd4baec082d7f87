"""Moving averages of variables, of this process and of strategies."""

import doctest
import sys

import numpy as np
import pytest

import fakecupy
import strategies
from requirements import installed
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


@pytest.mark.parametrize("library", ["torch", "jax", "cupy"])
def test_values_of_other_libraries_are_averaged_on_the_host(library, monkeypatch):
    if library == "cupy":
        fake = fakecupy.FakeCupy(devices=2)
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setitem(sys.modules, "array_api_compat.cupy", fakecupy.ARRAY_API)
        given, read = fake.array(np.ones(3, np.float32)), lambda x: x.get()
    elif library == "torch":
        torch = installed("torch")
        given, read = torch.ones(3, requires_grad=True), lambda x: x.detach().numpy()
    else:
        given, read = installed("jax.numpy").ones(3), np.asarray
    w = strategies.Variable(given, name="w")
    averages = MovingAverages([w], decay=0.5)
    w.assign(np.full(3, 3, np.float32))
    averages.update()
    assert isinstance(averages["w"], np.ndarray)
    assert averages["w"].tolist() == [2, 2, 2]
    with averages.in_place():
        assert read(w.value).tolist() == [2, 2, 2]
        assert type(w.value) is type(given)
    assert read(w.value).tolist() == [3, 3, 3]
    assert getattr(w.value, "requires_grad", False) == (library == "torch")


def test_values_that_are_not_to_be_changed():
    class Bare:
        name = "w"

        def __init__(self, value, is_copy=False):
            self.value = value
            self.is_copy = is_copy

    constant = np.ones(2)
    constant.flags.writeable = False
    for variable, why in (
        (Bare(constant), "the value is read-only"),
        (Bare(installed("jax.numpy").ones(2)), "an array of JAX, which never changes"),
        (Bare(np.ones(2), is_copy=True), "a copy of one elsewhere"),
    ):
        averages = MovingAverages([variable])
        with pytest.raises(ValueError, match=why), averages.in_place():
            pass
