"""CUDA kernels: 16-bit conversions, and packing arrays into buckets.

The results equal those of `collectives.kernels.half_loops` on the host, bit for bit. The source is
C++, which CuPy compiles for the device at first use. It uses three CUDA functions, which
reinterpret a float's bits as an integer and back, and PTX instructions in device code.

A kernel reads every element once: 4 bytes in and 2 out for a float32, 4 more each way with a
residual, at the bandwidth of the device's memory.

One launch packs many arrays into one, driven by a table of three numbers for each, in the order of
their places:

    address, first element, elements   | a, 0, 5 | b, 8, 3 | 0, 16, 2 |     0: of zeros
    packed                               a a a a a . . . b b b . . . . . 0 0 . .     .: 0

Each element of the result finds its row by binary search: for 200 arrays 8 reads, of words that
neighbouring threads also read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.device import DeviceBuffer, is_half

__all__ = ["KERNELS", "PREAMBLE", "Kernel", "PackKernel", "narrow", "widen"]

# CuPy compiles with -ftz=true, which flushes subnormal float32 numbers to zero. So arithmetic on
# float32, and conversions from float64, use PTX instructions, which keep subnormals.
_CONVERSIONS = """
__device__ inline float nearest(double x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;
#else
    return (float)x;
#endif
}
__device__ inline double same(float x) {
#ifdef __CUDA_ARCH__
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
#else
    return (double)x;
#endif
}
"""
_ARITHMETIC = "".join(
    f"""
__device__ inline float {name}(float x, float y) {{
#ifdef __CUDA_ARCH__
    float z;
    asm("{instruction}.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
#else
    return x {operator} y;
#endif
}}
__device__ inline double {name}(double x, double y) {{ return x {operator} y; }}
"""
    for name, instruction, operator in (
        ("quotient", "div", "/"),
        ("product", "mul", "*"),
        ("total", "add", "+"),
        ("difference", "sub", "-"),
    )
)

# The integer forms of `collectives.kernels.float16`, which explains their constants.
PREAMBLE = (
    _CONVERSIONS
    + _ARITHMETIC
    + """
__device__ inline float widen_float16(unsigned short half) {
    unsigned bits = half, magnitude = (bits & 0x7fffu) << 13;
    unsigned result = magnitude + 0x38000000u;
    if (magnitude < 0x00800000u)
        result = __float_as_uint(__uint_as_float(magnitude + 0x38800000u) - 6.103515625e-05f);
    if (magnitude >= 0x0f800000u) result = magnitude + 0x70000000u;
    if (magnitude > 0x0f800000u) result |= 0x00400000u;
    return __uint_as_float(result | ((bits & 0x8000u) << 16));
}
__device__ inline unsigned short round_float16(float x) {
    unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    unsigned odd = (magnitude >> 13) & 1u;
    unsigned result = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
    if (magnitude < 0x38800000u)
        result = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    if (magnitude >= 0x477ff000u) result = 0x7c00u;
    result |= (bits >> 16) & 0x8000u;
    return (unsigned short)(magnitude > 0x7f800000u ? 0x7e00u : result);
}
__device__ inline float widen_bfloat16(unsigned short half) {
    return __uint_as_float((unsigned)half << 16);
}
__device__ inline unsigned short round_bfloat16(float x) {
    unsigned bits = __float_as_uint(x);
    unsigned result = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (unsigned short)(x != x ? 0x7fc0u : result >> 16);
}
__device__ inline float single(float x) { return x; }
__device__ inline float single(double x) {
    float close = nearest(x);
    double rounded = same(close);
    double exact = x < 0 ? -x : x;
    unsigned bits = __float_as_uint(close);
    if (rounded < 0) rounded = -rounded;
    if (rounded > exact) bits = (bits - 1u) | 1u;
    if (rounded < exact) bits |= 1u;
    return __uint_as_float(bits);
}
__device__ inline void widen(float x, float &y) { y = x; }
__device__ inline void widen(float x, double &y) {
    y = same(x);
    if (x != x) {
        unsigned long long nan = __float_as_uint(x);
        nan = ((nan & 0x80000000u) << 32) | 0x7ff8000000000000u | ((nan & 0x003fffffu) << 29);
        y = __longlong_as_double((long long)nan);
    }
}
"""
)


class Kernel(NamedTuple):
    """An element-wise kernel: parameters that it reads, parameters that it writes, and its body.

    `T` is float32 or float64, or any integer in kernels that only copy elements. `HALF` is
    float16 or bfloat16.
    """

    reads: str
    writes: str
    operation: str


# Finds the source or destination of element `i` in the table.
_FIND = """
    long long low = 0, high = rows - 1;
    while (low < high) {
        long long middle = (low + high + 1) / 2;
        if ((long long)table[3 * middle + 1] <= (long long)i) low = middle;
        else high = middle - 1;
    }
    const T *source = (const T *)table[3 * low];
    long long at = (long long)i - (long long)table[3 * low + 1];
    bool here = source != 0 && at >= 0 && at < (long long)table[3 * low + 2];
"""

KERNELS = {
    "widen": Kernel("uint16 x", "T y", "widen(widen_HALF(x), y);"),
    "narrow": Kernel("T x, T divisor", "uint16 y", "y = round_HALF(single(quotient(x, divisor)));"),
    "carry": Kernel(
        "T x, T divisor",
        "uint16 y, T residual",
        "T sum = total(quotient(x, divisor), residual);"
        " y = round_HALF(single(sum));"
        " T kept; widen(widen_HALF(y), kept);"
        " T error = difference(sum, kept);"
        " if (error - error == 0) residual = error;",
    ),
    "pack": Kernel("raw uint64 table, int64 rows", "T y", _FIND + "y = here ? source[at] : (T)0;"),
    "unpack": Kernel(
        "raw uint64 table, int64 rows",
        "T y",  # unchanged
        _FIND.replace("const T *", "T *") + "if (here) source[at] = y;",
    ),
    "scale": Kernel(
        "raw uint64 table, int64 rows, T scale",
        "T y",
        _FIND + "y = here ? product(source[at], scale) : (T)0;",
    ),
    "scale16": Kernel(
        "raw uint64 table, int64 rows, float32 scale",
        "uint16 y",
        # Only the parameters have NumPy's names of dtypes.
        _FIND.replace("T *", "unsigned short *")
        + "y = here ? round_HALF(product(widen_HALF(source[at]), scale)) : (unsigned short)0;",
    ),
}


def narrow(
    source: DeviceBuffer,
    dtype: np.dtype[Any],
    *,
    divisor: int = 1,
    residual: DeviceBuffer | None = None,
) -> DeviceBuffer:
    """Return a buffer's numbers, divided and rounded to 16 bits; as `half_loops.narrow`.

    Args:
        source: float32 or float64.
        dtype: float16 or bfloat16.
        divisor: the quotient is rounded to the source's dtype first.
        residual: as long as the source and of its dtype; changed in place.
    """
    out = source.empty(source.size, dtype)
    # In the dtype of the array, so that the kernel is compiled once per dtype.
    by = source.dtype.type(divisor)
    with source.device.context:
        if residual is None:
            _kernel(source.device.cupy, "narrow", dtype)(source.view, by, out.view)
        else:
            _kernel(source.device.cupy, "carry", dtype)(source.view, by, out.view, residual.view)
    source.device.put()
    return out


def widen(source: DeviceBuffer, out: DeviceBuffer) -> None:
    """Convert `source`, float16 or bfloat16, to `out`, float32 or float64."""
    with source.device.context:
        _kernel(source.device.cupy, "widen", source.dtype)(source.view, out.view)
    source.device.put()


class PackKernel:
    """Packs arrays into one contiguous buffer, and unpacks them.

    The table stays on the device while the arrays keep their addresses. Each row is an array, in
    the order of their places: its device address, or 0 for zeros; the first element of its place;
    and its number of elements, at least one.
    """

    def __init__(self) -> None:
        self._known: tuple[bytes, Any] = (b"", None)

    def __call__(
        self, out: DeviceBuffer, rows: Iterable[tuple[int, int, int]], scale: float = 1
    ) -> None:
        """Write arrays, multiplied by `scale`, to their places, and zeros between them.

        Args:
            out: the packed buffer.
            rows: rows of the table.
            scale: a factor; 1 for integers.
        """
        dtype = out.dtype
        arguments: tuple[Any, ...] = ()
        # Only copies, so words of the element's size serve all dtypes.
        if scale == 1:
            kind = _WORDS[min(dtype.itemsize, 8)]
            kernel = "pack"
        elif is_half(dtype):
            kind = np.dtype(np.uint16)
            kernel, arguments = "scale16", (np.float32(scale),)
        else:
            # Complex numbers are scaled as pairs of floats.
            kind = np.empty(0, dtype).real.dtype
            kernel, arguments = "scale", (kind.type(scale),)
        self._run(kernel, out, rows, kind, arguments)

    def unpack(self, packed: DeviceBuffer, rows: Iterable[tuple[int, int, int]]) -> None:
        """Copy each array from its place in a packed buffer; `rows` as for packing."""
        self._run("unpack", packed, rows, _WORDS[min(packed.dtype.itemsize, 8)], ())

    def _run(
        self,
        kernel: str,
        stretch: DeviceBuffer,
        rows: Iterable[tuple[int, int, int]],
        kind: np.dtype[Any],
        arguments: tuple[Any, ...],
    ) -> None:
        """Run a kernel over a packed buffer, viewed as elements of dtype `kind`."""
        device, dtype = stretch.device, stretch.dtype
        table = np.array(list(rows), np.uint64)
        # Places in words instead of elements.
        table[:, 1:] *= np.uint64(dtype.itemsize // kind.itemsize)
        text = table.tobytes()
        with device.context:
            # Compared as bytes: in a training loop the addresses stay the same.
            if text != self._known[0]:
                self._known = text, device.cupy.asarray(table.reshape(-1))
            run = _kernel(device.cupy, kernel, dtype)
            # The packed buffer is the element-wise argument; the table is raw.
            run(self._known[1], np.int64(len(table)), *arguments, stretch.view.view(kind))
        device.put()


_WORDS = {n: np.dtype(f"uint{8 * n}") for n in (1, 2, 4, 8)}


# Compiled once per kernel and type by CuPy, which also caches on disk.
@functools.lru_cache(32)
def _kernel(cupy: Any, name: str, half: np.dtype[Any]) -> Any:
    kernel = KERNELS[name]
    operation = kernel.operation.replace("HALF", half.name)
    return cupy.ElementwiseKernel(
        kernel.reads, kernel.writes, operation, f"unisono_{name}_{half.name}", preamble=PREAMBLE
    )
