"""Clipping on one rank: values, norms, all at once; infinities, NaNs, extremes, other kinds."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from other_memory import OtherMemory
from requirements import installed
from strategies import Rows
from strategies.optimizers import clip_by_global_norm, clip_by_norm, clip_by_value

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
# Relative errors: of one rounding to the dtype, and of arithmetic in float32 or better.
NORM_ERROR = 1e-14  # of sums of up to 3,600 squares, in whatever order
ROUNDING = {np.float32: 2**-24, np.float64: 2**-53, np.float16: 2**-11, ml_dtypes.bfloat16: 2**-8}


def wide(array):
    return np.asarray(array).astype(np.float64)


@settings(max_examples=100)
@given(
    shapes=st.lists(st.lists(st.integers(0, 30), max_size=2), max_size=4),
    dtype=st.sampled_from(DTYPES),
    max_norm=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_global_norm_as_in_float64(shapes, dtype, max_norm, seed):
    rng = np.random.default_rng(seed)
    gradients = [np.asarray(rng.standard_normal(shape)).astype(dtype) for shape in shapes]
    before = [g.copy() for g in gradients]
    clipped, norm = clip_by_global_norm(gradients, max_norm)
    expected = math.sqrt(sum((wide(g) ** 2).sum() for g in gradients))
    assert norm == pytest.approx(expected, rel=NORM_ERROR, abs=0)
    factor = min(1.0, max_norm / expected) if expected else 1.0
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    for new, old, kept in zip(clipped, gradients, before, strict=True):
        assert new.dtype == dtype
        assert new.shape == old.shape
        np.testing.assert_array_equal(old, kept)
        error = ROUNDING[dtype] + 4 * 2**-24 * (dtype != np.float64) + NORM_ERROR
        np.testing.assert_allclose(wide(new), wide(old) * factor, rtol=error, atol=smallest)
        assert expected > max_norm or new is old


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", ["largest", "smallest"])
def test_norms_neither_overflow_nor_vanish(dtype, size):
    info = np.finfo(dtype)
    number = {"largest": info.max, "smallest": info.smallest_subnormal * 4}[size]
    gradients = [np.full(9, number, dtype), np.full((4, 4), -number, dtype)]
    if dtype == np.float64 and size == "largest":
        gradients = [g / 8 for g in gradients]  # else the norm itself is too large
    clipped, norm = clip_by_global_norm(gradients, 0.0)
    assert norm == pytest.approx(5 * float(abs(gradients[0][0])), rel=1e-14)
    assert not any(g.any() for g in clipped)
    clipped, _ = clip_by_global_norm(gradients, norm / 5)
    for new, old in zip(clipped, gradients, strict=True):
        # a subnormal has few digits: within one of the smallest
        np.testing.assert_allclose(new, old / 5, rtol=1e-6, atol=float(info.smallest_subnormal))


def test_a_factor_too_small_for_float32():
    gradients = [np.full(4, 1e38, np.float32)]
    clipped, norm = clip_by_global_norm(gradients, 2e-6)
    assert norm == pytest.approx(2e38)
    np.testing.assert_allclose(clipped[0], 1e-6, rtol=1e-5)


def test_large_float16_gradients_are_scaled_in_float32():
    # 1e-6 as a float16 has 3 digits less: scaling there would be off by percents.
    gradients = [np.full(10_000, 60_000, np.float16)]
    clipped, norm = clip_by_global_norm(gradients, 6.0)
    assert norm == 6e6
    np.testing.assert_allclose(clipped[0].astype("f8"), 0.06, rtol=2**-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_gradients_that_are_not_finite_are_returned_as_they_are(dtype, bad):
    broken, fine = np.ones(50, dtype), np.full(3, 1e4, dtype)
    broken[40] = bad
    clipped, norm = clip_by_global_norm([broken, fine], 1.0)
    assert clipped[0] is broken
    assert clipped[1] is fine
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    alone, other = clip_by_norm([broken, fine], 1.0)
    assert alone is broken
    assert np.linalg.norm(wide(other)) == pytest.approx(1, rel=2 * ROUNDING[dtype] + 1e-6)


def test_an_infinity_and_a_nan_are_a_nan():
    _, norm = clip_by_global_norm([np.array([np.inf]), np.array([np.nan])], 1.0)
    assert math.isnan(norm)


def test_a_finite_vector_beyond_the_largest_number_is_infinite():
    gradients = [np.full(4, np.finfo(np.float64).max)]
    clipped, norm = clip_by_global_norm(gradients, 1.0)
    assert norm == math.inf
    assert clipped[0] is gradients[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_norm_scales_each_by_its_own(dtype):
    short, long = np.full(4, 0.25, dtype), np.full((2, 2), 8, dtype)
    clipped = clip_by_norm([short, None, long], 1.0)
    assert clipped[0] is short
    assert clipped[1] is None
    np.testing.assert_array_equal(wide(clipped[2]), 0.5)
    np.testing.assert_array_equal(wide(long), 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_value(dtype):
    gradient = np.array([-3, -0.5, 0, 0.25, 7, np.inf, -np.inf, np.nan], dtype)
    (clipped,) = clip_by_value([gradient], 0.5)
    assert clipped.dtype == dtype
    expected = [-0.5, -0.5, 0, 0.25, 0.5, 0.5, -0.5, np.nan]
    np.testing.assert_array_equal(wide(clipped), expected)
    (unchanged,) = clip_by_value([gradient], 1e300)
    np.testing.assert_array_equal(wide(unchanged)[:5], wide(gradient)[:5])


def test_order_and_layout_do_not_change_the_norm():
    rng = np.random.default_rng(40)
    gradient = rng.standard_normal((33, 17)).astype(np.float32)
    _, expected = clip_by_global_norm([gradient], 1.0)
    bucket = np.zeros(1000, np.float32)
    for place in range(20):
        part = bucket[place : place + gradient.size].reshape(gradient.shape)
        part[...] = gradient
        assert clip_by_global_norm([part], 1.0)[1] == expected
    assert clip_by_global_norm([np.asfortranarray(gradient)], 1.0)[1] == expected


def test_rows_count_as_the_array_that_they_stand_for():
    rows = Rows([5, 2, 5], np.array([[3.0, 0.0], [0.0, 12.0], [1.0, 3.0]], np.float16))
    (clipped, other), norm = clip_by_global_norm([rows, np.zeros(2)], 6.5)
    assert norm == 13  # of (4, 3) and (0, 12)
    assert clipped.indices.tolist() == [2, 5]
    assert clipped.values.dtype == np.float16
    np.testing.assert_array_equal(clipped.values, [[0, 6], [2, 1.5]])
    assert not other.any()
    assert clip_by_global_norm([rows], 13.0)[0][0] is rows
    (by_value,) = clip_by_value([rows], 3.5)
    np.testing.assert_array_equal(by_value.values, [[0, 3.5], [3.5, 3]])
    assert clip_by_norm([rows], 13.0)[0] is rows


def test_no_gradients():
    assert clip_by_global_norm([], 1.0) == ([], 0.0)
    assert clip_by_global_norm([None, None], 0.0) == ([None, None], 0.0)
    assert clip_by_norm([None], 1.0) == clip_by_value([None], 1.0) == [None]


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, math.inf, "1", None])
@pytest.mark.parametrize("clip", [clip_by_global_norm, clip_by_norm, clip_by_value])
def test_bad_limits(clip, max_norm):
    name = "limit" if clip is clip_by_value else "max_norm"
    with pytest.raises(ValueError, match=f"^{clip.__name__}: bad {name}, expected a number >= 0"):
        clip([np.ones(2)], max_norm)


@pytest.mark.parametrize("clip", [clip_by_global_norm, clip_by_norm, clip_by_value])
@pytest.mark.parametrize(
    ("gradient", "error", "fact"),
    [
        ([1.0], TypeError, "list"),
        (3.0, TypeError, "float"),
        (np.ones(2, int), ValueError, "int64"),
        (np.ones(2, complex), ValueError, "complex128"),
        (Rows([-1], np.ones(1)), ValueError, "-1"),
        (Rows([0, 1], np.ones(1)), ValueError, "(2,)"),
        (Rows([0], [1.0]), TypeError, "list"),
    ],
)
def test_what_is_no_gradient_is_named(clip, gradient, error, fact):
    with pytest.raises(error, match="position 1") as caught:
        clip([np.ones(2), gradient], 1.0)
    assert str(caught.value).startswith(clip.__name__)
    assert fact in str(caught.value)


def test_arrays_of_a_device_stay_there():
    gradients = [OtherMemory(np.full(4, 1e38, np.float32)), OtherMemory(np.zeros((0, 3)))]
    clipped, norm = clip_by_global_norm(gradients, 2.0)
    assert norm == pytest.approx(2e38)
    assert isinstance(clipped[0], OtherMemory)
    np.testing.assert_allclose(clipped[0].data, 1.0, rtol=1e-6)
    broken = [OtherMemory(np.array([1.0, np.nan], np.float32))]
    assert math.isnan(clip_by_global_norm(broken, 2.0)[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_pytorch(dtype):
    torch = installed("torch")
    gradient = torch.full((2, 2), 2.0, dtype=getattr(torch, dtype))
    (clipped,), norm = clip_by_global_norm([gradient], 1.0)
    assert norm == 4
    assert clipped.dtype == gradient.dtype
    assert torch.equal(clipped, torch.full_like(gradient, 0.5))
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    (clipped,), norm = clip_by_global_norm([parameter.grad], 2.5)
    assert norm == float(torch.nn.utils.clip_grad_norm_([parameter], 2.5))
    torch.testing.assert_close(clipped, parameter.grad)


def test_arrays_of_jax_as_optax_clips_them():
    jnp, optax = installed("jax.numpy"), installed("optax")
    gradients = [jnp.arange(6.0), jnp.ones((2, 3))]
    clipped, _ = clip_by_global_norm(gradients, 2.0)
    expected, _ = optax.clip_by_global_norm(2.0).update(gradients, optax.EmptyState())
    for ours, theirs in zip(clipped, expected, strict=True):
        assert type(ours) is type(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for ours, theirs in zip(
        clip_by_value(gradients, 0.5),
        optax.clip(0.5).update(gradients, optax.EmptyState())[0],
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
