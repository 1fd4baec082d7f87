"""Compile all functions for all levels of the processor families, for a wheel.

Usage::

    python -m collectives.tools.prebuild [LEVEL ...]

writes an archive for each level into the package (`collectives.kernels.prebuilt`), in about 90 s of
processor time each. numba compiles for one processor per process, so each level has a process of
its own. The machine must be x86-64, whose code is translated for ARM64.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collectives.kernels import machine_code, prebuilt

__all__ = ["all_names", "build", "main", "target", "write"]

# Modules whose functions are compiled to object files; see `machine_code.load`.
MODULES = (
    "collectives.algorithms.eager_kernel",
    "collectives.kernels.buffer_address_kernel",
    "collectives.kernels.elementwise",
    "collectives.kernels.fast_path_kernel",
    "collectives.kernels.half_loops_kernel",
    "collectives.kernels.int8_loops",
    "collectives.kernels.xla_handler_kernel",
    "collectives.node.reduce_kernels",
    "strategies.input.csv.loop",
    "strategies.optimizers.rule_loops",
)


def all_names() -> Iterator[tuple[str, ...]]:
    """Yield the names of all functions, as `machine_code.load` takes them."""
    for module in MODULES:
        for words in importlib.import_module(module).all_words():
            yield module, *words


def build(levels: list[str], folder: Path = prebuilt.FOLDER) -> None:
    """Write the archives of these levels, one for each core of the machine at a time.

    Raises:
        RuntimeError: a level could not be compiled; the text is that of its process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(lambda level: _run(level, folder), levels):
            pass


def target(level: str) -> dict[str, str]:
    """Return the environment variables of a process that compiles for a level by `write`."""
    # numba compiles for this machine's family; `_ARM64` translates the result.
    processor = _TRANSLATED_FROM if level in prebuilt.LEVELS["aarch64"] else level
    return {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": prebuilt.features_of(processor)}


def _run(level: str, folder: Path) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, **target(level), "PYTHONPATH": path}
    command = [
        sys.executable, "-m", "collectives.tools.prebuild",
        "--write", str(folder / f"{level}.zip"),
    ]  # fmt: skip
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"prebuild: {level} was not compiled:\n{result.stderr}")


def write(path: Path, names: Iterable[tuple[str, ...]]) -> None:
    """Compile functions for the processor that the environment names, and write their archive.

    Args:
        path: the archive, named by its level.
        names: arguments of `machine_code.load` for each function.
    """
    import llvmlite.binding as llvm

    from collectives.kernels import numba_compiler

    if path.stem in prebuilt.LEVELS["aarch64"]:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        numba_compiler.cross_target = numba_compiler.CrossTarget(
            "aarch64-unknown-linux-gnu", "generic", prebuilt.features_of(path.stem), _to_arm64
        )
    aside = path.with_suffix(f".{os.getpid()}")
    # Not compressed, because a wheel compresses its files, and a start reads faster.
    with zipfile.ZipFile(aside, "w") as archive:
        for name in names:
            code = machine_code.Code(name)
            archive.writestr(code.prebuilt, code.compile())
    os.replace(aside, path)


# Level whose code is translated for ARM64: it converts float16 by instructions, as ARM64 does. Its
# vectors of 256 bits become two of 128.
_TRANSLATED_FROM = "x86-64-v3"

# Instructions of x86-64 in LLVM's text -> those of ARM64. Streaming stores need no fence there.
_ARM64 = (
    (r"call void @llvm\.x86\.sse2\.pause\(\)", "call void @llvm.aarch64.hint(i32 1)"),
    (r"declare void @llvm\.x86\.sse2\.pause\(\)", "declare void @llvm.aarch64.hint(i32)"),
    (r"(?:tail )?call void @llvm\.x86\.sse2\.mfence\(\)", "fence seq_cst"),
    (r"(?:tail )?call void @llvm\.x86\.sse\.sfence\(\).*\n", "\n"),
    (r"declare void @llvm\.x86\.sse2?\.[ms]fence\(\).*\n", "\n"),
)


def _to_arm64(text: str) -> str:
    """Replace instructions of x86-64 in LLVM's text.

    Raises:
        RuntimeError: the text has an instruction without equivalent here.
    """
    for pattern, instead in _ARM64:
        text = re.sub(pattern, instead, text)
    if found := re.search(r"llvm\.x86\.[\w.]+", text):
        raise RuntimeError(f"prebuild: {found[0]} has no equivalent for ARM64")
    return text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m collectives.tools.prebuild")
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help="by default all")
    parser.add_argument("--into", type=Path, default=prebuilt.FOLDER, metavar="FOLDER",
                        help="folder of the archives; by default that of this package")  # fmt: skip
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write(options.write, all_names())
        return
    every = [level for known in prebuilt.LEVELS.values() for level in known]
    build(options.levels or every, options.into)


if __name__ == "__main__":
    main()
