"""LLVM intrinsics missing in numba: memory by address, and atomic loads and stores.

The ranks of a node synchronize through shared memory. `store` is a release and `load` an acquire: a
rank that loads a stored word also sees everything that its writer stored before. Both are one
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
    "call_binary", "call_unary", "call_words", "canonical_nan", "canonical_nans",
    "clock_gettime", "copy", "fence", "load", "load_half_pair", "mpi_start", "mpi_test",
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
    """Load a word with acquire order: everything its writer stored before is visible."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Aligned, because fields of structured dtypes are.
        word = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(word, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a word with release order, after everything that was stored before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], word, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_half_pair(typingctx: Any, array: Any, i: Any) -> Any:
    """Return elements 2 i and 2 i + 1 of a 16-bit array, given its address, as one uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        # Only 2-byte alignment: arrays of 16-bit floats begin anywhere.
        return builder.load(builder.gep(first, [args[1]]), align=2)

    return types.uint32(types.int64, types.int64), codegen


@intrinsic
def store_half_pair(typingctx: Any, array: Any, i: Any, halves: Any) -> Any:
    """Store elements 2 i and 2 i + 1 from one uint32, as `load_half_pair` returns them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        builder.store(args[2], builder.gep(first, [args[1]]), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.uint32), codegen


def _number_or_nan(builder: Any, number: Any, a: Any, b: Any) -> Any:
    nan = ir.Constant(number.type, float("nan"))
    # "uno": unordered, which means that one of both is a NaN.
    return builder.select(builder.fcmp_unordered("uno", a, b), nan, number)


@intrinsic
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return `a * b + c` for float32; one instruction if the processor has it.

    Whether the product is rounded depends on the processor, so it must be exact.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FloatType()
        signed = ir.FunctionType(kind, [kind] * 3)
        fused = builder.module.declare_intrinsic("llvm.fmuladd", [kind], signed)
        return builder.call(fused, args)

    return types.float32(types.float32, types.float32, types.float32), codegen


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


@intrinsic
def _copy_few(typingctx: Any, dest: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes by memcpy of the C library."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        # The intrinsic, which LLVM may inline.
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, ir.IntType(64)])
        pointers = [builder.inttoptr(arg, byte) for arg in args[:2]]
        builder.call(memcpy, [*pointers, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _lines(is_streamed: bool) -> Any:
    """Return a function that copies 64 bytes to an address that is a multiple of 64."""

    @intrinsic
    def line(typingctx: Any, dest: Any, source: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            # 64 bytes: one AVX-512 store, or several narrower ones.
            vector = ir.VectorType(ir.IntType(64), 8)
            pointers = [builder.inttoptr(arg, vector.as_pointer()) for arg in args]
            # The destination is aligned, as streaming stores require; the source may not be.
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


@intrinsic
def fence(typingctx: Any) -> Any:
    """Order streaming stores before later stores (x86-64; ARM64 needs no instruction)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Other stores of x86-64 are ordered without a fence.
        _x86(builder, "sse.sfence")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def store_fence_full(typingctx: Any) -> Any:
    """Wait until all earlier stores have reached the caches, before any later access begins.

    On x86-64 this is `mfence`. The locked instruction that compilers use as a fence lets the lines
    of later stores be fetched meanwhile.
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
        # The signature of all loops, known to caller and callee.
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


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


@intrinsic
def call_words(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call a C function of up to four words or ints by its address; return the resulting word."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 4)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(*[types.int64] * 5), codegen


# MPI's functions take counts, ranks and tags as int, and return an error as int. A handle is an int
# or a pointer. Registers pass both the same way; an int uses the lower half.
_INT, _WORD = ir.IntType(32), ir.IntType(64)


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


@intrinsic
def mpi_start(
    typingctx: Any, function: Any, memory: Any, nbytes: Any, byte: Any, peer: Any, tag: Any,
    comm: Any, request: Any,
) -> Any:  # fmt: skip
    """Call `MPI_Isend` or `MPI_Irecv` with these arguments; return MPI's error code."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [_WORD, _INT, _WORD, _INT, _INT, _WORD, _WORD]
        return _mpi(builder, args[0], kinds, args[1:])

    return types.int64(*[types.int64] * 8), codegen


@intrinsic
def mpi_test(typingctx: Any, function: Any, request: Any, flag: Any, status: Any) -> Any:
    """Call `MPI_Test` with three addresses; return MPI's error code."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _mpi(builder, args[0], [_WORD] * 3, args[1:])

    return types.int64(*[types.int64] * 4), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Hint to the processor that this is a spin loop, so that it yields resources."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # The hint 1 is YIELD.
        if not _x86(builder, "sse2.pause") and builder.module.triple.startswith("aarch64"):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.void(), codegen


# From the C library, which every Python process has loaded. `sched_yield` yields the core.
sched_yield = types.ExternalFunction("sched_yield", types.int32())
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
