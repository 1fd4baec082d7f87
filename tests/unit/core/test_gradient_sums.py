"""Sums and means of gradients, dense or of a few rows, and whether one fits its variable."""

import ml_dtypes
import numpy as np
import pytest

from requirements import installed
from strategies.averaging.accumulation import GradientAccumulator
from strategies.core import gradient_sums
from strategies.core.sparse import Rows, checked_rows

BF16 = ml_dtypes.bfloat16
HALVES = [np.float16, BF16]
torch = installed("torch")


def dense(rows, length):
    result = np.zeros((length, *rows.values.shape[1:]))
    np.add.at(result, rows.indices, np.asarray(rows.values, np.float64))
    return result


def test_gradients_are_added_in_order():
    rng = np.random.default_rng(1)
    given = [(rng.standard_normal(5), w) for w in (3, 1, 0.5)]
    total = None
    for gradient, weight in given:
        total = gradient_sums.add(total, gradient, weight)
    first, second, third = [g * w for g, w in given]
    assert total.tolist() == ((first + second) + third).tolist()


def test_what_has_no_weight_does_not_count():
    nothing = np.full(2, np.nan)
    assert gradient_sums.add(None, nothing, 0) is None
    assert gradient_sums.add(None, None) is None
    total = gradient_sums.add(gradient_sums.add(np.ones(2), nothing, 0), None)
    assert total.tolist() == [1, 1]
    assert gradient_sums.mean([(nothing, 0), (None, 3)], 3, "float64") is None


@pytest.mark.parametrize("gradient", [np.ones(3), np.ones((), np.float32), Rows([1], np.ones(1))])
def test_a_sum_has_memory_of_its_own(gradient):
    total = gradient_sums.add(None, gradient)
    total = gradient_sums.add(total, gradient)
    array = gradient.values if isinstance(gradient, Rows) else gradient
    assert np.all(array == 1)
    assert not np.shares_memory(array, total.values if isinstance(total, Rows) else total)


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bits_are_added_as_32_and_rounded_once(dtype):
    given = [np.array([1, 256], dtype), np.array([2**-10, 1], dtype), np.array([2**-10, 1], dtype)]
    total = None
    for gradient in given:
        total = gradient_sums.add(total, gradient)
    assert total.dtype == np.float32
    assert total.tolist() == [1 + 2**-9, 258]
    mean = gradient_sums.mean([(g, 1) for g in given], 2, np.dtype(dtype).name)
    assert mean.dtype == dtype
    assert mean.tolist() == [np.float64(dtype((1 + 2**-9) / 2)), 129]
    rows = [(Rows([4], g[1:]), 1) for g in given]
    assert gradient_sums.mean(rows, 1, np.dtype(dtype).name).values.tolist() == [258]


def test_rows_are_joined_and_those_of_one_index_added_up():
    one, other = Rows([3, 1], np.array([[1.0], [2.0]])), Rows([1, 0], np.array([[4.0], [8.0]]))
    total = gradient_sums.add(gradient_sums.add(None, one), other, 2)
    assert total.indices.tolist() == [3, 1, 1, 0]
    mean = gradient_sums.divided(total, 4)
    assert mean.indices.tolist() == [0, 1, 3]
    assert mean.values.tolist() == [[4], [2.5], [0.25]]
    merged = gradient_sums.merge_rows([one, other])
    assert (merged.indices.tolist(), merged.values.tolist()) == ([0, 1, 3], [[8], [6], [1]])


def test_rows_and_arrays_become_an_array():
    rng = np.random.default_rng(2)
    rows = Rows([2, 0, 2], rng.standard_normal((3, 2)))
    array = rng.standard_normal((4, 2))
    for column in ([rows, array, rows], [array, rows, rows], [rows, rows, array]):
        mean = gradient_sums.mean([(g, i + 1) for i, g in enumerate(column)], 8, "float64")
        parts = [dense(g, 4) if isinstance(g, Rows) else g for g in column]
        expected = sum((i + 1) * part for i, part in enumerate(parts)) / 8
        np.testing.assert_allclose(mean, expected, rtol=1e-14)
    assert np.all(array != 0)


def test_missing_gradients_count_as_zero():
    assert gradient_sums.mean([(np.ones(2), 1), (None, 3)], 4, "float64").tolist() == [0.25, 0.25]


def test_arrays_of_other_libraries_stay_there():
    ones = torch.ones(2, dtype=torch.bfloat16)
    mean = gradient_sums.mean([(ones, 1), (ones, 2)], 2, "bfloat16")
    assert (mean.dtype, mean.tolist()) == (torch.bfloat16, [1.5, 1.5])
    rows = gradient_sums.mean([(Rows([1, 0], ones), 1), (Rows([0, 1], ones), 2)], 2, "bfloat16")
    assert (rows.indices.tolist(), rows.values.tolist()) == ([0, 1], [1.5, 1.5])
    assert ones.tolist() == [1, 1]


def test_integers_have_a_mean_of_floats():
    mean = gradient_sums.mean([(np.array([1, 2]), 1), (np.array([2, 2]), 1)], 2, "int64")
    assert mean.tolist() == [1.5, 2]


def test_infinities_are_no_warning():
    large = np.full(1, 3e38, np.float32)
    with np.errstate(all="raise"):
        total = gradient_sums.add(gradient_sums.add(None, large), large)
        assert total.tolist() == [np.inf]
        assert np.isnan(gradient_sums.add(total, -total)).all()


F32 = np.float32


@pytest.mark.parametrize("shape", [(2, 3), (None, 3), None])
def test_a_gradient_that_fits_is_returned(shape):
    gradient = np.ones((2, 3), F32)
    assert checked_rows(gradient, shape, "float32", "apply", "variable: w") is gradient
    rows = checked_rows(Rows([1, 0], gradient), shape, "float32", "apply", "variable: w")
    assert rows.indices.tolist() == [0, 1]
    other = checked_rows(np.ones((2, 3)), shape, "float32", "apply", "variable: w", cast=True)
    assert other.dtype == np.float64


@pytest.mark.parametrize(
    ("gradient", "shape", "cast", "error", "words"),
    [
        (np.ones(3, F32), (2,), False, ValueError, "expected float32 of shape (2,), got float32"),
        (np.ones(3, F32), (2,), True, ValueError, "expected (2,), got (3,)"),
        (np.ones(2), (2,), False, ValueError, "expected float32 of shape (2,), got float64"),
        (np.ones(2, complex), (2,), True, TypeError, "wrong dtype, expected float32, got complex"),
        (np.ones((2, 1), F32), (None, 3), False, ValueError, "of shape (None, 3)"),
        (np.ones(2, F32), (None, 3), False, ValueError, "of shape (None, 3)"),
        (Rows([2], np.ones(1, F32)), (2,), False, ValueError, "out of range, expected 0 .. 1"),
        (Rows([-1], np.ones(1, F32)), None, False, ValueError, "out of range"),
        (Rows([0], np.ones(1, F32)), (), False, ValueError, "a scalar has no rows"),
        (Rows([0.5], np.ones(1, F32)), (2,), False, TypeError, "indices are not integers"),
        (Rows([0], np.ones((1, 2), F32)), (2, 3), True, ValueError, "expected (1, 3), got (1, 2)"),
        (Rows([0], np.ones(1)), (2,), False, ValueError, "got float64"),
    ],
)
def test_a_gradient_that_does_not_fit_is_named(gradient, shape, cast, error, words):
    with pytest.raises(error) as caught:
        checked_rows(gradient, shape, "float32", "apply", "variable: w", cast=cast)
    assert words in str(caught.value)
    assert str(caught.value).startswith("apply: ")
    assert str(caught.value).endswith("(variable: w)")


def test_gradients_count_by_their_examples_or_alike():
    assert gradient_sums.weights([3, 0, 2], "workers") == [3, 0, 2]
    assert gradient_sums.weights([None, None], "workers") == [1, 1]
    with pytest.raises(ValueError, match="only some workers say of how many examples"):
        gradient_sums.weights([3, None], "workers")


@pytest.mark.parametrize("examples", [-1, float("nan"), float("inf")])
def test_what_cannot_be_counted_is_refused(examples):
    for fine in (None, 0, 2.5):
        gradient_sums.check_examples(fine)
    with pytest.raises(ValueError, match="expected >= 0, got"):
        gradient_sums.check_examples(examples)
    with pytest.raises(TypeError, match="expected a number, got '3'"):
        gradient_sums.check_examples("3")


def test_an_error_of_a_pass_is_kept_until_all_ranks_listen():
    rows, array = Rows([0], torch.ones(1)), torch.ones(2)
    passes = GradientAccumulator(2)
    assert passes.add([rows]) is None
    whole = passes.add([array])  # of PyTorch, which does not add rows to an array
    assert isinstance(whole.error, TypeError)
    assert passes.add([array], examples=-1) is None
    assert "expected >= 0, got -1" in str(passes.add([array], examples=1).error)
    assert passes.add([array]) is None
    whole = passes.add([array])
    assert (whole.error, whole.passes, whole.gradients[0].tolist()) == (None, 2, [2, 2])


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_a_sum_has_the_memory_of_the_last_one_unless_somebody_holds_that(make):
    memory = gradient_sums.SumBuffers()
    given = [make(np.array([1.0, 2.0], np.float32)), make(np.array([3.0, 4.0], np.float32))]

    def mean():
        out = memory.like("w", given[0])
        found = gradient_sums.mean([(gradient, 1) for gradient in given], 2, "float32", out)
        assert type(found) is type(given[0])
        assert found.tolist() == [2, 3]
        return found

    def address(array):
        return np.asarray(array).__array_interface__["data"][0]

    place = address(mean())
    kept = mean()
    assert address(kept) == place
    view = np.asarray(kept)  # this holds the memory, too
    del kept
    assert address(mean()) != place
    assert view.tolist() == [2, 3]
    del view


def test_memory_of_sums_is_for_floats_in_host_memory():
    memory = gradient_sums.SumBuffers()
    assert memory.like("w", np.ones(2, np.int64)) is None
    assert memory.like("w", np.ones(2, np.float16)) is None
    first = memory.like("w", np.ones(2))
    assert (first.shape, first.dtype) == ((2,), np.float64)
    del first
    assert memory.like("w", np.ones((2, 3), np.float32)).shape == (2, 3)  # it may be another's now


def test_gradients_that_torch_differentiates_are_added_out_of_its_sight():
    gradient = torch.ones(2, requires_grad=True) * 2
    out = gradient_sums.SumBuffers().like("w", gradient)
    found = gradient_sums.mean([(gradient, 1), (gradient, 1)], 2, "float32", out)
    assert (found.tolist(), found.requires_grad) == ([2, 2], False)
