"""LLVM intrinsics missing in numba: memory by address, and atomic loads and stores.

The ranks of a node synchronize through shared memory. `store` is a release and `load` an acquire: a
rank that loads a stored word also sees everything that its writer stored before. Both are one
instruction on x86-64 and on ARM64.

Importing this module loads numba, so import it inside the function that needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, config, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

__all__ = [
    "call_binary", "call_unary", "call_words", "canonical_nan", "canonical_nans",
    "clock_gettime", "copy", "emits", "fence", "load", "load_half_pair", "mpi_start", "mpi_test",
    "multiply_add", "on_stack", "pause", "pointer",
    "record", "sched_yield", "store", "store_fence_full", "store_half_pair", "stream",
    "target_processor",
]  # fmt: skip

# From this size the C library copies by `rep movsb`. An AMD EPYC (Zen 3) then moves only 2 GB/s if
# the destination is 1 to 31 bytes behind the source, modulo a page, as a large NumPy array is 16
# bytes behind a slot; a loop over lines moves 13 to 30 GB/s there. At other offsets both take the
# same time (`broadcast` of 1 MiB 44 us), and `rep movsb` is kept for processors on which it is
# faster.
_LEAST_BY_STRINGS = 1 << 12
_PAGE, _TOO_NEAR = 1 << 12, 32

_INT, _WORD = ir.IntType(32), ir.IntType(64)


def emits(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes an intrinsic from a function that emits its code.

    The function gets the builder and the values of the arguments. It returns the value of the
    result, or None if the result is void.

    Args:
        result: numba type of the result.
        arguments: numba types of the arguments.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        # numba reads the names of the arguments from the wrapped function, without the first one.
        @functools.wraps(emit)
        def typed(typingctx: Any, *given: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                made = emit(builder, *values)
                return context.get_dummy_value() if made is None else made

            return result(*arguments), codegen

        return intrinsic(typed)

    return decorate


def target_processor() -> tuple[str, str, str]:
    """Return LLVM triple, name and features of the processor that numba compiles for."""
    # As numba chooses: set by a user, or those of this machine.
    features = config.CPU_FEATURES
    if features is None:
        found = llvm.get_host_cpu_features()
        # numba disables AVX by this setting, and so must the code here.
        if not config.ENABLE_AVX:
            found.update(dict.fromkeys((name for name in found if name.startswith("avx")), False))
        features = found.flatten()
    return llvm.get_process_triple(), config.CPU_NAME or llvm.get_host_cpu_name(), features


@emits(types.voidptr, types.int64)
def pointer(builder: Any, address: Any) -> Any:
    """Return the pointer to an address, for `numba.carray`."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@register_jitable
def record(address: int, dtype: np.dtype[Any]) -> Any:
    """Return the record at an address; its fields are read and written in place."""
    return carray(pointer(address), 1, dtype)[0]


@emits(types.int64, types.int64)
def load(builder: Any, address: Any) -> Any:
    """Load a word with acquire order: everything its writer stored before is visible."""
    # Aligned, because fields of structured dtypes are.
    word = builder.inttoptr(address, _WORD.as_pointer())
    return builder.load_atomic(word, "acquire", 8)


@emits(types.void, types.int64, types.int64)
def store(builder: Any, address: Any, value: Any) -> None:
    """Store a word with release order, after everything that was stored before."""
    word = builder.inttoptr(address, _WORD.as_pointer())
    builder.store_atomic(value, word, "release", 8)


@emits(types.uint32, types.int64, types.int64)
def load_half_pair(builder: Any, array: Any, i: Any) -> Any:
    """Return elements 2 i and 2 i + 1 of a 16-bit array, given its address, as one uint32."""
    first = builder.inttoptr(array, _INT.as_pointer())
    # Only 2-byte alignment: arrays of 16-bit floats begin anywhere.
    return builder.load(builder.gep(first, [i]), align=2)


@emits(types.void, types.int64, types.int64, types.uint32)
def store_half_pair(builder: Any, array: Any, i: Any, halves: Any) -> None:
    """Store elements 2 i and 2 i + 1 from one uint32, as `load_half_pair` returns them."""
    first = builder.inttoptr(array, _INT.as_pointer())
    builder.store(halves, builder.gep(first, [i]), align=2)


def _number_or_nan(builder: Any, number: Any, a: Any, b: Any) -> Any:
    nan = ir.Constant(number.type, float("nan"))
    # "uno": unordered, which means that one of both is a NaN.
    return builder.select(builder.fcmp_unordered("uno", a, b), nan, number)


@emits(types.float32, types.float32, types.float32, types.float32)
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return `a * b + c` for float32; one instruction if the processor has it.

    Whether the product is rounded depends on the processor, so it must be exact.
    """
    kind = ir.FloatType()
    signed = ir.FunctionType(kind, [kind] * 3)
    fused = builder.module.declare_intrinsic("llvm.fmuladd", [kind], signed)
    return builder.call(fused, [a, b, c])


@intrinsic
def canonical_nan(typingctx: Any, result: Any, a: Any, b: Any) -> Any:
    """Return `result`, or NumPy's NaN if `a` or `b` is a NaN; complex numbers part by part.

    The three arguments have one type. Integers are returned unchanged.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = args[0]
        if isinstance(result, types.Float):
            return _number_or_nan(builder, *args)
        if isinstance(result, types.Complex):
            # Part by part, as NumPy's NaN is.
            for i in range(2):
                parts = [builder.extract_value(arg, i) for arg in args]
                made = builder.insert_value(made, _number_or_nan(builder, *parts), i)
        return made

    return result(result, result, result), codegen


@intrinsic
def canonical_nans(typingctx: Any, numbers: Any) -> Any:
    """Replace every NaN in a tuple of numbers of one type by NumPy's NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (made,) = args
        for i in range(len(numbers)):
            number = builder.extract_value(made, i)
            made = builder.insert_value(made, _number_or_nan(builder, number, number, number), i)
        return made

    return numbers(numbers), codegen


@emits(types.void, *[types.int64] * 3)
def _copy_few(builder: Any, dest: Any, source: Any, nbytes: Any) -> None:
    """Copy bytes by memcpy of the C library."""
    byte = ir.IntType(8).as_pointer()
    # The intrinsic, which LLVM may inline.
    memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, _WORD])
    pointers = [builder.inttoptr(at, byte) for at in (dest, source)]
    builder.call(memcpy, [*pointers, nbytes, ir.Constant(ir.IntType(1), 0)])


def _lines(is_streamed: bool) -> Any:
    """Return a function that copies 64 bytes to an address that is a multiple of 64."""

    @emits(types.void, types.int64, types.int64)
    def line(builder: Any, dest: Any, source: Any) -> None:
        # 64 bytes: one AVX-512 store, or several narrower ones.
        vector = ir.VectorType(_WORD, 8)
        pointers = [builder.inttoptr(at, vector.as_pointer()) for at in (dest, source)]
        # The destination is aligned, as streaming stores require; the source may not be.
        stored = builder.store(builder.load(pointers[1], align=1), pointers[0], align=64)
        if is_streamed:
            mark = builder.module.add_metadata([ir.Constant(_INT, 1)])
            stored.set_metadata("nontemporal", mark)

    return line


_copy_line, _stream_line = _lines(False), _lines(True)


@register_jitable
def copy(dest: int, source: int, nbytes: int) -> None:
    """Copy bytes; the memory must not overlap."""
    # Long copies with the destination closely behind the source, modulo a page, are slow.
    if nbytes < _LEAST_BY_STRINGS or (dest - source) % _PAGE >= _TOO_NEAR:
        _copy_few(dest, source, nbytes)
        return
    # Up to the first cache line of the destination.
    head = -dest % 64
    _copy_few(dest, source, head)
    whole = head + (nbytes - head) // 64 * 64
    for at in range(head, whole, 64):
        _copy_line(dest + at, source + at)
    _copy_few(dest + whole, source + whole, nbytes - whole)


@register_jitable
def stream(dest: int, source: int, nbytes: int) -> None:
    """Copy bytes past the caches, as `copy`; they become visible in order after a `fence`."""
    # A short copy may end before the first line.
    head = min(-dest % 64, nbytes)
    _copy_few(dest, source, head)
    whole = head + (nbytes - head) // 64 * 64
    for at in range(head, whole, 64):
        _stream_line(dest + at, source + at)
    _copy_few(dest + whole, source + whole, nbytes - whole)


def _x86(builder: Any, name: str) -> bool:
    """Emit an x86 instruction without operands; return False on other processors."""
    if not builder.module.triple.startswith(("x86_64", "i686")):
        return False
    # Declared once per module, although the code may emit it often.
    kind = ir.FunctionType(ir.VoidType(), [])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), [])
    return True


@emits(types.void)
def fence(builder: Any) -> None:
    """Order streaming stores before later stores (x86-64; ARM64 needs no instruction)."""
    # Other stores of x86-64 are ordered without a fence.
    _x86(builder, "sse.sfence")


@emits(types.void)
def store_fence_full(builder: Any) -> None:
    """Wait until all earlier stores have reached the caches, before any later access begins.

    On x86-64 this is `mfence`. The locked instruction that compilers use as a fence lets the lines
    of later stores be fetched meanwhile.
    """
    if not _x86(builder, "sse2.mfence"):
        builder.fence("seq_cst")


@emits(types.void, *[types.int64] * 5)
def call_unary(builder: Any, function: Any, dest: Any, source: Any, n: Any, size: Any) -> None:
    """Call a loop `f(dest, source, n, size)` by its address."""
    # The signature of all loops, known to caller and callee.
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [dest, source, n, size])


def on_stack(kind: Any, count: int) -> Any:
    """Return a function that returns a pointer to `count` elements on the stack.

    Nothing else points there, so loops between this memory and other arrays are vectorised without
    overlap checks.
    """

    @intrinsic
    def memory(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            element = context.get_value_type(kind)
            # Allocated once per call, also in a loop.
            return cgutils.alloca_once(builder, element, size=ir.Constant(_WORD, count))

        return types.CPointer(kind)(), codegen

    return memory


@emits(types.void, *[types.int64] * 5)
def call_binary(builder: Any, function: Any, dest: Any, a: Any, b: Any, n: Any) -> None:
    """Call a loop `f(dest, a, b, n)` by its address."""
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [dest, a, b, n])


@emits(types.int64, *[types.int64] * 5)
def call_words(builder: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call a C function of up to four words or ints by its address; return the resulting word."""
    kind = ir.FunctionType(_WORD, [_WORD] * 4)
    return builder.call(builder.inttoptr(function, kind.as_pointer()), [a, b, c, d])


# MPI's functions take counts, ranks and tags as int, and return an error as int. A handle is an int
# or a pointer. Registers pass both the same way; an int uses the lower half.


def _mpi(builder: Any, function: Any, kinds: Any, args: Any) -> Any:
    """Call an MPI function by its address; return its error code as a word."""
    kind = ir.FunctionType(_INT, kinds)
    given = [
        # An int is passed in the lower half of a register.
        arg if kind is _WORD else builder.trunc(arg, _INT)
        for arg, kind in zip(args, kinds, strict=True)
    ]
    error = builder.call(builder.inttoptr(function, kind.as_pointer()), given)
    # Sign-extended, because error codes are ints.
    return builder.sext(error, _WORD)


@emits(types.int64, *[types.int64] * 8)
def mpi_start(
    builder: Any, function: Any, memory: Any, nbytes: Any, byte: Any, peer: Any, tag: Any,
    comm: Any, request: Any,
) -> Any:  # fmt: skip
    """Call `MPI_Isend` or `MPI_Irecv` with these arguments; return MPI's error code."""
    kinds = [_WORD, _INT, _WORD, _INT, _INT, _WORD, _WORD]
    return _mpi(builder, function, kinds, [memory, nbytes, byte, peer, tag, comm, request])


@emits(types.int64, *[types.int64] * 4)
def mpi_test(builder: Any, function: Any, request: Any, flag: Any, status: Any) -> Any:
    """Call `MPI_Test` with three addresses; return MPI's error code."""
    return _mpi(builder, function, [_WORD] * 3, [request, flag, status])


@emits(types.void)
def pause(builder: Any) -> None:
    """Hint to the processor that this is a spin loop, so that it yields resources."""
    # The hint 1 is YIELD.
    if not _x86(builder, "sse2.pause") and builder.module.triple.startswith("aarch64"):
        kind = ir.FunctionType(ir.VoidType(), [_INT])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
        builder.call(hint, [ir.Constant(_INT, 1)])


# From the C library, which every Python process has loaded. `sched_yield` yields the core.
sched_yield = types.ExternalFunction("sched_yield", types.int32())
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
