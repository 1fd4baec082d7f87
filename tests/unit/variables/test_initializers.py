"""First values of variables are the same however the variable is cut."""

import doctest
import itertools

import numpy as np
import pytest

from strategies.variables import initializers

KINDS = {
    "zeros": initializers.zeros(),
    "constant": initializers.constant(2.5),
    "normal": initializers.normal(0.5, mean=1.0, seed=7),
    "uniform": initializers.uniform(-2, 3, seed=7),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [(1,), (30_001, 7), (70_000,), (3, 100_000), (0, 4), (5, 0)])
def test_parts_are_those_of_the_whole(kind, dtype, shape):
    make = KINDS[kind]
    whole = make(0, shape[0], shape, dtype)
    assert (whole.shape, whole.dtype) == (shape, dtype)
    for cuts in ([0, shape[0]], [0, shape[0] // 3, shape[0] // 2 + 1, shape[0]]):
        ends = sorted(min(cut, shape[0]) for cut in cuts)
        parts = [make(low, high, shape, dtype) for low, high in itertools.pairwise(ends)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_the_numbers_are_those_of_their_distributions():
    shape = (100_000, 4)
    count = np.prod(shape)
    normal = KINDS["normal"](0, shape[0], shape, "float64")
    uniform = KINDS["uniform"](0, shape[0], shape, "float64")
    for numbers, mean, deviation in [(normal, 1.0, 0.5), (uniform, 0.5, 5 / np.sqrt(12))]:
        assert abs(numbers.mean() - mean) < 6 * deviation / np.sqrt(count)
        assert abs(numbers.std() / deviation - 1) < 6 / np.sqrt(count)
    assert uniform.min() >= -2
    assert uniform.max() < 3
    # Blocks differ from each other, and seeds.
    assert len(np.unique(normal)) == count
    other = initializers.normal(0.5, mean=1.0, seed=8)(0, shape[0], shape, "float64")
    assert not np.any(other == normal)
    with pytest.raises(ValueError, match="seed"):
        initializers.normal(seed=-1)


def test_examples():
    result = doctest.testmod(initializers)
    assert result.attempted >= 4
    assert result.failed == 0
