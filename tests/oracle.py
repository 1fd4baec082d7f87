"""What an operation should give, computed slowly from the inputs of all ranks."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import collectives as cc

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
COMPLEX = [np.dtype(np.complex64), np.dtype(np.complex128)]
INTEGERS = [np.dtype(t) for t in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")]
BOOL = np.dtype(bool)
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS, BOOL]

_NUMPY_REDUCTIONS = {
    cc.SUM: np.sum,
    cc.MEAN: np.mean,
    cc.MIN: np.min,
    cc.MAX: np.max,
    cc.PRODUCT: np.prod,
}


def is_defined(op, dtype):
    """Whether the op has a meaning for the dtype: the table of `collectives.arrays.reduction`."""
    if dtype in INTEGERS:
        return op is not cc.MEAN
    if dtype == BOOL:
        return op in (cc.MIN, cc.MAX)
    if dtype in COMPLEX:
        return op in (cc.SUM, cc.MEAN, cc.PRODUCT)
    return True


def data(rank, shape, dtype):
    """The array that a rank brings; every rank and every element has its own value."""
    random = np.random.default_rng([rank, *shape])
    if dtype == BOOL:
        return np.asarray(random.integers(0, 2, shape)).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return np.asarray(random.integers(info.min, info.max, shape, dtype, endpoint=True))
    values = random.uniform(0.5, 2.0, shape) * random.choice([-1, 1], shape)
    if dtype in COMPLEX:
        values = values * np.exp(1j * random.uniform(0, 6, shape))
    return np.asarray(values).astype(dtype)


def reduced(arrays, op):
    """The exact result, and the largest error that the roundings on the way allow.

    SUM and MEAN of P numbers round P - 1 times in the additions and P times in the divisions, each
    by at most eps times the sum of the magnitudes; a product rounds P - 1 times relative to
    itself (twice as much if complex, each product being two products and a sum). 16-bit types are
    computed in float32, and rounded once to their own precision.
    """
    dtype = arrays[0].dtype
    size = len(arrays)
    if dtype in INTEGERS or dtype == BOOL:
        exact = _NUMPY_REDUCTIONS[op](np.stack(arrays), axis=0)
        return exact.astype(dtype), 0
    wide = np.complex128 if dtype in COMPLEX else np.float64
    stack = np.stack(arrays).astype(wide)
    exact = _NUMPY_REDUCTIONS[op](stack, axis=0)
    if op in (cc.MIN, cc.MAX):
        return exact, 0
    work = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    magnitude = np.abs(stack).sum(axis=0) / (size if op is cc.MEAN else 1)
    if op is cc.PRODUCT:
        magnitude = 4 * np.abs(exact)
    error = 2 * size * np.finfo(work).eps * magnitude
    if dtype.itemsize == 2:
        error = error + ml_dtypes.finfo(dtype).eps * (np.abs(exact) + error)
    return exact, error


def assert_close(result, arrays, op):
    """Compare a result with the exact one."""
    exact, error = reduced(arrays, op)
    assert result.dtype == arrays[0].dtype
    assert result.shape == exact.shape
    if np.isscalar(error) and error == 0:
        np.testing.assert_array_equal(result.astype(exact.dtype), exact)
    else:
        wide = result.astype(exact.dtype)
        assert (np.abs(wide - exact) <= error).all(), np.abs(wide - exact).max()
