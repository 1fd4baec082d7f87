"""LLVM intrinsics missing in numba: memory by address, and atomic loads and stores.

The ranks of a node meet in shared memory. Whoever stores a word there (`store`, release) makes
visible what it has stored before to whoever loads that word (`load`, acquire); both are one
instruction on x86-64 and on ARM64.

Importing this module loads numba, so import it inside the function that needs it.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, config, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

__all__ = [
    "call_binary", "call_unary", "canonical_nan", "canonical_nans", "clock_gettime", "copy",
    "fence", "load", "load_half_pair", "mpi_start", "mpi_test", "on_stack", "pause", "pointer",
    "record", "sched_yield", "store", "store_fence_full", "store_half_pair", "stream",
    "target_processor",
]  # fmt: skip

# From so many bytes on the C library copies by the processor's instruction for strings, `rep
# movsb`. An AMD EPYC (Zen 3) moves 2 GB/s by it where the destination lies 1 to 31 bytes behind the
# source, modulo a page, as a large array of NumPy lies 16 behind a slot; a loop over lines moves 13
# to 30 there. Elsewhere both are alike on it (`broadcast` of 1 MiB 44 us by either), and what other
# processors gain by the instruction is theirs.
_LEAST_BY_STRINGS = 1 << 12
_PAGE, _TOO_NEAR = 1 << 12, 32


def target_processor() -> tuple[str, str, str]:
    """Return triple, name and features of the processor that numba compiles for, as LLVM's."""
    features = config.CPU_FEATURES
    if features is None:
        found = llvm.get_host_cpu_features()
        if not config.ENABLE_AVX:
            found.update(dict.fromkeys((name for name in found if name.startswith("avx")), False))
        features = found.flatten()
    return llvm.get_process_triple(), config.CPU_NAME or llvm.get_host_cpu_name(), features


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Return the pointer to an address, for `numba.carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@register_jitable
def record(address: int, dtype: np.dtype[Any]) -> Any:
    """Return the record at an address; its fields are read and written in place."""
    return carray(pointer(address), 1, dtype)[0]


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """Load a word; what its writer stored before it is visible afterwards (acquire)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(word, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a word after everything that was stored before (release)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], word, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_half_pair(typingctx: Any, array: Any, i: Any) -> Any:
    """Return elements 2 i and 2 i + 1 of an array of 16 bits, by its address, as one uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.load(builder.gep(first, [args[1]]), align=2)

    return types.uint32(types.int64, types.int64), codegen


@intrinsic
def store_half_pair(typingctx: Any, array: Any, i: Any, halves: Any) -> Any:
    """Store elements 2 i and 2 i + 1, as `load_half_pair` returns them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        builder.store(args[2], builder.gep(first, [args[1]]), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.uint32), codegen


def _number_or_nan(builder: Any, number: Any, a: Any, b: Any) -> Any:
    nan = ir.Constant(number.type, float("nan"))
    return builder.select(builder.fcmp_unordered("uno", a, b), nan, number)


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
            for i in range(2):
                parts = [builder.extract_value(arg, i) for arg in args]
                made = builder.insert_value(made, _number_or_nan(builder, *parts), i)
        return made

    return result(result, result, result), codegen


@intrinsic
def canonical_nans(typingctx: Any, numbers: Any) -> Any:
    """Return a tuple of numbers of one type with NumPy's NaN in place of every NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (made,) = args
        for i in range(len(numbers)):
            number = builder.extract_value(made, i)
            made = builder.insert_value(made, _number_or_nan(builder, number, number, number), i)
        return made

    return numbers(numbers), codegen


@intrinsic
def _copy_few(typingctx: Any, dest: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes by the C library (memcpy)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, ir.IntType(64)])
        pointers = [builder.inttoptr(arg, byte) for arg in args[:2]]
        builder.call(memcpy, [*pointers, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _lines(is_streamed: bool) -> Any:
    """Return a function that copies 64 bytes, which begin at a multiple of 64 where they go."""

    @intrinsic
    def line(typingctx: Any, dest: Any, source: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = ir.VectorType(ir.IntType(64), 8)
            pointers = [builder.inttoptr(arg, vector.as_pointer()) for arg in args]
            stored = builder.store(builder.load(pointers[1], align=1), pointers[0], align=64)
            if is_streamed:
                mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                stored.set_metadata("nontemporal", mark)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return line


_copy_line, _stream_line = _lines(False), _lines(True)


@register_jitable
def copy(dest: int, source: int, nbytes: int) -> None:
    """Copy bytes between memory that does not overlap."""
    if nbytes < _LEAST_BY_STRINGS or (dest - source) % _PAGE >= _TOO_NEAR:
        _copy_few(dest, source, nbytes)
        return
    head = -dest % 64
    _copy_few(dest, source, head)
    whole = head + (nbytes - head) // 64 * 64
    for at in range(head, whole, 64):
        _copy_line(dest + at, source + at)
    _copy_few(dest + whole, source + whole, nbytes - whole)


@register_jitable
def stream(dest: int, source: int, nbytes: int) -> None:
    """Copy bytes past the caches, as `copy`; others see them after a `fence`."""
    head = min(-dest % 64, nbytes)
    _copy_few(dest, source, head)
    whole = head + (nbytes - head) // 64 * 64
    for at in range(head, whole, 64):
        _stream_line(dest + at, source + at)
    _copy_few(dest + whole, source + whole, nbytes - whole)


def _x86(builder: Any, name: str) -> bool:
    """Write an instruction of x86 without operands, by LLVM's name; False on other processors."""
    if not builder.module.triple.startswith(("x86_64", "i686")):
        return False
    kind = ir.FunctionType(ir.VoidType(), [])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), [])
    return True


@intrinsic
def fence(typingctx: Any) -> Any:
    """Order what was streamed before what is stored after (x86-64; ARM64 needs nothing)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _x86(builder, "sse.sfence")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def store_fence_full(typingctx: Any) -> Any:
    """Wait until all that was stored has reached the caches, before anything later begins.

    On x86-64 that is `mfence`. What compilers take for a fence there, a locked instruction, lets
    the lines of later stores be fetched meanwhile.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _x86(builder, "sse2.mfence"):
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_unary(typingctx: Any, function: Any, dest: Any, source: Any, n: Any, size: Any) -> Any:
    """Call a loop `f(dest, source, n, size)` by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def on_stack(kind: Any, count: int) -> Any:
    """Return a function that returns a pointer to so many elements on the stack.

    Nothing else points there: what is read elsewhere and written here, or the other way round, is
    vectorised without a look at addresses.
    """

    @intrinsic
    def memory(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            element = context.get_value_type(kind)
            return cgutils.alloca_once(builder, element, size=ir.Constant(ir.IntType(64), count))

        return types.CPointer(kind)(), codegen

    return memory


@intrinsic
def call_binary(typingctx: Any, function: Any, dest: Any, a: Any, b: Any, n: Any) -> Any:
    """Call a loop `f(dest, a, b, n)` by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


# How MPI's functions take and give a count, a rank, a tag and an error: as int. A handle is an int
# or a pointer, which registers pass alike; an int has its bits in the lower half.
_INT, _WORD = ir.IntType(32), ir.IntType(64)


def _mpi(builder: Any, function: Any, kinds: Any, args: Any) -> Any:
    """Call a function of MPI by its address; returns its error as a word."""
    kind = ir.FunctionType(_INT, kinds)
    given = [
        arg if kind is _WORD else builder.trunc(arg, _INT)
        for arg, kind in zip(args, kinds, strict=True)
    ]
    error = builder.call(builder.inttoptr(function, kind.as_pointer()), given)
    return builder.sext(error, _WORD)


@intrinsic
def mpi_start(
    typingctx: Any, function: Any, memory: Any, nbytes: Any, byte: Any, peer: Any, tag: Any,
    comm: Any, request: Any,
) -> Any:  # fmt: skip
    """Call `MPI_Isend` or `MPI_Irecv`, whose arguments these are; returns MPI's error."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [_WORD, _INT, _WORD, _INT, _INT, _WORD, _WORD]
        return _mpi(builder, args[0], kinds, args[1:])

    return types.int64(*[types.int64] * 8), codegen


@intrinsic
def mpi_test(typingctx: Any, function: Any, request: Any, flag: Any, status: Any) -> Any:
    """Call `MPI_Test` with three addresses; returns MPI's error."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _mpi(builder, args[0], [_WORD] * 3, args[1:])

    return types.int64(*[types.int64] * 4), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the processor that this is a wait, so that it leaves its resources to others."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _x86(builder, "sse2.pause") and builder.module.triple.startswith("aarch64"):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.void(), codegen


# From the C library, which every Python process has loaded: the first gives the core away.
sched_yield = types.ExternalFunction("sched_yield", types.int32())
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
