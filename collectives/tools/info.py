"""`python -m collectives info`: installed versions, MPI features and ranks."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

from collectives.calls import shared_settings
from collectives.communicator import Communicator, group_of
from collectives.core import links, other_projects
from collectives.core.settings import Settings
from collectives.core.version import __version__
from collectives.core.visible_gpus import visible_gpus
from collectives.kernels import machine_code, prebuilt
from collectives.launch import open_mpi, processes
from collectives.transport.backoff import describe_ranks

__all__ = [
    "gather_facts", "gpus", "library_name", "machine", "stores", "table", "thread_level",
    "versions",
]  # fmt: skip

# Import name of a package -> names of distributions that may contain it.
_PACKAGES = {
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "numba": ("numba",),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "torch": ("torch",),
    "jax": ("jax",),
}

# Path of large arrays on CUDA devices, by the ranks' agreed setting.
_ROUTES = {
    "on": "messages of device memory",
    "off": "staged through host memory",
    "auto": "staged through host memory",  # the ranks have not agreed yet
}


# Text instead of "no", for names that do not explain it.
_ABSENT = {
    "fault_tolerance": "no: a dead rank ends this job; to continue, start it by "
    "`mpirun --with-ft ulfm` of Open MPI >= 5"
}


def gather_facts(comm: Communicator) -> dict[str, Any]:
    """Return facts about this process and the ranks; *collective*."""
    from mpi4py import MPI

    names = comm.allgather_object((comm.node_rank, platform.node()))
    settings = (
        # Only Open MPI reads these settings.
        open_mpi.recommended_settings({}, cores=1) if "Open MPI" in processes.library() else {}
    )
    # Also settings of `init`, which are in the environment now.
    mpi_set = {k: os.environ[k] for k in settings if k in os.environ}
    return {
        "unisono": __version__,
        "python": platform.python_version(),
        "mpi_library": processes.library(),
        "mpi_standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": thread_level(),
        "cuda_aware": shared_settings.library_takes_device_memory(),
        "device_arrays": _route(comm.settings),
        "gpus": gpus(comm.allgather_object(visible_gpus())),
        "fault_tolerance": open_mpi.is_fault_tolerant(),
        "mpi_settings": mpi_set,
        "links": links.facts(comm.settings.links),
        "stores": stores(_chosen_stores(comm)),
        "compiled_code": _compiled_code(),
        "threads": {
            "calls": comm.settings.call_threads,
            "updates": comm.settings.update_threads,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        },
        "ranks": comm.size,
        "nodes": {
            f"{node} {name}": sum(1 for other in names if other[0] == node)
            for node, name in dict(sorted(names)).items()
        },
        "packages": {name: _version(name) for name in _PACKAGES},
        "other_projects": other_projects.conflicts(),
    }


def _route(chosen: Settings) -> str:
    route = _ROUTES[chosen.cuda_aware]
    return f"by NCCL where it can reduce them, else {route}" if chosen.nccl == "on" else route


def gpus(seen: Sequence[Sequence[str]]) -> str | None:
    """Describe the visible GPUs of the ranks; None without any.

    Args:
        seen: names of the visible GPUs, by rank.

    Example:
        >>> gpus([["0", "1"], ["0", "1"], []])
        '0,1 on ranks 0 1; none on rank 2'
    """
    if not any(seen):
        return None
    lists = [",".join(own) or "none" for own in seen]
    ranks = {names: [r for r, own in enumerate(lists) if own == names] for names in lists}
    return "; ".join(f"{names} on {describe_ranks(ranks[names])}" for names in ranks)


def stores(told: Sequence[tuple[str, int] | None]) -> str | None:
    """Describe the store modes of the ranks; None without engines.

    Args:
        told: `Engine.stores` by rank, or None without an engine.
    """
    found = {rank: own for rank, own in enumerate(told) if own is not None}
    if not found:
        return None
    ways = sorted({way for way, _ in found.values()})
    each = [f"{way} on {describe_ranks([r for r in found if found[r][0] == way])}" for way in ways]
    times = [time for _, time in found.values()]
    why = f"a line that another core has takes {min(times)} to {max(times)} ns"
    return f"{', '.join(each)}; {why if all(times) else 'not measured'}"


def _compiled_code() -> str:
    """Return the origins of the functions that this process has loaded, and the prebuilt levels."""
    loaded = [f"{number} from {origin}" for origin, number in machine_code.origins().items()]
    available = ", ".join(prebuilt.available()) or "nothing"
    return f"{', '.join(loaded) or 'none loaded'}; prebuilt for this processor: {available}"


def _chosen_stores(comm: Communicator) -> list[tuple[str, int] | None]:
    """Let each rank choose its store mode as in a program; *collective*."""
    # Enough bytes through the slots that each rank has probed its stores.
    x = np.ones(1 << 18, np.float32)
    for _ in range(3):
        comm.allreduce(x)
    engine = group_of(comm).node_engine
    return comm.allgather_object(engine.stores if engine else None)


def versions() -> dict[str, str]:
    """Return this process's versions that should be equal on all ranks."""
    return {
        "unisono": __version__,
        "Python": platform.python_version(),
        **{name: _version(name) or "absent" for name in ("numpy", "mpi4py", "numba")},
        "MPI library": processes.library(),
    }


def library_name() -> str:
    """Return the name and version of the MPI library, such as "Open MPI 5.0.11"."""
    # "Open MPI v5.0.11, package: ...", "MPICH Version:      4.3.2", "Intel(R) MPI Library 2021.18
    # for Linux* OS"
    named = re.sub(r"(\s+Version\s*:)?\s+v?(?=\d)", " ", processes.library().partition(",")[0])
    return re.sub(r"Intel\(R\) MPI Library (\S+).*", r"Intel MPI \1", named)


def machine(comm: Communicator) -> str:
    """Describe the processor of rank 0's node, and the cores of its ranks; *collective*.

    Bound ranks each run on few of the cores that all of them use.
    """
    everywhere = comm.allgather_object((comm.node_rank, os.sched_getaffinity(0)))
    # Not `os.cpu_count`: a container or launcher may allow fewer cores.
    here = [cores for node, cores in everywhere if node == 0]
    cores, each = len(set().union(*here)), min(map(len, here))
    bound = "" if each == cores else f" ({each} for a rank)"
    return f"{_processor()}, {cores} cores{bound}, {platform.system()} {platform.release()}"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    models = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return models[0] if models else platform.machine()


def thread_level() -> str:
    """Return the MPI library's thread level: "single" .. "multiple"."""
    from mpi4py import MPI

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return levels[MPI.Query_thread()]


def table(facts: dict[str, Any]) -> str:
    """Return facts as lines of name and value."""
    rows = []
    for name, value in facts.items():
        if name == "links":
            rows += [f"{f'{link} link':<16} {_link(costs)}" for link, costs in value.items()]
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{k} {'absent' if v is None else v}" for k, v in value.items())
        elif isinstance(value, bool):
            value = "yes" if value else _ABSENT.get(name, "no")
        elif isinstance(value, list):
            value = "; ".join(value)
        rows.append(f"{name.replace('_', ' '):<16} {value or 'none'}")
    return "\n".join(rows)


def _link(costs: dict[str, Any]) -> str:
    alpha, beta, gamma = 1e6 * costs["alpha"], 1e9 * costs["beta"], 1e9 * costs["gamma"]
    return (
        f"{alpha:.3g} us/message, {beta:.3g} ns/byte, {gamma:.3g} ns/byte reduced ({costs['from']})"
    )


def _version(package: str) -> str | None:
    """Return the version of an installed package without importing it; None if absent."""
    # Importing CuPy or JAX may start a device.
    if util.find_spec(package) is None:
        return None
    for distribution in _PACKAGES[package]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
