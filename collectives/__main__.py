"""`python -m collectives info`: what is installed, what MPI can do, who is in the world."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata, util
from typing import Any

import collectives as cc
from collectives import launch


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m collectives", description="Look at the collectives of this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="print versions, MPI's abilities and the ranks; also under mpirun"
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        comm = cc.init()
    except cc.LaunchError as error:
        print(f"python -m collectives {options.command}: {error}", file=sys.stderr)
        return 1
    facts = gather_facts(comm)
    if comm.rank == 0:
        print(json.dumps(facts, indent=2) if options.json else _table(facts))
    return 0


def gather_facts(comm: cc.Communicator) -> dict[str, Any]:
    """Collect the facts of this process and the ranks; *collective*."""
    from mpi4py import MPI

    names = comm.allgather_object((comm.node_rank, platform.node()))
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    mpi_set = {k: os.environ[k] for k in launch.mpi_settings({}, cores=1) if k in os.environ}
    return {
        "unisono": cc.__version__,
        "python": platform.python_version(),
        "mpi_library": MPI.Get_library_version().splitlines()[0].strip("\0 ,"),
        "mpi_standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": levels[MPI.Query_thread()],
        "cuda_aware": launch.is_cuda_aware(),
        "fault_tolerance": launch.is_fault_tolerant(),
        "mpi_settings": mpi_set,
        "ranks": comm.size,
        "nodes": {
            f"{node} {name}": sum(1 for other in names if other[0] == node)
            for node, name in dict(sorted(names)).items()
        },
        "packages": {name: _version(name) for name in _PACKAGES},
    }


# Import name of a package -> names of the distributions that may bring it.
_PACKAGES = {
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "numba": ("numba",),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "torch": ("torch",),
    "jax": ("jax",),
}


def _version(package: str) -> str | None:
    """Return the version of an installed package without importing it, None if it is absent."""
    if util.find_spec(package) is None:
        return None
    for distribution in _PACKAGES[package]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _table(facts: dict[str, Any]) -> str:
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {'absent' if v is None else v}" for k, v in value.items())
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        rows.append(f"{name.replace('_', ' '):<16} {value}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
