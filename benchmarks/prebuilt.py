"""Loops compiled for a level of processors, compared with loops compiled for one processor.

    python benchmarks/prebuilt.py [--json FILE] [--rounds 300]

Each loop works on 16,384 elements, as a tile that stays in the caches. The codes take turns, so
that other work of the machine affects all of them. Times are the lowest of all rounds, in
microseconds. A ratio is the time of the level's code divided by that of the processor's code.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from collectives.arrays.host_arrays import address
from collectives.kernels import machine_code, prebuilt
from collectives.tools import prebuild

N = 16384
REPEATED = 20  # calls per measurement
HOST = llvm.get_host_cpu_name()
# Level, and the processor whose code it is compared with; LLVM's names. Code of the older
# processors runs here as well, but they may prefer other instructions.
PAIRS = [("x86-64-v4", HOST), ("x86-64-v3", "znver3"), ("x86-64-v3", "haswell")]

# Text -> (name of the loop, arguments: arrays as (elements, dtype), or numbers).
ELEMENTWISE, HALF = "collectives.kernels.elementwise", "collectives.kernels.half_loops_kernel"
INT8, RULES = "collectives.kernels.int8_loops", "strategies.optimizers.rule_loops"
F32, F64, I32, U16 = ((N, dtype) for dtype in ("f4", "f8", "i4", "u2"))
LOOPS: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "sum of two, float32": ((ELEMENTWISE, "start", "float32", "add"), (F32, F32, F32, N)),
    "sum, float32": ((ELEMENTWISE, "add", "float32", "add"), (F32, F32, N, 2)),
    "sum, float64": ((ELEMENTWISE, "add", "float64", "add"), (F64, F64, N, 2)),
    "sum, int32": ((ELEMENTWISE, "add", "int32", "add"), (I32, I32, N, 2)),
    "maximum, float32": ((ELEMENTWISE, "add", "float32", "maximum"), (F32, F32, N, 2)),
    "mean, float32": ((ELEMENTWISE, "divide", "float32"), (F32, F32, N, 2)),
    "sum, float16": ((ELEMENTWISE, "add_half", "float16", "add"), (F32, U16, N, 2)),
    "sum, bfloat16": ((ELEMENTWISE, "add_half", "bfloat16", "add"), (F32, U16, N, 2)),
    "round to float16": ((HALF, "narrow", "float16", "float32"), (F32, U16, N, 1)),
    "round to bfloat16": ((HALF, "narrow", "bfloat16", "float32"), (F32, U16, N, 1)),
    "widen float16": ((HALF, "widen", "float16", "float32"), (U16, F32, N)),
    "pack to 8 bits": ((INT8, "narrow", "float32"), (F32, (N * 2, "u1"), N, 1, 0)),
    "SGD with momentum, float32": (
        (RULES, "rule", "momentum", "float32"), (F32, F32, F32, 0, 0, (8, "f4"), N),
    ),
    "Adam, float32": ((RULES, "rule", "adam", "float32"), (F32, F32, F32, F32, 0, (8, "f4"), N)),
    "sum of squares, float32": ((RULES, "squares", "float32"), (F32, N, (256, "f8"))),
}  # fmt: skip

COMPILES = (
    "import sys; from pathlib import Path; from benchmarks_prebuilt import LOOPS;"
    "from collectives.tools import prebuild;"
    "prebuild.write(Path(sys.argv[1]), [name for name, _ in LOOPS.values()])"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--rounds", type=int, default=300, help="times that a loop is measured")
    options = parser.parse_args()
    if "x86-64-v4" not in prebuilt.levels_of(llvm.get_host_cpu_features()):
        raise SystemExit("prebuilt: expected a processor of the level x86-64-v4")
    with tempfile.TemporaryDirectory() as folder:
        codes = {name: compiled(name, Path(folder)) for name in sorted({*sum(PAIRS, ())})}
    headings = [f"{level} / {processor}" for level, processor in PAIRS]
    print(f"{'':30}{'us':>8}" + "".join(f"{heading:>28}" for heading in headings), flush=True)
    figures = {}
    for text, (name, given) in LOOPS.items():
        calls = {level: loop(code[name], name, given) for level, code in codes.items()}
        times = dict.fromkeys(calls, float("inf"))
        for _ in range(options.rounds):
            for level, call in calls.items():
                times[level] = min(times[level], timed(call))
        figures[text] = times
        ratios = "".join(f"{times[level] / times[processor]:28.2f}" for level, processor in PAIRS)
        print(f"{text:30}{times[HOST]:8.2f}{ratios}", flush=True)
    if options.json:
        machine = {"processor": llvm.get_host_cpu_name(), "python": platform.python_version()}
        report = {"machine": machine, "elements": N, "microseconds": figures}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def compiled(level: str, folder: Path) -> dict[tuple[str, ...], bytes]:
    """Compile all loops for a level or processor, in a process of its own."""
    target = {}
    if level in prebuilt.LEVELS["x86_64"]:
        target = prebuild.target(level)
    elif level != HOST:  # a processor of the level 3, which is older than this one
        target = {**prebuild.target("x86-64-v3"), "NUMBA_CPU_NAME": level}
    (folder / "benchmarks_prebuilt.py").write_text(Path(__file__).read_text())
    archive = folder / f"{level}.zip"
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-c", COMPILES, str(archive)]
    subprocess.run(command, env={**os.environ, **target, "PYTHONPATH": path}, check=True)
    with zipfile.ZipFile(archive) as members:
        return {name: members.read(machine_code.Code(name).prebuilt) for name, _ in LOOPS.values()}


_kept: list[Any] = []  # engines own the code, and arrays the memory


def loop(code: bytes, name: tuple[str, ...], given: tuple[Any, ...]) -> Callable[[], None]:
    """Link a loop by itself, because all codes of a loop have the same symbol."""
    machine_code.load(RULES, "squares", "float64")  # names the symbols of libm to LLVM
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _kept.append(engine)
    numbers = []
    for argument in given:
        if isinstance(argument, tuple):
            # Ones: sums of zeros would be as fast, but not those of subnormal numbers.
            array = np.ones(argument[0] + 64, argument[1])
            _kept.append(array)
            # Aligned to a cache line, so that alignment is equal for all levels.
            argument = -(-address(array) // 64) * 64 if array.itemsize > 1 else address(array)
        numbers.append(argument)
    found = engine.get_function_address(machine_code.Code(name).symbol)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(numbers))(found)
    return lambda: function(*numbers)


def timed(call: Callable[[], None]) -> float:
    """Return the microseconds of a call."""
    began = time.perf_counter()
    for _ in range(REPEATED):
        call()
    return (time.perf_counter() - began) / REPEATED * 1e6


if __name__ == "__main__":
    main()
