"""The text of the device kernels, compiled for the host: the same bits as the host's loops."""

import ctypes
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest

from collectives.kernels import cuda, half_loops
from requirements import require

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FLOATS = [np.dtype(np.float32), np.dtype(np.float64)]

# What CUDA brings, and what CuPy makes of a kernel: a loop over elements.
PROLOGUE = """
#include <cstring>
#define __device__
static inline unsigned __float_as_uint(float x) { unsigned b; std::memcpy(&b, &x, 4); return b; }
static inline float __uint_as_float(unsigned b) { float x; std::memcpy(&x, &b, 4); return x; }
static inline double __longlong_as_double(long long b)
{ double x; std::memcpy(&x, &b, 8); return x; }
"""

# CuPy knows parameters by NumPy's names, which a kernel's text does not have.
IN_C = {
    "T": "T",
    "uint16": "unsigned short",
    "float32": "float",
    "int64": "long long",
    "uint64": "unsigned long long",
}

SCALARS = ("divisor", "rows", "scale")


def loop(name, half, wide):
    """C++ of one kernel as a function of pointers; scalars are pointers to one number."""
    kernel = cuda.KERNELS[name]
    described = [p.split() for p in f"{kernel.reads}, {kernel.writes}".split(",")]
    described = [(*raw, IN_C[kind], p) for *raw, kind, p in described]
    parameters = ", ".join(
        f"{kind} *{p}" if raw else f"{kind} *{p}_" for *raw, kind, p in described
    )
    elements = " ".join(
        f"{kind} &{p} = {p}_[{0 if p in SCALARS else 'i'}];"
        for *raw, kind, p in described
        if not raw
    )
    operation = kernel.operation.replace("HALF", half)
    kind = {"float32": "float", "float64": "double"}[wide]
    return (
        f'namespace {name}_{half}_{wide} {{ typedef {kind} T; extern "C" void '
        f"{name}_{half}_{wide}_({parameters}, long n) "
        f"{{ for (long i = 0; i < n; i++) {{ {elements} {operation} }} }} }}\n"
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        require("compiler", "there is no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    text = PROLOGUE + cuda.PREAMBLE
    for name in cuda.KERNELS:
        text += "".join(loop(name, h.name, w.name) for h in HALVES for w in FLOATS)
    (folder / "kernels.cpp").write_text(text)
    library = folder / "kernels.so"
    # As CuPy compiles: numbers as IEEE 754 has them, and nothing of C++ after 2014.
    command = [compiler, "-std=c++14", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", library, folder / "kernels.cpp"], check=True, timeout=60)
    return ctypes.CDLL(str(library))


def call(library, name, half, wide, *arrays, count=None):
    function = getattr(library, f"{name}_{half.name}_{wide.name}_")
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
    function(*pointers, ctypes.c_long(arrays[0].size if count is None else count))


def hard_numbers(dtype):
    """All exponents, ties and their neighbours, subnormals, infinities, NaNs of both signs."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        exact = [halves.view(h).astype(np.float32).astype(np.float64) for h in HALVES]
        values = np.concatenate(exact)
        between = (values[1:] + values[:-1]) / 2
    random = np.random.default_rng(7).integers(0, 1 << 32, 300_000, dtype=np.uint32)
    with np.errstate(all="ignore"):
        near = np.concatenate([values, between, random.view(np.float32).astype(np.float64)])
        near = near.astype(dtype)
        return np.concatenate([near, np.nextafter(near, dtype.type(0)), near * dtype.type(1.5)])


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("wide", FLOATS, ids=str)
def test_widening_gives_the_host_s_bits(compiled, half, wide):
    source = np.arange(1 << 16, dtype=np.uint16)
    got, expected = np.empty(source.size, wide), np.empty(source.size, wide)
    call(compiled, "widen", half, wide, source, got)
    half_loops.widen(source.view(half), expected)
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("wide", FLOATS, ids=str)
@pytest.mark.parametrize("divisor", [1, 3])
def test_narrowing_gives_the_host_s_bits(compiled, half, wide, divisor):
    source = hard_numbers(wide)
    got, expected = np.empty(source.size, np.uint16), np.empty(source.size, half)
    call(compiled, "narrow", half, wide, source, np.array([divisor], wide), got)
    half_loops.narrow(source, expected, divisor=divisor)
    np.testing.assert_array_equal(got, expected.view(np.uint16))


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("wide", FLOATS, ids=str)
def test_a_residual_gets_the_host_s_bits(compiled, half, wide):
    source = hard_numbers(wide)
    residuals = [np.full(source.size, 1e-3, wide) for _ in range(2)]
    got, expected = np.empty(source.size, np.uint16), np.empty(source.size, half)
    for divisor in (1, 5):  # the second time with what the first has left
        call(compiled, "carry", half, wide, source, np.array([divisor], wide), got, residuals[0])
        half_loops.narrow(source, expected, divisor=divisor, residual=residuals[1])
        np.testing.assert_array_equal(got, expected.view(np.uint16))
        np.testing.assert_array_equal(residuals[0].view(np.uint8), residuals[1].view(np.uint8))


def packed(given, places, count, dtype):
    """What a table of arrays, each (array or None for zeros, first element), makes."""
    expected = np.zeros(count, dtype)
    for array, first in zip(given, places, strict=True):
        if array is not None:
            expected[first : first + len(array)] = array
    return expected


def table_of(given, places):
    rows = [
        (0, first, 1) if array is None else (array.ctypes.data, first, len(array))
        for array, first in zip(given, places, strict=True)
    ]
    return np.array(rows, np.uint64).reshape(-1)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("wide", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_arrays_are_packed_by_a_table(compiled, half, wide, rows):
    random = np.random.default_rng(rows)
    lengths = random.integers(1, 40, rows)
    given = [None if i % 3 == 2 else random.standard_normal(n) for i, n in enumerate(lengths)]
    ends = np.cumsum(lengths + random.integers(0, 9, rows)).tolist()
    places = [before + rows % 3 for before in [0, *ends[:-1]]]  # with zeros before the first, too
    count = places[-1] + lengths[-1] + 3
    one, number = np.array([1.5]), np.array([rows], np.int64)
    for name, dtype in (("pack", wide), ("scale", wide), ("scale16", half)):
        typed = [None if x is None else x.astype(dtype) for x in given]
        expected = packed(typed, places, count, dtype)
        got = np.full(count, 7).astype(dtype)
        scale = [] if name == "pack" else [one.astype(np.float32 if dtype == half else dtype)]
        call(compiled, name, half, wide, table_of(typed, places), number, *scale, got, count=count)
        if name == "scale16":
            expected = (expected.astype(np.float32) * np.float32(1.5)).astype(half)
        elif name == "scale":
            expected = expected * dtype.type(1.5)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("wide", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_arrays_are_unpacked_by_a_table(compiled, wide, rows):
    random = np.random.default_rng(rows)
    lengths = random.integers(1, 40, rows)
    places = np.cumsum([3, *lengths[:-1] + 2]).tolist()
    packed = random.standard_normal(places[-1] + lengths[-1] + 3).astype(wide)
    before = packed.copy()
    given = [None if i % 3 == 1 else np.zeros(n, wide) for i, n in enumerate(lengths)]
    number = np.array([rows], np.int64)
    table = table_of(given, places)
    call(compiled, "unpack", HALVES[0], wide, table, number, packed, count=packed.size)
    np.testing.assert_array_equal(packed, before)
    for array, first in zip(given, places, strict=True):
        if array is not None:
            np.testing.assert_array_equal(array, packed[first : first + len(array)])


def test_the_preamble_uses_nothing_that_cuda_lacks():
    text = cuda.PREAMBLE
    for word in ("std::", "#include", "0x1p"):
        assert word not in text
