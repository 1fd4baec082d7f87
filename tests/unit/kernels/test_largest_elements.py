"""Choice of the largest elements, against a stable sort, with samples like the array or not."""

import math

import numpy as np
import pytest

from collectives.kernels.top_k import entries

COUNT = 20_011
RANDOM = np.random.default_rng(0)
ARRAYS = {
    "normal": RANDOM.standard_normal(COUNT),
    "few values": RANDOM.integers(-3, 4, COUNT),
    "mostly zeros": RANDOM.standard_normal(COUNT) * (RANDOM.random(COUNT) < 0.001),
    "zeros": np.zeros(COUNT),
    # Each 61st element is a sample.
    "large samples": np.where(np.arange(COUNT) % 61, 1, 100) * RANDOM.random(COUNT),
    "small samples": np.where(np.arange(COUNT) % 61, 100, 1) * RANDOM.random(COUNT),
    "not finite": np.where(RANDOM.random(COUNT) < 0.02, np.inf, RANDOM.standard_normal(COUNT)),
    "NaNs": np.where(RANDOM.random(COUNT) < 0.02, np.nan, RANDOM.standard_normal(COUNT)),
    "beyond float32": RANDOM.choice([1e300, -1e300, 1.0, 3.0], COUNT),
}


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("fraction", [1e-5, 0.01, 0.3, 0.999, 1])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("divisor", [1, 3])
def test_equals_a_stable_sort(array, fraction, dtype, divisor):
    with np.errstate(over="ignore", invalid="ignore"):
        source = ARRAYS[array].astype(dtype)
        left = source / np.dtype(dtype).type(divisor)
        values = left.astype("f4")
        count = math.ceil(fraction * COUNT)
        # NaNs are larger than infinities; of equal magnitudes the lower indices are chosen.
        magnitudes = np.nan_to_num(-np.abs(values), nan=0, neginf=-np.inf)
        order = np.lexsort([np.arange(COUNT), magnitudes, ~np.isnan(values)])
        indices = np.sort(order[:count])
        rest = left.copy()
        rest[indices] -= values[indices]
        rest[~np.isfinite(rest)] = 0
    residual = np.zeros(COUNT, dtype)
    for kept in (None, residual):
        sent = entries(source, fraction, divisor, kept)
        np.testing.assert_array_equal(sent["index"], indices)
        np.testing.assert_array_equal(sent["value"], values[indices])
    np.testing.assert_array_equal(residual, rest)
