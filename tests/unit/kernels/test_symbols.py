"""Code that several processes have kept: one symbol never stands for two codes."""

import re
import sys

import llvmlite.binding as llvm
import pytest
from numba.core.serialize import loads

import launcher
from collectives.kernels import numba_cache, numba_compiler
from pairwise import also

# Uses what the package compiles, one kind after the other in the order of the arguments, and
# compares each result with NumPy's.
PROGRAM = '''
import sys

import ml_dtypes
import numpy as np

from collectives.kernels import half_loops as packing
from collectives.arrays.reduction import SUM


def halves(half):
    """The loops of `packing`; the smallest numbers that differ as float16 and bfloat16."""
    for wide in (np.float32, np.float64):
        x, left, out = np.array([1, 2, 3], wide), np.zeros(3, wide), np.empty(3, half)
        packing.narrow(x, out)
        check(out, x)
        packing.narrow(x, out, divisor=2)
        check(out, x / 2)
        packing.narrow(x, out, residual=left)
        check(out, x)
        back = np.empty(3, wide)
        packing.widen(out, back)
        check(back, x)
    own = np.array([1, 2, 3], half)
    packing.reduce(own[None], own, rank=0, op=SUM, residual=np.zeros(3, np.float32))
    check(own, [2, 4, 6])


def loops(*dtypes):
    """The loops of the rounds on a node, called by address."""
    import ctypes
    from collectives.arrays import reduction
    from collectives.kernels import loops as kernels

    for dtype in map(np.dtype, dtypes):
        for op, expected in {"SUM": 5, "MEAN": 2.5, "MIN": 2, "MAX": 3, "PRODUCT": 6}.items():
            if op in {"c": ("MIN", "MAX"), "i": ("MEAN",)}.get(dtype.kind, ()):
                continue
            found = kernels.loops(dtype, getattr(reduction, op))

            kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)

            def call(address, dest, source):
                if address:
                    kind(address)(dest.ctypes.data, source.ctypes.data, 2, 2)
                else:
                    dest[...] = source

            a, b = np.full(2, 2, dtype), np.full(2, 3, dtype)
            total = np.empty(2, np.float32 if dtype.itemsize == 2 else dtype)
            mine, theirs, result = (np.empty(2, dtype) for _ in range(3))
            # 16-bit floats are kept as such in the slots, and widened as they are combined.
            call(found.fill, mine, a)
            call(found.fill, theirs, b)
            kind(found.start)(total.ctypes.data, mine.ctypes.data, theirs.ctypes.data, 2)
            call(found.save, result, total)
            check(result, [expected] * 2)
            if op == "MIN":  # a third time the first
                call(found.add, total, mine)
                call(found.save, result, total)
                check(result, [expected] * 2)


def rules(dtype):
    """Rules of optimizers, one of them a user's, made by a factory."""
    from strategies.optimizers import host_step, rules

    def scaled(factor):
        def rule(value, gradient, numbers):
            return (value - factor * gradient,)
        return rule

    for rule, expected in ((rules.sgd, 0.5), (scaled(2), -1), (scaled(3), -2)):
        value = np.ones(3, dtype)
        host_step.apply(rule, value, np.ones(3, dtype), [], [0.5])
        check(value, [expected] * 3)
    for rule, numbers, expected in (
        (rules.momentum, [0.5, 2.0], [-0.5, 3]), (rules.nesterov, [0.5, 2.0], [-2.5, 3]),
    ):
        value, slot = np.ones(3, dtype), np.ones(3, dtype)
        host_step.apply(rule, value, np.ones(3, dtype), [slot], numbers)
        check(value, [expected[0]] * 3)
        check(slot, [expected[1]] * 3)
    assert host_step.sum_of_squares(np.full(300, 2, dtype)) == 1200


def records():
    """Calls one compiled function from another."""
    from strategies.input.csv import kernel

    columns, odd = kernel.parse(
        ["1,2.5", "3,4e2"], [np.dtype(np.int64), np.dtype(np.float64)], ",", False, None
    )
    assert odd == []
    check(columns[0], [1, 3])
    check(columns[1], [2.5, 400])


def check(found, expected):
    np.testing.assert_array_equal(np.asarray(found, np.complex128), expected)


KINDS = {
    "float16": lambda: halves(np.float16),
    "bfloat16": lambda: halves(ml_dtypes.bfloat16),
    "loops of 16 bits": lambda: loops(np.float16, ml_dtypes.bfloat16),
    "loops of others": lambda: loops("f", "F"),
    "rules of float32": lambda: rules(np.float32),
    "rules of float64": lambda: rules(np.float64),
    "records": records,
}
for kind in sys.argv[1:]:
    KINDS[kind]()
'''
KINDS = [
    "float16", "bfloat16", "loops of 16 bits", "loops of others", "rules of float32",
    "rules of float64", "records",
]  # fmt: skip


def run(program, cache, *arguments):
    """Run a program; what it compiles is kept under `cache`."""
    environment = {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(launcher.ROOT)}
    command = [sys.executable, str(program), *arguments]
    result = launcher.run(command, timeout=240, cwd=program.parent, **environment)
    assert result.status == 0, (arguments, result.stderr)
    return result.stdout


def kept(cache):
    return {*cache.rglob("*.nbc"), *cache.rglob("*.o")}


def symbols(cache):
    """Yield (file, name, code) of each function that a kept file defines."""
    for path in sorted(cache.rglob("*.nbc")):
        data = loads(path.read_bytes()[32:])
        library = data[0] if isinstance(data[0], tuple) else data.library
        _, _, (_, bitcode) = library
        for function in llvm.parse_bitcode(bitcode).functions:
            # numba's runtime is the same everywhere, but for the names of labels.
            if not function.is_declaration and not function.name.startswith("NRT_"):
                # Without the numbers of attributes and metadata, which count in each module.
                yield path.name, function.name, re.sub(r"[#!]\d+", "", str(function))


def codes_of(cache):
    """The code of each symbol, the same in all kept files."""
    codes = {}
    for file, name, code in symbols(cache):
        assert codes.setdefault(name, code) == code, (file, name)
    return codes


@pytest.mark.timeout(600)
def test_processes_of_any_order_compile_and_then_share_everything(tmp_path):
    program, cache = launcher.written(tmp_path, PROGRAM), tmp_path / "cache"
    for kind in KINDS:  # each in a process of its own, where numba's count would begin at 1
        run(program, cache, kind)
    codes_of(cache)
    files = kept(cache)
    assert len(files) > 40
    run(program, cache, *KINDS[::-1])  # which loads all of it
    assert kept(cache) == files


JOB = """
import sys
import numpy as np
import collectives as cc

cc.init()
x = np.full(5, 3, np.float32)
cc.allreduce(x, algorithm="ring")
for name in sys.argv[1:]:
    compression = getattr(cc, name).with_feedback()
    total = cc.allreduce(x, op=cc.SUM, compression=compression, name=name, algorithm="ring")
    np.testing.assert_array_equal(total, 6)
cc.shutdown()
"""


# What compiles here, the test above compiles without MPI.
@pytest.mark.long
@pytest.mark.timeout(300)
def test_jobs_of_one_compression_each_and_then_of_both(tmp_path):
    program, cache = launcher.written(tmp_path, JOB), tmp_path / "cache"
    for names in (["FP16"], ["BF16"], ["FP16", "BF16"], ["BF16", "FP16"]):
        result = launcher.mpirun(2, program, *names, timeout=60, NUMBA_CACHE_DIR=str(cache))
        assert result.status == 0, (names, result.stderr)


RULE = """
import sys

from numba.extending import register_jitable

FACTOR = {factor}


@register_jitable
def scaled(number):
    return {scaled}


def rule(value, gradient, numbers):
    return (value - scaled(gradient) * FACTOR,)


if __name__ == "__main__":
    import numpy as np
    import rule
    from strategies.optimizers import host_step

    value = np.ones(3, np.float32)
    host_step.apply(rule.rule, value, np.ones(3, np.float32), [], [0.5])
    print(value[0])
"""


def test_a_rule_of_another_module_of_the_same_name_is_compiled_anew(tmp_path):
    variants = [(2, "number"), (3, "number"), (2, "2 * number"), (2, "4 * number")]
    for (factor, scaled), expected in zip(variants, (-1, -2, -3, -7), strict=True):
        program = tmp_path / f"{factor} {scaled[0]}" / "rule.py"
        program.parent.mkdir()
        program.write_text(RULE.format(factor=factor, scaled=scaled))
        assert run(program, tmp_path / "cache") == f"{expected}.0\n"


PARENT = """
import os, sys
import numba

def multiplier(factor):
    @numba.extending.register_jitable
    def inner(x):
        total = 0.0
        for i in range(x.size):  # long enough that it is not inlined
            total += x[i] / factor + x[i] ** factor
            if total > 1e9 * factor:
                total = x[i - 1] ** 0.5
        return total
    def outer(x):
        return inner(x) + inner(x[1:])
    return inner, outer

inner, outer = multiplier(int(sys.argv[2]))
x = __import__("numpy").arange(9.0)
if sys.argv[1] == "before":  # the program compiles it before the package is there
    numba.njit(lambda x: inner(x))(x)
from collectives.kernels import numba_compiler
if sys.argv[1] == "fork":
    numba_compiler.compiled(lambda: 1)()
    parent = os.fork()
    if parent:
        os.waitpid(parent, 0)
    inner, outer = multiplier(5 if parent else int(sys.argv[2]))
assert numba_compiler.compiled(outer)(x) == outer(x)
"""


@pytest.mark.parametrize("case", [also("plain"), "fork", "before"])
def test_inner_functions_of_many_processes_have_symbols_of_their_own(tmp_path, case):
    program, cache = launcher.written(tmp_path, PARENT), tmp_path / "cache"
    for factor in ("2", "3"):
        run(program, cache, case, factor)
    codes = codes_of(cache)
    assert any("outer" in name for name in codes) == (case != "before")
    run(program, cache, "plain", "2")


def test_files_of_earlier_editions_are_not_loaded(tmp_path, monkeypatch):
    def double(x):
        return 2 * x

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for edition in (1, 2):
        monkeypatch.setattr(numba_cache, "_EDITION", edition)
        for hits in (0, 1):
            function = numba_compiler.compiled(double)
            assert function(3) == 6
            assert sum(function.stats.cache_hits.values()) == hits
