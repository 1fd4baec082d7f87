"""Blocks of 8 bits a number: as NumPy makes them, at every number where it could go wrong."""

import numpy as np
import pytest

import collectives as cc
from collectives.kernels import int8
from collectives.kernels.int8 import BLOCK, MOST, NUMBERS

WIDE = [np.dtype(np.float32), np.dtype(np.float64)]
LARGEST = float(np.finfo(np.float32).max)

# Of the largest number of a block: half of a 126th, whose rounding up adds 2^-7 at most.
ERROR = 0.5 / MOST * (1 + 2.0**-7)


def narrowed(source, **options):
    out = np.full(-(-source.size // NUMBERS), 0x77, np.uint8).astype(BLOCK)
    int8.narrow(source, out, **options)
    return out


def widened(blocks, count, wide=np.float32):
    out = np.empty(count, wide)
    int8.widen(blocks, out)
    return out


def reference(source):
    """Blocks as the text of the module says."""
    x = np.zeros((-(-source.size // NUMBERS), NUMBERS), np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        x.reshape(-1)[: source.size] = source
        largest = np.where(np.isfinite(x), np.abs(x), 0).max(axis=1, initial=0)
        bits = (largest / np.float32(MOST)).view(np.uint32)
        half = ((bits + 0xFFFF) >> 16).astype(np.uint16)
        step = (half.astype(np.uint32) << 16).view(np.float32)[:, None]
        most = np.minimum(np.float32(MOST), LARGEST / step).astype(np.float32).astype(int)
        codes = np.clip(np.rint(x / np.where(step > 0, step, np.float32(1))), -most, most)
    codes[x == np.inf], codes[x == -np.inf], codes[np.isnan(x)] = 127, -127, -128
    # The sign of a step: something here is no usual number.
    half[~(np.abs(x) <= np.array(0x7F700000, np.uint32).view(np.float32)).all(axis=1)] |= 0x8000
    blocks = np.empty(len(x), BLOCK)
    blocks["step"], blocks["codes"] = half, codes
    return blocks


def numbers(count, wide, seed=0):
    """Numbers of all sizes, blocks of zeros among them, and all that is special."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(count) * 10.0 ** random.integers(-44, 38, count)
    x[: count // 2] = random.standard_normal(count // 2)
    x[64:130] = 0
    x[200:206] = np.nan, np.inf, -np.inf, LARGEST, -LARGEST, -0.0
    x[300:303] = 1e-45, -1e-45, 3e-43
    with np.errstate(over="ignore"):
        return x.astype(wide)


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_blocks_are_those_of_numpy(wide):
    x = numbers(100_001, wide)
    np.testing.assert_array_equal(narrowed(x), reference(x))


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_a_number_is_wrong_by_half_a_step_at_most(wide):
    x = numbers(100_000, wide)
    x = np.where(np.isfinite(x.astype(np.float32)), x, 1).astype(wide)[: 64 * 1500]
    found = widened(narrowed(x), x.size, wide).astype(np.float64).reshape(-1, 64)
    exact = x.astype(np.float64).reshape(-1, 64)
    # The smallest step is the smallest bfloat16.
    allowed = np.maximum(np.abs(exact).max(axis=1) * ERROR, 2.0**-133)
    # Where 126 steps are no float32, the largest number is one step lower.
    allowed = np.where(np.abs(exact).max(axis=1) > 0.98 * LARGEST, 2 * allowed, allowed)
    assert (np.abs(found - exact) <= allowed[:, None] * (1 + 1e-6)).all()


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_what_is_no_number_stays_and_leaves_the_others_alone(wide):
    x = np.linspace(-3, 3, 64).astype(wide)
    expected = widened(narrowed(x), 64, wide)
    for at, value in ((0, np.nan), (7, np.inf), (9, -np.inf)):
        x[at + 1], expected[at + 1] = value, value
    # The largest one is still there.
    np.testing.assert_array_equal(widened(narrowed(x), 64, wide), expected)


def test_the_largest_number_stays_finite_and_a_larger_one_does_not():
    x = np.full(64, LARGEST)
    assert (np.abs(widened(narrowed(x), 64)) > 0.98 * LARGEST).all()
    assert np.isfinite(widened(narrowed(x), 64)).all()
    np.testing.assert_array_equal(widened(narrowed(-2 * x), 64), -np.inf)


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_any_count_is_packed_and_nothing_beyond_it(wide):
    for count in (0, 1, 63, 64, 65, 1000):
        x = np.linspace(-3, 3, count).astype(wide)
        blocks = np.full(-(-count // NUMBERS) + 1, 7, np.uint8).astype(BLOCK)
        int8.narrow(x, blocks[:-1])
        np.testing.assert_array_equal(blocks[:-1], reference(x))
        assert blocks[-1] == np.array(7, np.uint8).astype(BLOCK)
        out = np.full(count + 1, 7, wide)
        int8.widen(blocks[:-1], out[:count])
        assert out[count] == 7


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_the_division_comes_before_the_packing(wide):
    x = numbers(5000, wide, seed=1)
    np.testing.assert_array_equal(narrowed(x, divisor=3), reference(x / wide.type(3)))


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_a_residual_is_added_and_keeps_the_error(wide):
    random = np.random.default_rng(2)
    x = random.standard_normal(5001).astype(wide)
    residual = (1e-2 * random.standard_normal(5001)).astype(wide)
    total = x / wide.type(3) + residual
    blocks = narrowed(x, divisor=3, residual=residual)
    np.testing.assert_array_equal(blocks, reference(total))
    np.testing.assert_array_equal(residual, total - widened(blocks, 5001, wide))


def test_a_residual_stays_where_the_result_is_no_finite_number():
    x = np.array([np.nan, np.inf, 100.3], np.float32)
    residual = np.full(3, 0.25, np.float32)
    found = widened(narrowed(x, residual=residual), 3)
    np.testing.assert_array_equal(found[:2], x[:2])
    np.testing.assert_array_equal(residual[:2], 0.25)
    assert residual[2] == np.float32(100.3) + np.float32(0.25) - found[2]


UFUNCS = {cc.SUM: np.add, cc.PRODUCT: np.multiply, cc.MIN: np.minimum, cc.MAX: np.maximum}


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("op", UFUNCS, ids=lambda op: op.value)
def test_a_reduction_is_computed_in_float32_in_rank_order_and_packed_once(op, size):
    everyones = [narrowed(numbers(900, np.float32, seed)) for seed in range(size)]
    with np.errstate(all="ignore"):
        total = widened(everyones[0], 960)
        for part in everyones[1:]:
            total = UFUNCS[op](total, widened(part, 960))
        expected = reference(total)
    for rank in range(size):
        parts = np.zeros((size - 1, 20), BLOCK)  # rows may be longer than what counts
        for row, part in zip(parts, everyones[:rank] + everyones[rank + 1 :], strict=True):
            row[:15] = part
        own = everyones[rank].copy()
        int8.reduce(parts, own, rank=rank, op=op)
        np.testing.assert_array_equal(own, expected)


def test_a_reduction_with_a_residual_keeps_the_error_of_the_result():
    random = np.random.default_rng(4)
    everyones = [narrowed(random.uniform(1, 2, 640).astype(np.float32)) for _ in range(3)]
    residual = (1e-2 * random.standard_normal(640)).astype(np.float32)
    total = sum(widened(part, 640) for part in everyones) + residual
    own = everyones[0].copy()
    int8.reduce(np.stack(everyones[1:]), own, rank=0, op=cc.SUM, residual=residual)
    np.testing.assert_array_equal(own, reference(total))
    np.testing.assert_array_equal(residual, total - widened(own, 640))


F32, BLOCKS = np.zeros(64, np.float32), np.zeros(1, BLOCK)
ROWS = np.zeros((1, 1), BLOCK)


def reduced(parts=ROWS, own=BLOCKS, rank=0, **options):
    return int8.reduce(parts, own, rank=rank, op=cc.SUM, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: int8.narrow(F32, F32), TypeError, "narrow: wrong dtypes"),
        (lambda: int8.narrow(F32.astype(int), BLOCKS), TypeError, "got .* and int64"),
        (lambda: int8.narrow(np.zeros(65, np.float32), BLOCKS), ValueError, "a block for each 64"),
        (lambda: int8.narrow(F32[::2], BLOCKS), ValueError, "contiguous"),
        (lambda: int8.narrow(F32, BLOCKS, residual=F32[:9]), TypeError, "another array's"),
        (lambda: int8.narrow(F32, BLOCKS, residual=np.zeros(64)), TypeError, "64 of float64"),
        (lambda: int8.widen(BLOCKS, np.zeros(65, np.float32)), ValueError, "widen: arrays do not"),
        (lambda: reduced(parts=F32), TypeError, "reduce: expected rows of blocks, got float32"),
        (lambda: reduced(own=np.zeros(2, BLOCK)), ValueError, "at least 2 blocks, got 1"),
        (lambda: reduced(rank=2), ValueError, "expected 0 .. 1, got 2"),
        (lambda: reduced(residual=F32[:9]), TypeError, "a residual of 64 float32, got 9"),
        (lambda: reduced(residual=np.zeros(64)), TypeError, "got 64 of float64"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
