"""Casts and sums of 16-bit floats: bit for bit, at every number where a rounding could go wrong."""

import importlib.util
import os
import re
import sys

import ml_dtypes
import numba
import numpy as np
import pytest

import collectives as cc
import launcher
from collectives.kernels import float16, intrinsics
from collectives.kernels import half_loops as packing
from pairwise import also

HALF = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = [HALF, BFLOAT16]
WIDE = [np.dtype(np.float32), np.dtype(np.float64)]
ALL = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def bits(array):
    return array.view(f"u{array.itemsize}")


def widened(source, wide=np.float32):
    out = np.empty(source.size, wide)
    packing.widen(source, out)
    return out


def narrowed(source, half, **options):
    out = np.empty(source.size, half)
    packing.narrow(source, out, **options)
    return out


def positive_numbers(half):
    """All finite numbers of a type from 0 up, and one step beyond, where infinity begins."""
    infinity = bits(np.array([np.inf], half))[0]
    values = ALL[:infinity].view(half).astype(np.float64)
    return np.append(values, 2 * values[-1] - values[-2])


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_all_patterns_are_widened_as_the_libraries_do(half):
    source = ALL.view(half)
    expected = bits(source.astype(np.float32))
    if half == HALF:  # a signalling NaN becomes a quiet one, as IEEE 754 asks for
        expected = np.where(np.isnan(source), expected | 0x00400000, expected)
    np.testing.assert_array_equal(bits(widened(source)), expected)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(widened(source, np.float64), source.astype(np.float64))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_numbers_between_two_neighbours_go_to_the_nearest_a_tie_to_the_even_one(half, wide, sign):
    exact = positive_numbers(half)
    lower, upper = exact[:-1], exact[1:]
    middle = ((lower + upper) / 2).astype(wide)
    assert (middle.astype(np.float64) == (lower + upper) / 2).all()
    pattern = np.arange(lower.size, dtype=np.uint16)  # of the lower one; the upper one is the next
    zero, infinity = np.zeros(1, wide), np.full(1, np.inf, wide)
    for source, expected in [
        (lower.astype(wide), pattern),
        (np.nextafter(lower.astype(wide), infinity), pattern),
        (np.nextafter(middle, zero), pattern),
        (middle, pattern + pattern % 2),
        (np.nextafter(middle, infinity), pattern + 1),
    ]:
        signed = expected | (0x8000 if sign < 0 else 0)
        np.testing.assert_array_equal(bits(narrowed(sign * source, half)), signed)


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_numbers_without_end_become_infinite_and_never_the_largest(half):
    for wide in WIDE:
        huge = np.array([np.inf, -np.inf, np.finfo(wide).max, -np.finfo(wide).max], wide)
        np.testing.assert_array_equal(
            narrowed(huge, half).astype(np.float64), [np.inf, -np.inf, np.inf, -np.inf]
        )


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_random_bits_are_rounded_as_the_libraries_do(half):
    source = np.random.default_rng(0).integers(0, 1 << 32, 1 << 23, np.uint32).view(np.float32)
    result = narrowed(source, half)
    with np.errstate(all="ignore"):
        expected = source.astype(half)
    number = ~np.isnan(source)
    np.testing.assert_array_equal(bits(result)[number], bits(expected)[number])


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_every_nan_is_rounded_to_numpys(half, wide):
    fraction = int(np.finfo(wide).nmant)
    top = (0x7FF if wide.itemsize == 8 else 0xFF) << fraction
    payloads = [1, 2, 1 << 5, (1 << fraction) - 1, 1 << (fraction - 1), 3 << (fraction - 8)]
    patterns = np.array([top | p for p in payloads], f"u{wide.itemsize}")
    for sign in (0, 1):
        source = (patterns | np.array(sign << (8 * wide.itemsize - 1), patterns.dtype)).view(wide)
        for divisor in (1, 3):
            result = bits(narrowed(source, half, divisor=divisor))
            np.testing.assert_array_equal(result, 0x7E00 if half == HALF else 0x7FC0)


def test_both_ways_to_convert_float16_agree(monkeypatch):
    # One of them is in use; the other one has to be as good where the processor is another.
    with monkeypatch.context() as patch:
        patch.setattr(intrinsics, "target_processor", lambda: ("x86_64", "without features", ""))
        spec = importlib.util.find_spec(float16.__name__)
        other = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(other)
    assert "by_integers" in other.round_half.__name__

    @numba.njit
    def loop(source, out, wide):
        for i in range(source.size):
            out[i] = other.round_half(source[i])
            wide[i] = other.widen_half(out[i])

    random = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
    source = np.concatenate([random, widened(ALL.view(HALF))])
    out = np.empty(source.size, np.uint16)
    wide = np.empty_like(source)
    loop(source, out, wide)
    np.testing.assert_array_equal(out, bits(narrowed(source, HALF)))
    np.testing.assert_array_equal(bits(wide), bits(widened(out.view(HALF))))


@pytest.mark.parametrize("count", [0, 1, 15, 2048, 2049, 5000])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_any_count_is_cast_and_nothing_beyond_it(half, count):
    source = np.linspace(-3, 3, count, dtype=np.float32)
    out = np.full(count + 1, 7, half)
    packing.narrow(source, out[:count])
    np.testing.assert_array_equal(out[:count], source.astype(half))
    assert out[count] == 7
    wide = np.full(count + 1, 7, np.float32)
    packing.widen(out[:count], wide[:count])
    np.testing.assert_array_equal(wide[:count], out[:count].astype(np.float32))
    assert wide[count] == 7


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_the_division_comes_before_the_rounding(wide):
    source = np.array([150_000.0, 1.0, -7.0], wide)
    result = narrowed(source, HALF, divisor=3)
    np.testing.assert_array_equal(result, (source / wide.type(3)).astype(HALF))
    assert np.isfinite(result).all()


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_residual_is_added_and_keeps_the_error(half, wide):
    random = np.random.default_rng(2)
    source = random.standard_normal(5001).astype(wide)
    residual = (1e-3 * random.standard_normal(5001)).astype(wide)
    total = source / wide.type(3) + residual
    result = narrowed(source, half, divisor=3, residual=residual)
    np.testing.assert_array_equal(bits(result), bits(narrowed(total, half)))
    np.testing.assert_array_equal(residual, total - widened(result, wide))


def test_a_residual_stays_where_the_result_is_no_finite_number():
    source = np.array([1e6, np.nan, -np.inf, 1 + 2**-12], np.float32)
    residual = np.full(4, 2.0**-14, np.float32)
    result = narrowed(source, HALF, residual=residual)
    np.testing.assert_array_equal(result.astype(np.float64), [np.inf, np.nan, -np.inf, 1])
    np.testing.assert_array_equal(residual, [2.0**-14] * 3 + [2.0**-14 + 2.0**-12])


UFUNCS = {
    cc.SUM: np.add,
    cc.MEAN: np.add,
    cc.PRODUCT: np.multiply,
    cc.MIN: np.minimum,
    cc.MAX: np.maximum,
}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("op", UFUNCS, ids=lambda op: op.value)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_reduction_is_computed_in_float32_in_rank_order_and_rounded_once(half, op, size):
    random = np.random.default_rng(3)
    everyones = random.uniform(-2, 2, (size, 4500)).astype(half)
    everyones[random.integers(size, size=4), [0, 1, 4000, 4499]] = [np.nan, np.inf, -np.inf, np.nan]
    divisor = size if op is cc.MEAN else 1
    total = everyones[0].astype(np.float32) / np.float32(divisor)
    for part in everyones[1:]:
        total = UFUNCS[op](total, part.astype(np.float32) / np.float32(divisor))
    for rank in range(size):
        parts = np.zeros((size - 1, 5000), half)  # rows may be longer than what counts
        parts[:, :4500] = np.delete(everyones, rank, axis=0)
        own = everyones[rank].copy()
        packing.reduce(parts, own, rank=rank, op=op, divisor=divisor)
        np.testing.assert_array_equal(own.astype(np.float32), total.astype(half).astype(np.float32))


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_reduction_with_a_residual_keeps_the_error_of_the_result(half):
    random = np.random.default_rng(4)
    everyones = random.uniform(1, 2, (3, 4500)).astype(half)
    residual = (1e-4 * random.standard_normal(4500)).astype(np.float32)
    total = everyones.astype(np.float32).sum(axis=0) + residual
    own = everyones[0].copy()
    packing.reduce(everyones[1:], own, rank=0, op=cc.SUM, residual=residual)
    np.testing.assert_array_equal(own.astype(np.float32), total.astype(half).astype(np.float32))
    np.testing.assert_array_equal(residual, total - own.astype(np.float32))


F32, F16 = np.zeros(4, np.float32), np.zeros(4, HALF)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: packing.widen(F32, F32), TypeError, "widen: wrong dtypes"),
        (lambda: packing.widen(F16, F16), TypeError, "got float16 and float16"),
        (lambda: packing.widen(F16, F32[:3]), ValueError, r"got shapes \(4,\) and \(3,\)"),
        (lambda: packing.widen(F16[::2], F32[:2]), ValueError, "contiguous"),
        (lambda: packing.widen(F16.reshape(2, 2), F32.reshape(2, 2)), ValueError, "one dimension"),
        (lambda: packing.narrow(F32, F16[:3]), ValueError, "narrow: arrays do not fit"),
        (lambda: packing.narrow(F32.astype(int), F16), TypeError, "got float16 and int64"),
        (lambda: packing.narrow(F32, F16, residual=F32[:3]), ValueError, "do not fit"),
        (lambda: packing.narrow(F32, F16, residual=np.zeros(4)), TypeError, "residual"),
        (lambda: reduce(F16[:3].reshape(1, 3), F16), ValueError, "reduce: parts do not fit"),
        (lambda: reduce(F16, F16), ValueError, "rows of at least 4"),
        (lambda: reduce(F32.reshape(1, 4), F16), TypeError, "got float32, float16 and float32"),
        (lambda: reduce(F16.reshape(1, 4), F16, rank=2), ValueError, "expected 0 .. 1, got 2"),
        (lambda: reduce(F16.reshape(1, 4), F16, residual=F32[:0]), ValueError, "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def reduce(parts, own, rank=0, residual=None):
    packing.reduce(parts, own, rank=rank, op=cc.SUM, residual=residual)


@pytest.mark.parametrize("name", ["round_half", "round_bfloat16", "widen_half", "widen_bfloat16"])
def test_the_element_functions_are_vectorised_in_other_loops(name):
    convert = getattr(float16, name)

    @numba.njit
    def loop(source, out):
        for i in range(out.size):
            out[i] = convert(source[i])

    dtypes = (np.float32, np.uint16) if name.startswith("round") else (np.uint16, np.float32)
    loop(*(np.ones(64, dtype) for dtype in dtypes))
    (code,) = loop.inspect_llvm().values()
    assert re.search(r"store <\d+ x (i16|i32|half|float)>", code)


# Processors without the instructions, which are those of numba's "generic" one: everything above
# must hold there, and LLVM must not call a conversion function that is not there.
@pytest.mark.parametrize(
    "processor", [{"NUMBA_CPU_NAME": "generic"}, also({"NUMBA_ENABLE_AVX": "0"})]
)
def test_processors_without_float16_instructions(processor, tmp_path):
    environment = {**processor, "NUMBA_CACHE_DIR": str(tmp_path)}
    used = "from collectives.kernels import float16 as h; "
    used += "print(h.round_half is h._round_half_by_integers)"
    result = launcher.run([sys.executable, "-c", used], timeout=100, **environment)
    assert result.stdout.strip() == "True", result
    # Without tests/conftest.py, which would compile the first calls of a rank.
    path = os.pathsep.join([str(launcher.ROOT), str(launcher.ROOT / "tests")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    launcher.run(
        [*command, __file__, "-k", "not process and not bfloat16"],
        timeout=100,
        PYTHONPATH=path,
        **environment,
    ).checked()


def test_a_second_process_finds_the_loops_compiled(tmp_path):
    script = """
import sys
import collectives as cc, ml_dtypes, numpy as np
from collectives.kernels import half_loops as packing
wide, residual = np.zeros((2, 1), np.float32)
for half in (np.float16, ml_dtypes.bfloat16):
    packed = np.zeros(1, half)
    packing.widen(packed, wide)
    packing.narrow(wide, packed, residual=residual)
    packing.reduce(np.zeros((1, 1), half), packed, rank=0, op=cc.SUM)
print("numba" in sys.modules)
"""
    seen = [
        launcher.run([sys.executable, "-c", script], timeout=100, NUMBA_CACHE_DIR=str(tmp_path))
        for _ in range(2)
    ]
    assert [result.stdout.split() for result in seen] == [["True"], ["False"]], seen
