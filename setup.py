"""Builds wheels; `setup.cfg` has all settings that are equal for all wheels.

UNISONO_WHEEL=x86_64 or aarch64 adds compiled loops for all levels of that machine, in up to six
minutes of processor time. Other wheels are pure Python and need numba, which compiles a loop at its
first use. An editable install is pure, because prebuilt loops of changed sources are not used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from configparser import ConfigParser
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
MACHINE = os.environ.get("UNISONO_WHEEL", "")
if MACHINE not in ("", *LEVELS):
    raise SystemExit(f"setup: UNISONO_WHEEL is unknown, expected {list(LEVELS)}, got {MACHINE!r}")


class Unisono(Distribution):
    """Adds the requirements that depend on the wheel."""

    def finalize_options(self) -> None:
        """Add numba to the requirements of a pure wheel."""
        super().finalize_options()
        if not MACHINE:
            self.install_requires = [*REQUIRED, NUMBA]


class BuildModules(build_py):
    """Compiles the loops of a wheel for a machine."""

    def run(self) -> None:
        """Copy the modules, and compile the loops beside the copy."""
        super().run()
        if MACHINE and not self.editable_mode:
            folder = Path(self.build_lib).resolve() / "collectives" / "kernels" / "objects"
            command = ["-m", "collectives.tools.prebuild", "--into", folder, *LEVELS[MACHINE]]
            subprocess.run([sys.executable, *command], cwd=Path(__file__).parent, check=True)


class BuildWheel(bdist_wheel):
    """Tags a wheel by its machine."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag; the loops use only functions of Python and glibc, of any version."""
        return ("py3", "none", f"manylinux_2_28_{MACHINE}" if MACHINE else "any")


setup(
    distclass=Unisono,
    cmdclass={"build_py": BuildModules, "bdist_wheel": BuildWheel},
    # Compiling imports the packages.
    setup_requires=[NUMBA, *REQUIRED] if MACHINE else [],
)
