"""CUDA kernels: 16-bit conversions, and packing arrays into buckets.

The same numbers, bit for bit, as `collectives.kernels.half_loops` makes on the host. The text is
C++, which CuPy compiles for the device at first use. It uses three names of CUDA, which reinterpret
a float's bits as an integer and back, and instructions where the device's compiler runs.

A kernel reads every element once: 4 bytes in and 2 out for a float32, 4 more each way with a
residual, which is as fast as the device's memory.

Many arrays are packed into one by one launch, driven by a table of three numbers for each, in the
order of their places:

    address, first element, elements   | a, 0, 5 | b, 8, 3 | 0, 16, 2 |     0: of zeros
    packed                               a a a a a . . . b b b . . . . . 0 0 . .     .: 0

Each element of the result looks for its row by halving: for 200 arrays 8 reads of what all threads
near it read, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.device import DeviceBuffer, is_half

__all__ = ["KERNELS", "PREAMBLE", "Kernel", "PackKernel", "narrow", "widen"]

# CuPy compiles with -ftz=true, by which float32 has no subnormal numbers: what computes with them,
# or makes one of a float64, is an instruction of its own, which that leaves alone.
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

# The integer forms of `collectives.kernels.float16`, with the reasons for their constants.
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
    """What is done to one element: parameters that are read, those that are written, and how.

    `T` is float32 or float64, where elements are only copied any integer; `HALF` stands for float16
    or bfloat16.
    """

    reads: str
    writes: str
    operation: str


# Where element `i` comes from, or goes to, by the table.
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
        "T y",  # which stays as it is
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
        # Only the parameters have NumPy's names.
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
    by = source.dtype.type(divisor)
    with source.device.context:
        if residual is None:
            _kernel(source.device.cupy, "narrow", dtype)(source.view, by, out.view)
        else:
            _kernel(source.device.cupy, "carry", dtype)(source.view, by, out.view, residual.view)
    source.device.put()
    return out


def widen(source: DeviceBuffer, out: DeviceBuffer) -> None:
    """Fill `out`, float32 or float64, with the numbers of `source`, float16 or bfloat16."""
    with source.device.context:
        _kernel(source.device.cupy, "widen", source.dtype)(source.view, out.view)
    source.device.put()


class PackKernel:
    """Packs arrays into one stretch of memory, step after step, or takes them out of it.

    The table stays on the device as long as the arrays stay where they are. It has a row for each
    array, in the order of their places: its address on the device, or 0 for zeros, the first
    element of its place, and elements, at least one.
    """

    def __init__(self) -> None:
        self._known: tuple[bytes, Any] = (b"", None)

    def __call__(
        self, out: DeviceBuffer, rows: Iterable[tuple[int, int, int]], scale: float = 1
    ) -> None:
        """Write arrays, multiplied by a number, to their places, and zeros between them.

        Args:
            out: the stretch.
            rows: of the table.
            scale: not for integers.
        """
        dtype = out.dtype
        arguments: tuple[Any, ...] = ()
        if scale == 1:
            kind = _WORDS[min(dtype.itemsize, 8)]
            kernel = "pack"
        elif is_half(dtype):
            kind = np.dtype(np.uint16)
            kernel, arguments = "scale16", (np.float32(scale),)
        else:
            kind = np.empty(0, dtype).real.dtype
            kernel, arguments = "scale", (kind.type(scale),)
        self._run(kernel, out, rows, kind, arguments)

    def unpack(self, packed: DeviceBuffer, rows: Iterable[tuple[int, int, int]]) -> None:
        """Write to arrays what is in their places; rows of the table as to pack them."""
        self._run("unpack", packed, rows, _WORDS[min(packed.dtype.itemsize, 8)], ())

    def _run(
        self,
        kernel: str,
        stretch: DeviceBuffer,
        rows: Iterable[tuple[int, int, int]],
        kind: np.dtype[Any],
        arguments: tuple[Any, ...],
    ) -> None:
        """Run a kernel over a stretch, whose elements it takes for numbers of a kind."""
        device, dtype = stretch.device, stretch.dtype
        table = np.array(list(rows), np.uint64)
        table[:, 1:] *= np.uint64(dtype.itemsize // kind.itemsize)
        text = table.tobytes()
        with device.context:
            if text != self._known[0]:
                self._known = text, device.cupy.asarray(table.reshape(-1))
            run = _kernel(device.cupy, kernel, dtype)
            run(self._known[1], np.int64(len(table)), *arguments, stretch.view.view(kind))
        device.put()


_WORDS = {n: np.dtype(f"uint{8 * n}") for n in (1, 2, 4, 8)}


@functools.lru_cache(32)
def _kernel(cupy: Any, name: str, half: np.dtype[Any]) -> Any:
    kernel = KERNELS[name]
    operation = kernel.operation.replace("HALF", half.name)
    return cupy.ElementwiseKernel(
        kernel.reads, kernel.writes, operation, f"unisono_{name}_{half.name}", preamble=PREAMBLE
    )
