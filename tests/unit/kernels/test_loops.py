"""Loops over two arrays at once: the bits of those that begin, go on and save, and vectorised.

`.ci/processors` repeats the test of NaNs with the code of other processors.
"""

import ctypes
import re

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import oracle
from collectives.arrays.host_arrays import address
from collectives.kernels import loops

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
OPS = [cc.SUM, cc.MEAN, cc.MIN, cc.MAX, cc.PRODUCT]
COUNTS = [0, 1, 2, 7, 64, 333]

# Dtypes with NaNs, and the bits of numpy.nan, which every NaN of a result has.
NANS = {
    np.dtype(np.float16): 0x7E00,
    np.dtype(ml_dtypes.bfloat16): 0x7FC0,
    np.dtype(np.float32): 0x7FC00000,
    np.dtype(np.float64): 0x7FF8 << 48,
    np.dtype(np.complex64): 0x7FC00000,
    np.dtype(np.complex128): 0x7FF8 << 48,
}
UFUNCS = {
    cc.SUM: np.add,
    cc.MEAN: np.add,
    cc.MIN: np.minimum,
    cc.MAX: np.maximum,
    cc.PRODUCT: np.multiply,
}

# Zeros, subnormal, small, large and infinite ones and both kinds of NaN, of either type of 16 bits.
KINDS = [
    *(0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7F, 0x80, 0x3C00, 0xBF80, 0x7BFF, 0x7F7F),
    *(0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x7E01, 0x7D01, 0xFD01, 0x7FC1, 0x7F81),
]

_LOOP = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def call(loop, dest, *others):
    """Call a loop of two or three arrays."""
    words = [x if isinstance(x, int) else address(x) for x in (dest, *others)]
    _LOOP(loop)(*words)


def operands(dtype, count):
    """Return two arrays, for 16 bits of every kind of number, each beside every other."""
    if dtype not in HALVES:
        return [oracle.data(rank, (count,), dtype) for rank in range(2)]
    rng = np.random.default_rng(count)
    some = [rng.integers(0, 1 << 16, count, np.uint16) for _ in range(2)]
    if count > 100:
        kinds = np.array(KINDS, np.uint16)
        beside = np.repeat(kinds, len(kinds)), np.tile(kinds, len(kinds))
        some = [np.concatenate(both) for both in zip(beside, some, strict=True)]
    return [bits.view(dtype) for bits in some]


def by_steps(found, a, b):
    """Combine two arrays as several are combined: fill, begin, save."""
    count = a.size
    parts = []
    for array in (a, b):
        part = array.copy()
        if found.fill:
            call(found.fill, part, array, count, 2)
        parts.append(part)
    total = np.empty(count, np.float32 if a.dtype in HALVES else a.dtype)
    call(found.start, total, *parts, count)
    if not found.save:
        return total
    result = np.empty_like(a)
    call(found.save, result, total, count, 2)
    return result


def moved(array):
    """Return a copy that begins at no multiple of its items' size times two."""
    memory = np.empty(array.nbytes + array.itemsize, np.uint8)[array.itemsize :].view(array.dtype)
    memory[...] = array
    return memory


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_two_at_once_have_the_bits_of_two_by_steps(dtype, op):
    dtype = np.dtype(dtype)
    if not oracle.is_defined(op, dtype):
        pytest.skip("not defined")
    whole = loops.loops(dtype, op, of_two=True)
    assert whole.fill == whole.save == 0
    for count in COUNTS:
        a, b = operands(dtype, count)
        count = a.size
        with np.errstate(all="ignore"):
            expected = by_steps(loops.loops(dtype, op), a, b).tobytes()
        for place in (np.copy, moved):
            result = place(np.zeros_like(a))
            call(whole.start, result, place(a), place(b), count)
            assert result.tobytes() == expected
            result = place(a)
            call(whole.add, result, place(b), count, 2)
            assert result.tobytes() == expected
            result = place(b)
            call(loops.reversed_loop(dtype, op), result, place(a), count, 2)
            assert result.tobytes() == expected


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_mean_of_halves_has_the_bits_of_the_divided_sum_unless_that_overflows(dtype):
    a, b = operands(dtype, 333)
    arrays, found, count = (a, b, a[::-1].copy()), loops.loops(dtype, cc.MEAN), a.size
    total, result = np.empty(count, np.float32), np.empty_like(a)
    call(found.start, total, a, b, count)
    call(found.add, total, arrays[2], count, 3)
    call(found.save, result, total, count, 3)
    with np.errstate(all="ignore"):
        first, second, third = (array.astype(np.float32) for array in arrays)
        divided = (first + second + third) / np.float32(3)
        exact = sum(array.astype(np.float64) for array in arrays) / 3
    fits = np.isfinite(divided)
    expected = divided.astype(dtype)[fits]
    np.testing.assert_array_equal(result[fits].view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(np.isfinite(result.astype(np.float32)), np.isfinite(exact))


def parts_of(array):
    """View an array of complex numbers as their parts; return any other array."""
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def with_nans(dtype):
    """Return two arrays that pair every kind of NaN, number, zero and infinity with every kind."""
    nan = NANS[dtype]
    part = parts_of(np.empty(0, dtype)).dtype
    sign, last = 1 << (8 * part.itemsize - 1), 1
    quiet_bit = nan & ~(nan << 1)  # the first bit of the fraction
    infinity = nan ^ quiet_bit
    kinds = [nan, nan | 1, nan | sign, nan | sign | 2, infinity | last, infinity | last | sign]
    kinds += [0, sign, infinity, infinity | sign]
    kinds = np.array(kinds, f"u{part.itemsize}").view(part)
    kinds = np.append(kinds, np.array([1.5, -3], part))
    pairs = np.repeat(kinds, len(kinds)), np.tile(kinds, len(kinds))
    return [np.tile(x, 3).view(dtype) for x in pairs]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
@pytest.mark.parametrize("dtype", NANS, ids=str)
def test_every_nan_has_the_bits_of_numpys(dtype, op):
    if not oracle.is_defined(op, dtype):
        pytest.skip("not defined")
    a, b = with_nans(dtype)
    with np.errstate(all="ignore"):
        wide = [x if dtype.kind == "c" else x.astype(np.float64) for x in (a, b)]
        is_nan = np.isnan(parts_of(UFUNCS[op](*wide)))
    whole, count = loops.loops(dtype, op, of_two=True), a.size
    results = {name: np.zeros_like(a) for name in ("start", "steps", "add", "behind")}
    call(whole.start, results["start"], a, b, count)
    results["steps"][...] = by_steps(loops.loops(dtype, op), a, b)
    results["add"][...] = a
    call(whole.add, results["add"], b, count, 2)
    results["behind"][...] = b
    call(loops.reversed_loop(dtype, op), results["behind"], a, count, 2)
    for name, result in results.items():
        numbers = parts_of(result)
        found = numbers.view(f"u{numbers.itemsize}")[is_nan]
        assert found.size > 100, name
        np.testing.assert_array_equal(found, NANS[dtype], err_msg=name)
        assert not np.isnan(numbers.astype(np.float64)[~is_nan]).any(), name


@pytest.mark.parametrize("function", ["add", "mean"])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("kind", ["start", "add", "behind"])
def test_they_are_vectorised_in_place_and_elsewhere(kind, name, function):
    # Imported here, because `tests/package/arm64.py` runs the other tests without numba.
    numba = pytest.importorskip("numba")
    from collectives.kernels import elementwise

    loop = numba.njit(numba.void(*[numba.int64] * 4))(elementwise.loop(kind, name, function))
    (code,) = loop.inspect_llvm().values()
    assert re.search(r"store <\d+ x (i16|i32|half|float)>", code)
