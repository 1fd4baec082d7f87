"""Compiled code that comes with the package: the same bits, without numba, and never foreign."""

import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from collectives.kernels import prebuilt
from collectives.tools import prebuild

ROOT = Path(__file__).parents[3]

# Some of each module, to keep the test short.
NAMES = [
    ("collectives.kernels.elementwise", "start", "float32", "add"),
    ("collectives.kernels.elementwise", "add_half", "bfloat16", "add"),
    ("collectives.kernels.half_loops_kernel", "narrow", "float16", "float64"),
    ("collectives.kernels.int8_loops", "narrow", "float32"),
    ("strategies.optimizers.rule_loops", "rule", "adam", "float32"),
    ("strategies.optimizers.rule_loops", "squares", "float64"),
    ("strategies.input.csv.loop", "records"),
]

MADE = """
    from numba import types
    from collectives.kernels import numba_compiler
    from numbers_of_made import FACTOR

    def times(x):
        return FACTOR * x

    def make(symbol, name):
        print("compiled", name, flush=True)
        return numba_compiler.python_code(times, symbol)
"""

WRITES = """
    import ast, sys
    from pathlib import Path
    from collectives.tools import prebuild

    prebuild.write(Path(sys.argv[1]), ast.literal_eval(sys.argv[2]))
"""

# `times(7)`, or why not.
TIMES = """
    import sys
    from pathlib import Path
    from collectives.kernels import machine_code, prebuilt

    prebuilt.FOLDER = Path("objects").resolve()
    try:
        print(machine_code.function("made", "times")(7), *machine_code.origins())
    except ImportError as error:
        print(error)
"""

# Results of the loops in hexadecimal digits.
BITS = """
    import hashlib, sys
    from pathlib import Path
    import ml_dtypes, numpy as np
    from collectives.arrays.host_arrays import address
    from collectives.kernels import half_loops, int8, machine_code, prebuilt
    from strategies.input.csv import kernel
    from strategies.optimizers import host_step, rules

    prebuilt.FOLDER = Path("objects").resolve()
    digest = hashlib.sha256()
    for n in (0, 1, 7, 64, 1001, 5000):
        x, y, z = np.random.default_rng(n).normal(size=(3, n)).astype(np.float32) * 1e3
        x[::97], x[5::101] = np.nan, np.inf
        total = np.empty_like(x)
        start = machine_code.procedure(
            "collectives.kernels.elementwise", "start", "float32", "add", arguments=4
        )
        start(address(total), address(x), address(y), n)
        half = y.astype(ml_dtypes.bfloat16)
        add = machine_code.procedure(
            "collectives.kernels.elementwise", "add_half", "bfloat16", "add", arguments=4
        )
        add(address(z), address(half), n, 2)
        packed = np.empty(n, np.float16)
        half_loops.narrow(x.astype(np.float64), packed, divisor=3)
        blocks = np.empty(-(-n // int8.NUMBERS), int8.BLOCK)
        int8.narrow(x, blocks)
        slots = [abs(y), abs(z)]
        host_step.apply(rules.adam, x, y, slots, [0.1, 0.9, 0.1, 0.99, 0.01, 0.3, 1e-8, 0.01])
        squares = host_step.sum_of_squares(z.astype(np.float64) / 3)
        for array in (total, z, packed, blocks, x, *slots, np.array(squares)):
            digest.update(array.tobytes())
    lines = ["1,2.5e3,", "-7,1e-7,", "x,1,"]
    dtypes = [np.dtype(name) for name in ("int32", "float64")]
    columns, odd = kernel.parse(lines, dtypes, ",", True, None)
    print(digest.hexdigest(), columns, odd, "numba" in sys.modules, machine_code.origins())
"""


@pytest.fixture(scope="module")
def lean(tmp_path_factory):
    """A folder with all installed packages but numba."""
    folder = tmp_path_factory.mktemp("lean")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith("numba") and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A module of one function, and an archive with it for this processor."""
    folder = tmp_path_factory.mktemp("original")
    write_programs(folder)
    write_archive(folder, here()[0], [("made", "times")])
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """A copy of `original`."""
    return shutil.copytree(original, tmp_path / "copy")


def write_programs(folder):
    (folder / "made.py").write_text(textwrap.dedent(MADE))
    (folder / "numbers_of_made.py").write_text("FACTOR = 2")
    (folder / "objects").mkdir()
    for name, text in {"writes.py": WRITES, "times.py": TIMES, "bits.py": BITS}.items():
        (folder / name).write_text(textwrap.dedent(text))


def write_archive(folder, level, names):
    target = prebuild.target(level)
    run(folder, "writes.py", f"objects/{level}.zip", repr(names), **target)


def start(folder, *words, lean=None, **environment):
    """Start a program whose home is the folder; `lean` replaces all installed packages."""
    path = os.pathsep.join(map(str, [ROOT, *([lean] if lean else [])]))
    others = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    return subprocess.Popen(
        [sys.executable, *(["-S"] if lean else []), *words], cwd=folder, text=True,
        env={**others, "PYTHONPATH": path, "HOME": str(folder / "home"), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(folder, *words, **options):
    process = start(folder, *words, **options)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return output


def here():
    return prebuilt.levels_of(llvm.get_host_cpu_features())


def test_prebuilt_loops_have_the_bits_of_loops_compiled_here(tmp_path, lean):
    write_programs(tmp_path)
    expected, _, kept = run(tmp_path, "bits.py").partition(" True ")
    assert kept == f"{{'compiler': {len(NAMES)}}}\n"
    for level in here():
        write_archive(tmp_path, level, NAMES)
        found = run(tmp_path, "bits.py", lean=lean)
        assert found == f"{expected} False {{'package ({level})': {len(NAMES)}}}\n"
        (tmp_path / "objects" / f"{level}.zip").unlink()


def test_processes_that_start_at_once_neither_compile_nor_write(folder, lean):
    before = sorted(folder.rglob("*"))
    processes = [
        start(folder, "times.py", lean=lean, PYTHONDONTWRITEBYTECODE="1") for _ in range(4)
    ]
    said = [process.communicate(timeout=100)[0] for process in processes]
    assert said == [f"14 package ({here()[0]})\n"] * 4
    assert sorted(folder.rglob("*")) == before


def test_code_of_changed_sources_is_not_run(folder, lean):
    (folder / "numbers_of_made.py").write_text("FACTOR = 3")
    assert run(folder, "times.py") == "compiled times\n21 compiler\n"
    assert run(folder, "times.py") == "21 cache\n"
    said = run(folder, "times.py", lean=lean)
    assert "pip install numba" in said


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_archive_is_reported_and_its_function_compiled(folder, lean, damage):
    (archive,) = folder.glob("objects/*.zip")
    content = archive.read_bytes()
    changed = content[:299] + bytes([content[299] ^ 1]) + content[300:]
    archive.write_bytes({"cut": content[:-9], "changed": changed, "empty": b""}[damage])
    process = start(folder, "times.py")
    output, errors = process.communicate(timeout=100)
    assert output == "compiled times\n14 compiler\n"
    assert f"prebuilt code: {archive.name} is" in errors
    assert "pip install numba" in run(folder, "times.py", lean=lean)


def test_settings_of_numba_compile_what_they_ask_for(folder):
    assert run(folder, "times.py", NUMBA_OPT="1") == "compiled times\n14 compiler\n"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="code is translated from x86-64")
def test_loops_are_translated_for_arm64(tmp_path):
    write_programs(tmp_path)
    kernel = ("collectives.node.reduce_kernels", "one_shot")
    write_archive(tmp_path, "armv8-a", [*NAMES, kernel])
    with zipfile.ZipFile(tmp_path / "objects" / "armv8-a.zip") as archive:
        codes = [archive.read(name) for name in archive.namelist()]
    assert len(codes) == len(NAMES) + 1
    # The ELF header's machine is AArch64.
    assert {struct.unpack_from("<4s14xH", code) for code in codes} == {(b"\x7fELF", 183)}


USERS = """
    import numpy as np

    def rule(value, gradient, numbers):
        return (value - gradient,)

    try:
        from collectives.kernels import numba_compiler
    except ImportError as error:
        print(error)
    try:
        from strategies.optimizers import host_step

        host_step.apply(rule, np.ones(3), np.ones(3), [], [0.5])
    except ImportError as error:
        print(error)
"""


def test_functions_of_users_say_how_to_install_numba(tmp_path, lean):
    (tmp_path / "users.py").write_text(textwrap.dedent(USERS))
    lines = run(tmp_path, "users.py", lean=lean).splitlines()
    assert len(lines) == 2
    assert all("pip install numba" in line for line in lines)


@pytest.mark.parametrize(
    ("lacks", "expected"),
    [
        ((), ["x86-64-v4", "x86-64-v3", "x86-64-v2"]),
        (("avx512vl",), ["x86-64-v3", "x86-64-v2"]),
        (("f16c",), ["x86-64-v2"]),  # also without AVX-512, as a virtual machine may be
        (("ssse3",), []),
    ],
)
def test_a_processor_has_the_levels_whose_features_it_has(lacks, expected):
    known = {name for names in prebuilt.LEVELS["x86_64"].values() for name in names}
    features = {name: name not in lacks for name in known}
    assert prebuilt.levels_of(features, "x86_64") == expected
    assert prebuilt.levels_of(features, "riscv64") == []


def test_an_archive_of_a_higher_level_is_not_opened(folder, lean):
    (archive,) = folder.glob("objects/*.zip")
    other = {"x86_64": "armv8-a", "aarch64": "x86-64-v2"}[os.uname().machine]
    archive.rename(archive.with_name(f"{other}.zip"))
    assert "pip install numba" in run(folder, "times.py", lean=lean)
