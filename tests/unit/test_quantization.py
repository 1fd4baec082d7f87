"""Weights in 8 bits, and back, of every library."""

import ml_dtypes
import numpy as np
import pytest

from requirements import installed
from strategies.quantization import QuantizedArray, dequantize, quantize

TINY = float(np.finfo(np.float32).tiny)


def torch_tensor(array):
    torch = installed("torch")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array)


LIBRARIES = {
    "numpy": lambda array: array,
    "torch": torch_tensor,
    "parameter": lambda array: installed("torch").nn.Parameter(torch_tensor(array)),
    "jax": lambda array: installed("jax").numpy.asarray(array),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (3, 2, 4, 4)])
def test_the_error_is_at_most_half_a_scale(library, dtype, shape):
    random = np.random.default_rng(0)
    scale = 10.0 ** random.integers(-3, 4, (shape[0],) + (1,) * (len(shape) - 1))
    x = (random.standard_normal(shape) * scale).astype(dtype)
    given = LIBRARIES[library](x)
    small = quantize(given)
    back = dequantize(small)
    if library != "numpy":
        assert type(back) is type(small.codes)
        assert not getattr(small.scales, "requires_grad", False)
    codes, scales = np.asarray(small.codes), np.asarray(small.scales)
    assert (codes.dtype, codes.shape) == (np.int8, shape)
    assert (scales.dtype, scales.shape) == (np.float32, shape[:1])
    rows = x.astype(np.float64).reshape(shape[0], -1)
    np.testing.assert_allclose(scales, np.abs(rows).max(1) / 127, rtol=2**-22)
    assert (np.abs(codes.reshape(shape[0], -1).astype(int)).max(1) == 127).all()
    error = np.abs(np.asarray(back, np.float64).reshape(rows.shape) - rows).max(1)
    assert (error <= 0.502 * scales).all()


EXTREMES = {
    "zeros": [0.0, 0.0],
    "largest": [3.4028235e38, -1.0],
    "smallest normal": [TINY, -TINY / 2],
    "subnormal": [1e-45, -3e-42],
    "halves": [127.0, 0.5],
}


@pytest.mark.parametrize("row", EXTREMES)
def test_extreme_rows(row):
    x = np.float32([EXTREMES[row], [1.0, 2.0]])
    codes, scales = quantize(x)
    assert np.abs(codes.astype(int)).max() <= 127
    back = dequantize(QuantizedArray(codes, scales))
    assert (np.abs(back.astype(np.float64) - x) <= 0.502 * scales[:, None].astype(float)).all()


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 1e300])
def test_numbers_that_are_not_finite_are_an_error(number):
    with pytest.raises(ValueError, match="quantize: expected numbers that are finite"):
        quantize({"w": np.array([[1.0, number], [1.0, 2.0]])})


def test_other_leaves_stay():
    weights = {"w": np.ones((2, 3)), "b": np.ones(3), "n": np.int64(3), "names": ["a", np.eye(2)],
               "steps": np.ones((2, 2), np.int32), "none": np.ones((0, 4))}  # fmt: skip
    small = quantize(weights)
    assert isinstance(small["w"], QuantizedArray)
    assert isinstance(small["names"][1], QuantizedArray)
    for name in ("b", "n", "steps", "none"):
        assert small[name] is weights[name]
    back = dequantize(small)
    assert back["names"][0] == "a"
    np.testing.assert_allclose(back["w"], weights["w"], rtol=2**-22)


def test_a_module_is_loaded_from_8_bits():
    torch = installed("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(10, 8)
    expected = model(x)
    model.load_state_dict(dequantize(quantize(model.state_dict())))
    # Each product has an error of at most half a scale per weight; errors have random signs.
    assert (model(x) - expected).abs().max() < 0.02 * expected.abs().max()
