"""Prebuilt code of the package: object files for each level of a processor family.

A level is a set of instructions that many processors have, such as x86-64-v3. So one installation
serves a cluster of different machines. `collectives.tools.prebuild` compiles all functions for all
levels when a wheel is built::

    collectives/kernels/objects/x86-64-v4.zip      AVX-512
                                x86-64-v3.zip      AVX2 and FMA
                                x86-64-v2.zip      SSE 4.2
                                armv8-a.zip        NEON

A member of an archive is named by its function and a digest of the sources. If the sources have
changed, the name differs, and the function is compiled. The archives are as trustworthy as the
sources beside them, which have the same owner.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import platform
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "FOLDER", "LEVELS", "Found", "available", "features_of", "levels", "levels_of", "member_name",
    "read",
]  # fmt: skip

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "objects"

LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
        "x86-64-v2": ("cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"),
    },
    "aarch64": {"armv8-a": ("neon",)},
}
"""Machine -> level -> LLVM's names of the features that it adds, from the most capable level on."""

# Variables that change the code of numba, so that prebuilt code is not what the user asks for.
_NUMBA_SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX", "NUMBA_OPT")

# Raised by `zipfile` for damaged archives; RuntimeError if a flag claims encryption.
_DAMAGE = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)


class Found(NamedTuple):
    """An object file, and the level of its archive."""

    level: str
    code: bytes


def member_name(label: str, made_from: bytes) -> str:
    """Return the name of a function's code in an archive.

    Args:
        label: readable name of the function.
        made_from: name of the function, and digest of all sources that it depends on.
    """
    return f"{label}.{hashlib.sha256(made_from).hexdigest()[:24]}"


def read(name: str) -> Found | None:
    """Return an object file for this processor, by `member_name`; None if no archive has it."""
    for level in levels():
        archive = _archive(level)
        # All archives of a wheel have the same members, so the next one is for a damaged archive.
        if archive is not None and name in archive.NameToInfo:
            try:
                return Found(level, archive.read(name))
            except _DAMAGE as error:
                log.warning("prebuilt code: %s.zip is damaged at %s: %s", level, name, error)
    return None


def available() -> list[str]:
    """Return the levels of `levels` that have an archive."""
    return [level for level in levels() if _archive(level) is not None]


def features_of(level: str) -> str:
    """Return the features of a level and of those below it, as LLVM takes them."""
    known = next(names for names in LEVELS.values() if level in names)
    own = list(known)[list(known).index(level) :]
    return ",".join(f"+{feature}" for name in own for feature in known[name])


@functools.cache
def levels() -> list[str]:
    """Return the levels whose code this process may run, the most capable one first.

    Empty if the environment changes the code that numba makes.
    """
    # Without archives, LLVM need not be loaded.
    if any(map(os.environ.get, _NUMBA_SETTINGS)) or not FOLDER.is_dir():
        return []
    import llvmlite.binding as llvm

    return levels_of(llvm.get_host_cpu_features())


def levels_of(features: Mapping[str, bool], machine: str = platform.machine()) -> list[str]:
    """Return the levels of a processor with these features, the most capable one first."""
    found: list[str] = []
    # A level includes those below it.
    for level, added in reversed(LEVELS.get(machine, {}).items()):
        if not all(features.get(name, False) for name in added):
            break
        found.insert(0, level)
    return found


@functools.cache
def _archive(level: str) -> zipfile.ZipFile | None:
    """Open an archive; in memory, because forked processes would share the position in a file."""
    try:
        return zipfile.ZipFile(io.BytesIO((FOLDER / f"{level}.zip").read_bytes()))
    except FileNotFoundError:
        return None
    except _DAMAGE as error:
        log.warning("prebuilt code: %s.zip is not used: %s", level, error)
        return None
