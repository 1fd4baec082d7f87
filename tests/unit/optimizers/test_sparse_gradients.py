"""Gradients of a few rows: what changes, what does not, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer_table import MAKERS
from other_memory import OtherMemory
from strategies import Rows
from strategies.core.sparse import coalesced_checked

# For these, rows without a gradient are as if it were zero.
AS_DENSE = ["sgd", "adagrad"]


def dense(rows, shape, dtype):
    """Return the array that rows stand for, summed in the order of the rows."""
    array = np.zeros(shape, dtype)
    np.add.at(array, np.asarray(rows.indices), rows.values)
    return array


@pytest.mark.parametrize("name", AS_DENSE)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_as_good_as_the_array_they_stand_for(name, dtype):
    rng = np.random.default_rng(20)
    weights = rng.standard_normal((50, 3)).astype(dtype)
    by_rows, by_arrays = weights.copy(), weights.copy()
    one, other = MAKERS[name](0.1), MAKERS[name](0.1)
    for _ in range(100):
        indices = rng.permutation(50)[: rng.integers(0, 20)]
        rows = Rows(indices, rng.standard_normal((len(indices), 3)).astype(dtype))
        one.apply_gradients([(rows, by_rows)])
        other.apply_gradients([(dense(rows, weights.shape, dtype), by_arrays)])
    np.testing.assert_array_equal(by_rows, by_arrays)


@pytest.mark.parametrize("name", MAKERS)
def test_only_rows_that_are_named_change_and_they_do_as_in_a_dense_step(name):
    rng = np.random.default_rng(21)
    weights = rng.standard_normal((10, 4)).astype(np.float32)
    gradient = np.zeros_like(weights)
    gradient[[2, 7]] = rng.standard_normal((2, 4))
    by_rows, by_arrays = weights.copy(), weights.copy()
    one, other = MAKERS[name](0.1), MAKERS[name](0.1)
    one.apply_gradients([(Rows([7, 2], gradient[[7, 2]]), by_rows)])
    other.apply_gradients([(gradient, by_arrays)])
    np.testing.assert_allclose(by_rows[[2, 7]], by_arrays[[2, 7]], rtol=1e-6)
    rest = np.delete(np.arange(10), [2, 7])
    np.testing.assert_array_equal(by_rows[rest], weights[rest])
    for key, slot in one.state_dict().items():
        if hasattr(slot, "shape"):
            np.testing.assert_allclose(slot[[2, 7]], other.state_dict()[key][[2, 7]], rtol=1e-6)
            initial = 0.1 if name.startswith("adagrad") else 0
            assert np.all(slot[rest] == np.float32(initial))


@settings(max_examples=100)
@given(
    indices=st.lists(st.integers(0, 6), max_size=40),
    dtype=st.sampled_from([np.float32, np.float64, np.float16, ml_dtypes.bfloat16]),
    width=st.integers(0, 3),
)
def test_rows_of_one_index_are_summed(indices, dtype, width):
    # Small integers: every sum is exact, in any order.
    values = np.arange(len(indices) * width).reshape(len(indices), width) % 5
    rows = Rows(np.array(indices, np.int32), values.astype(dtype))
    before = rows.values.copy()
    found = coalesced_checked(rows, "test", "here", length=7)
    assert found.indices.tolist() == sorted(set(indices))
    expected = np.zeros((7, width))
    np.add.at(expected, np.array(indices, int), values)
    np.testing.assert_array_equal(found.values.astype(np.float64), expected[found.indices])
    np.testing.assert_array_equal(rows.values, before)


@pytest.mark.parametrize(
    "indices",
    [[], [3, 1], np.array([3], np.uint8), np.array([3], np.uint64), np.empty(0)],
    ids=repr,
)
def test_indices_of_all_kinds_of_integers_are_int64(indices):
    rows = Rows(indices, np.ones((len(indices), 2)))
    assert rows.indices.dtype == np.int64
    assert rows.indices.tolist() == list(indices)


def test_sums_of_16_bit_rows_are_not_rounded_in_between():
    # 2048 + 1 is 2048 in float16; all of them at once are 2048 + 64.
    values = np.ones((65, 1), np.float16)
    values[0] = 2048
    found = coalesced_checked(Rows(np.zeros(65, int), values), "test", "here")
    assert found.values.tolist() == [[2048 + 64]]
    variable = np.array([[2112.0]], np.float16)
    MAKERS["sgd"](1.0).apply_gradients([(Rows(np.zeros(65, int), values), variable)])
    assert variable.tolist() == [[0.0]]


@pytest.mark.parametrize("name", MAKERS)
def test_rows_on_a_device_stay_there(name):
    rng = np.random.default_rng(22)
    weights = rng.standard_normal((6, 2))
    host, other = weights.copy(), OtherMemory(weights.copy())
    one, elsewhere = MAKERS[name](0.1), MAKERS[name](0.1)
    for indices in ([3, 1, 3, 3, 0], [], [5]):
        values = rng.standard_normal((len(indices), 2))
        one.apply_gradients([(Rows(indices, values), host)])
        elsewhere.apply_gradients([(Rows(indices, OtherMemory(values)), other)])
    np.testing.assert_allclose(other.data, host, rtol=1e-15 if name != "lars" else 1e-12)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("rows", "variable", "error", "facts"),
    [
        (Rows([0, 4], np.ones((2, 3))), np.ones((4, 3)), ValueError, ["0 .. 3", "0 .. 4"]),
        (Rows([-1], np.ones((1, 3))), np.ones((4, 3)), ValueError, ["out of range", "-1"]),
        (Rows([0.0], np.ones((1, 3))), np.ones((4, 3)), TypeError, ["not integers", "float64"]),
        (Rows([0], np.ones((2, 3))), np.ones((4, 3)), ValueError, ["(1,)", "(2, 3)"]),
        (Rows([[0]], np.ones((1, 3))), np.ones((4, 3)), ValueError, ["(1, 1)"]),
        (Rows([0], np.ones((1, 2))), np.ones((4, 3)), ValueError, ["(1, 3)", "(1, 2)"]),
        (Rows([0], np.ones((1, 3), "f4")), np.ones((4, 3)), ValueError, ["float32", "float64"]),
        (Rows([0], [1.0]), np.ones(4), TypeError, ["not an array", "list"]),
        (Rows([0], np.ones(1)), np.ones(()), ValueError, ["a scalar has no rows"]),
        (Rows([0], OtherMemory(np.ones(1))), np.ones(4), TypeError, ["another memory"]),
    ],
)
def test_wrong_rows_are_named_and_nothing_is_changed(name, rows, variable, error, facts):
    good, before = np.ones(2), variable.copy()
    optimizer = MAKERS[name](0.1)
    with pytest.raises(error, match="'1', position 1") as caught:
        optimizer.apply_gradients([(np.ones(2), good), (rows, variable)])
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)
    assert optimizer.step == 0
    np.testing.assert_array_equal(good, [1, 1])
    np.testing.assert_array_equal(variable, before)
    optimizer.apply_gradients([(np.ones(2), good)])
