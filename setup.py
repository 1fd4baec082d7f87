"""Builds wheels; `setup.cfg` has all settings that are equal for all wheels.

UNISONO_WHEEL tells for which processors a wheel has compiled loops:

    own        this one, if it is x86-64: about 100 s of processor time; the default
    x86_64     all of this family, as for aarch64: up to six minutes of processor time
    aarch64
    any        none: the wheel is pure Python

Without a compiled loop, numba compiles it at its first use; the wheels of a family do not require
numba. An editable install is pure, because prebuilt loops of changed sources are not used.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SETTINGS = ConfigParser()
SETTINGS.read(Path(__file__).with_name("setup.cfg"))
NUMBA = SETTINGS["options.extras_require"]["numba"].strip()
REQUIRED = SETTINGS["options"]["install_requires"].split()
# Machine -> levels of `collectives.kernels.prebuilt`.
LEVELS = {"x86_64": ["x86-64-v2", "x86-64-v3", "x86-64-v4"], "aarch64": ["armv8-a"]}
WHEEL = os.environ.get("UNISONO_WHEEL") or "own"
if WHEEL not in ("own", "any", *LEVELS):
    known = ["own", "any", *LEVELS]
    raise SystemExit(f"setup: UNISONO_WHEEL is unknown, expected {known}, got {WHEEL!r}")
if WHEEL == "own" and platform.machine() != "x86_64":
    WHEEL = "any"
TAGS = {"own": "linux_x86_64", "any": "any"}


class Unisono(Distribution):
    """Adds the requirements that depend on the wheel."""

    def finalize_options(self) -> None:
        """Add numba to the requirements of a wheel for other processors, too."""
        super().finalize_options()
        if WHEEL not in LEVELS:
            self.install_requires = [*REQUIRED, NUMBA]


class BuildModules(build_py):
    """Compiles the loops of a wheel for a machine."""

    def run(self) -> None:
        """Copy the modules, and compile the loops beside the copy."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib).resolve() / "collectives" / "kernels" / "objects"
        # Loops of a wheel that was built here before.
        shutil.rmtree(folder, ignore_errors=True)
        if WHEEL == "any":
            return
        if WHEEL == "own" and find_spec("numba") is None:
            self.warn("numba is not installed: loops are compiled at their first use")
            return
        levels = LEVELS.get(WHEEL, ["own"])
        command = ["-m", "collectives.tools.prebuild", "--into", folder, *levels]
        subprocess.run([sys.executable, *command], cwd=Path(__file__).parent, check=True)


class BuildWheel(bdist_wheel):
    """Tags a wheel by its machine."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag; the loops use only functions of Python and glibc, of any version."""
        return ("py3", "none", TAGS.get(WHEEL, f"manylinux_2_28_{WHEEL}"))


setup(
    distclass=Unisono,
    cmdclass={"build_py": BuildModules, "bdist_wheel": BuildWheel},
    # Compiling imports the packages.
    setup_requires=[] if WHEEL == "any" else [NUMBA, *REQUIRED],
)
