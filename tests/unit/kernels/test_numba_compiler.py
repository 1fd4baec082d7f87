"""What is compiled is kept on disk, and no process gets code that was meant for another."""

import contextlib
import importlib
import itertools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from numba.core.errors import TypingError

from collectives.kernels import compile_lock

ROOT = Path(__file__).parents[3]

MODULE = """
    from collectives.kernels import numba_compiler

    def multiplier(factor, includes=(), **options):
        def multiply(x):
            return factor * x
        return numba_compiler.compiled(multiply, includes=includes, nogil=True, **options)

    def divider(**options):
        def divide(x):
            return 1 / x
        return numba_compiler.compiled(divide, **options)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of variants of one function, with a code cache for this test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    name = f"variants_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    yield importlib.import_module(name)
    del sys.modules[name]


def kept(module):
    folder = Path(module.__file__).parent
    assert not list(folder.glob("__pycache__/*.nb?"))
    return sorted((folder / "cache" / "unisono").glob("*.nbc"))


def hits(function):
    return sum(function.stats.cache_hits.values())


def test_each_variant_has_a_file_of_its_own(module):
    for factor in (2, 3):
        for number in (5, 5.0):
            assert module.multiplier(factor)(number) == factor * number
    assert len(kept(module)) == 4
    for factor in (2, 3):
        again = module.multiplier(factor)
        assert again(5) == factor * 5
        assert hits(again) == 1


CLOSURES = """
    import math
    import sys

    import numba
    import numpy as np
    from numba.extending import intrinsic, register_jitable
    from collectives.kernels import numba_compiler
    from collectives.kernels.intrinsics import record
    from collectives.kernels.structures import offsets

    @intrinsic
    def same(typing, x):
        return x(x), lambda context, builder, signature, arguments: arguments[0]

    @intrinsic
    def negative(typing, x):
        return x(x), lambda context, builder, signature, arguments: builder.fneg(arguments[0])

    def quotient(x):
        return 1 / (x - x)

    def calling(called):
        def loop(x):
            return called(x)
        return loop

    def adding(first, second, third):
        def loop(x):
            return first(x) + second(x) + third(x)
        return loop

    def holding(held):
        def loop(x):
            return x + held[0]
        return loop

    def reading(dtype):
        def loop(x):
            numbers = np.arange(2)
            return x + record(numbers.ctypes.data, dtype).second
        return loop

    def finding(fields):
        def loop(x):
            return x + fields.second
        return loop

    def nested(called):
        @register_jitable
        def inner(x):
            return called(x)
        return calling(inner)

    quick = numba.njit(error_model="numpy")(quotient)
    pair, swapped = (
        np.dtype([(name, "i8") for name in names])
        for names in (("first", "second"), ("second", "first"))
    )
    quick(1.0)                        # compiled variants do not change the digest
    functions = [
        calling(same), calling(negative), nested(same), nested(negative), calling(math.sin),
        calling(math.cos), calling(np.sin), calling(quick),
        calling(numba.njit(error_model="numpy", fastmath=True)(quotient)),
        adding(same, negative, same), adding(same, negative, negative),
        holding((1, 2)), holding((2, 2)), holding(np.zeros(2)), holding(np.ones(2)),
        reading(pair), reading(swapped), finding(offsets(pair)), finding(offsets(swapped)),
    ]
    for function in functions[:: int(sys.argv[1])]:
        compiled = numba_compiler.compiled(function)
        print(compiled(3.0), sum(compiled.stats.cache_hits.values()))
"""


def test_closures_have_different_files_that_every_process_finds(tmp_path):
    program = tmp_path / "closures.py"
    program.write_text(textwrap.dedent(CLOSURES))

    def run(step):
        command = [sys.executable, program, str(step)]
        done = subprocess.run(command, env=alone(tmp_path), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    first = run(1)
    assert [hit for _, hit in first] == ["0"] * len(first)
    assert run(-1) == [[result, "1"] for result, _ in reversed(first)]


def test_options_are_part_of_a_variant(module):
    assert module.divider(error_model="numpy")(0.0) == float("inf")
    with pytest.raises(ZeroDivisionError):
        module.divider()(0.0)
    assert len(kept(module)) == 2


KEPT = """
    import sys
    import numpy as np
    from numba import types
    from collectives.kernels import numba_compiler

    def double(x):
        return 2 * x

    def total(n):
        return (np.arange(n, dtype=np.float64) + np.ones(n)).sum()

    numba_compiler.compiled(double, types.float64(types.float64))
    print("the compiler is there:", "numba.np.linalg" in sys.modules)
    allocates = numba_compiler.compiled(total)
    for kind in sys.argv[1:]:
        print(kind, allocates(np.dtype(kind).type(4)), sum(allocates.stats.cache_hits.values()))
"""


def alone(folder):
    """The environment of a process whose code cache is in a folder."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(folder / "cache")}


def test_code_is_loaded_without_the_compiler(tmp_path):
    program = tmp_path / "kept.py"
    program.write_text(textwrap.dedent(KEPT))

    def run(*kinds):
        command = [sys.executable, program, *kinds]
        done = subprocess.run(command, env=alone(tmp_path), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert run("int32") == ["the compiler is there: True", "int32 10.0 0"]
    again = ["the compiler is there: False", "int32 10.0 1", "int8 10.0 1"]
    assert run("int32", "int8") == again  # what is not there is compiled after what is


def test_many_processes_compile_many_variants_at_once(tmp_path):
    # With numba's own files some of these take over another one's code.
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(MODULE)
        + textwrap.dedent(
            """
            import os, sys, time
            first, begin = int(sys.argv[1]), float(sys.argv[2])
            multiplier(0)(1)                                   # numba is loaded
            time.sleep(max(0.0, begin - time.time()))
            for i in range(4):
                factor = 1 + (first + i) % 4
                multiply = multiplier(factor)
                assert multiply(7) == 7 * factor, factor
                print("loaded" if sum(multiply.stats.cache_hits.values()) else "compiled")
            """
        )
    )
    for began, compiled in ((time.time() + 3, 4), (0.0, 0)):  # then all find files
        processes = [
            subprocess.Popen(
                [sys.executable, program, str(first), str(began)],
                env=alone(tmp_path), stdout=subprocess.PIPE, text=True,
            )
            for first in range(4)
        ]  # fmt: skip
        said = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * 4
        assert "".join(said).count("compiled") == compiled, "one of the processes makes a variant"
    assert len(list((tmp_path / "cache" / "unisono").glob("*.nbc"))) == 5


def test_what_cannot_be_compiled_leaves_the_turn_to_others(module, monkeypatch):
    first, firsts = compile_lock.wait_or_lead, []

    @contextlib.contextmanager
    def noted(what):
        with first(what, most_seconds=0) as mine:
            firsts.append(mine)
            yield mine

    monkeypatch.setattr(compile_lock, "wait_or_lead", noted)
    for _ in range(2):
        with pytest.raises(TypingError):
            module.multiplier("text")(0.5)
    assert firsts == [True] * 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_made_anew(module, damage):
    module.multiplier(2)(5)
    (file,) = kept(module)
    content = file.read_bytes()
    changed = content[:99] + bytes([content[99] ^ 1]) + content[100:]
    file.write_bytes({"cut": content[:-9], "changed": changed, "empty": b""}[damage])
    again = module.multiplier(2)
    assert (again(5), hits(again)) == (10, 0)
    whole = module.multiplier(2)
    assert (whole(5), hits(whole)) == (10, 1)


def test_code_is_made_anew_when_a_file_that_it_includes_has_changed(module, tmp_path):
    included = tmp_path / "included.py"
    included.write_text("# one")
    for text, expected in (("# one", [0, 1]), ("# another", [0, 1])):
        included.write_text(text)
        found = []
        for _ in range(2):
            function = module.multiplier(2, [str(included)])
            function(5)
            found.append(hits(function))
        assert found == expected
    assert len(kept(module)) == 2


@pytest.mark.parametrize("part", ["CacheImpl.filename_base", "CacheImpl.locator",
                                  "Cache._index_key", "Cache._load_overload"])  # fmt: skip
def test_code_is_not_kept_where_numba_has_no_such_cache(module, monkeypatch, part):
    monkeypatch.delattr(f"numba.core.caching.{part}")
    assert module.multiplier(2)(21) == 42
    assert kept(module) == []


def test_code_is_not_kept_where_numba_draws_its_numbers_elsewhere(module, monkeypatch):
    monkeypatch.setattr("numba.core.bytecode.FunctionIdentity._unique_ids", itertools.count(1))
    assert module.multiplier(2)(21) == 42
    assert kept(module) == []


WITHOUT = """
    import numba.core.caching
    del numba.core.caching.CompileResultCacheImpl

    import ml_dtypes, numpy as np
    from collectives.kernels import half_loops, numba_compiler

    x, out = np.arange(5.0), np.empty(5, ml_dtypes.bfloat16)
    half_loops.narrow(x, out)
    assert (out == x).all()
    print(numba_compiler.compiled(lambda x: 2 * x)(21))
"""


def test_what_is_compiled_runs_where_numba_lacks_a_class(tmp_path):
    program = tmp_path / "without.py"
    program.write_text(textwrap.dedent(WITHOUT))
    done = subprocess.run(
        [sys.executable, program], env=alone(tmp_path), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert list(tmp_path.rglob("*.nbc")) == []


@pytest.mark.parametrize(
    "settings", [{}, {"NUMBA_CPU_NAME": "generic"}, {"NUMBA_ENABLE_AVX": "0"},
                 {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": "+avx"}]
)  # fmt: skip
def test_the_processor_of_object_files_is_that_of_numba(tmp_path, settings):
    program = (
        "from numba.core.registry import cpu_target\n"
        "from collectives.kernels import intrinsics\n"
        "expected = cpu_target.target_context.codegen().magic_tuple()\n"
        "assert intrinsics.target_processor() == expected\n"
    )
    environment = {**alone(tmp_path), **settings}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_full_disk_costs_nothing_but_the_file(module, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert module.multiplier(2)(5) == 10
    assert kept(module) == []


def written(module):
    """The kept files, each with its inode and time, which differ in a file that replaces it."""
    facts = {file: file.stat() for file in kept(module)}
    return {file: (fact.st_ino, fact.st_mtime_ns) for file, fact in facts.items()}


def test_recompiling_replaces_the_file(module):
    function = module.multiplier(2)
    function(5)
    before = written(module)
    function.recompile()
    after = written(module)
    assert before.keys() == after.keys()
    assert before != after
    assert function(6) == 12
