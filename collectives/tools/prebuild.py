"""Compile all functions for levels of the processor families, for a wheel.

Usage::

    python -m collectives.tools.prebuild [LEVEL ...]

writes an archive for each level into the package (`collectives.kernels.prebuilt`), in about 100 s
of processor time each, on all cores. `own` is the highest level of this processor; without
arguments, all levels are compiled. numba compiles for one processor per process, so each process
has one level. The machine must be x86-64, whose code is translated for ARM64.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collectives.kernels import machine_code, prebuilt

__all__ = ["all_names", "build", "main", "own_levels", "target", "write"]

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
    """Write the archives of these levels, with a process for each core.

    Raises:
        RuntimeError: a level could not be compiled; the text is that of its process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A process has about 400 MB of memory.
    cores = min(len(os.sched_getaffinity(0)), 16)
    shares = -(-cores // len(levels))
    with ThreadPoolExecutor(cores) as pool, tempfile.TemporaryDirectory() as aside:
        parts = [(level, Path(aside, str(k), f"{level}.zip"), f"{k}/{shares}")
                 for level in levels for k in range(shares)]  # fmt: skip
        for _ in pool.map(lambda part: _run(*part), parts):
            pass
        for level in levels:
            _merge([path for of, path, _ in parts if of == level], folder / f"{level}.zip")


def own_levels() -> list[str]:
    """Return the highest level of this processor, as a list; empty if no level is known for it."""
    import llvmlite.binding as llvm

    return prebuilt.levels_of(llvm.get_host_cpu_features())[:1]


def target(level: str) -> dict[str, str]:
    """Return the environment variables of a process that compiles for a level by `write`."""
    # numba compiles for this machine's family; `_ARM64` translates the result.
    processor = _TRANSLATED_FROM if level in prebuilt.LEVELS["aarch64"] else level
    return {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": prebuilt.features_of(processor)}


def _run(level: str, archive: Path, share: str) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, **target(level), "PYTHONPATH": path}
    words = ["-m", "collectives.tools.prebuild", "--write", str(archive), "--share", share]
    result = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"prebuild: {level} was not compiled:\n{result.stderr}")


def _merge(parts: Iterable[Path], path: Path) -> None:
    """Write one archive with the members of several."""
    aside = path.with_suffix(f".{os.getpid()}")
    # Not compressed, because a wheel compresses its files, and a start reads faster.
    with zipfile.ZipFile(aside, "w") as archive:
        for part in parts:
            with zipfile.ZipFile(part) as members:
                for name in members.namelist():
                    archive.writestr(name, members.read(name))
    os.replace(aside, path)


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
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            code = machine_code.Code(name)
            archive.writestr(code.prebuilt, code.compile())


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
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help="or own; by default all")
    parser.add_argument("--into", type=Path, default=prebuilt.FOLDER, metavar="FOLDER",
                        help="folder of the archives; by default that of this package")  # fmt: skip
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        first, step = map(int, options.share.split("/"))
        write(options.write, list(all_names())[first::step])
        return
    every = [level for known in prebuilt.LEVELS.values() for level in known]
    levels = own_levels() if options.levels == ["own"] else options.levels or every
    if levels:
        build(levels, options.into)


if __name__ == "__main__":
    main()
