"""Environment variables of Unisono; `docs/settings.md` lists values and defaults.

`init` warns of unknown variables that begin with `UNISONO_`, which are most likely typos.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from collectives.core import links

__all__ = [
    "EQUAL",
    "VARIABLES",
    "Check",
    "CudaAware",
    "Nccl",
    "Settings",
    "Stores",
    "Traceback",
    "equal_values",
    "from_environment",
    "unknown_variables",
]

Check = Literal["off", "sample", "always"]
CudaAware = Literal["auto", "on", "off"]
Nccl = Literal["on", "off"]
Stores = Literal["auto", "plain", "streaming"]
Traceback = Literal["short", "full"]

# Variables of slurm/train.sbatch, which its processes inherit; of `init`, for children of a rank
# (`collectives.launch.launcher`); of `setup.py`; and of the tests.
_OTHERS = (
    "UNISONO_CHECKOUT", "UNISONO_CHILD_OF", "UNISONO_LAUNCHER", "UNISONO_MPIRUN_OPTIONS",
    "UNISONO_PROGRAM", "UNISONO_REQUIRE", "UNISONO_TEST_WORLD", "UNISONO_VENV", "UNISONO_WHEEL",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings from the environment; times are in seconds."""

    # Ten minutes: the first step of a real job waits for the slowest rank to compile its model
    # and to fill its input queues, which takes minutes on a busy file system.
    timeout: float = 600.0
    stall_warning: float = 60.0
    check: Check = "always"
    shared_memory: str | None = "/dev/shm"
    stores: Stores = "auto"
    recorder_dir: str | None = None
    timeline: str | None = None
    abort_on_exception: bool = True
    traceback: Traceback = "short"
    mpi_settings: bool = True
    tuned: str | None = None  # a file, "off", or None for the usual place
    node_link: Mapping[str, float] = field(default_factory=dict)  # as `links.parse` returns it
    network_link: Mapping[str, float] = field(default_factory=dict)
    wait_limit: float | None = None  # of queues and variables, for calls without a limit
    # Called functions may wait for one another, so this only bounds how many remote calls can
    # start.
    call_threads: int = 32
    # An update reads and writes memory, and releases the GIL: four of them saturate the memory of a
    # processor, and more threads than cores would only take turns.
    update_threads: int = field(default_factory=lambda: min(4, len(os.sched_getaffinity(0))))
    # Results of `calls.shared_settings`, equal on all ranks: the links, and "on" or "off" for
    # device memory in MPI calls.
    links: links.MeasuredMachine = field(default_factory=links.defaults)
    cuda_aware: CudaAware = "auto"
    # Off by default, because it was not measured on GPUs.
    nccl: Nccl = "off"


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of an environment.

    Args:
        environ: the variables; None for `os.environ`.

    Raises:
        ValueError: a variable has an invalid value; names the variable.
    """
    env = os.environ if environ is None else environ
    chosen: dict[str, Any] = {}
    # Empty variables count as unset, as `export UNISONO_TIMEOUT=` is meant.
    for variable, (setting, read) in _READERS.items():
        if text := env.get(variable, "").strip():
            try:
                chosen[setting] = read(text)
            except ValueError as error:
                raise ValueError(f"settings: {variable} {error}") from None
    return Settings(**chosen)


def equal_values(own: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the variables in `EQUAL`, as a user writes them."""
    values = {}
    for variable in EQUAL:
        if variable in _READERS:
            value = getattr(own, _READERS[variable][0])
            values[variable] = "off" if value is None else str(value)
        else:
            values[variable] = environ.get(variable, "").strip() or "unset"
    return values


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence about every variable that begins with UNISONO_ and that nothing reads."""
    unknown = sorted(
        # Sorted, so that all ranks warn in the same order.
        name
        for name in environ
        if name.startswith("UNISONO_") and name not in (*VARIABLES, *_OTHERS)
    )
    return [f"settings: {name} is not read, expected {_suggestion(name)}" for name in unknown]


def _suggestion(name: str) -> str:
    # Without the common prefix, which would make all of them similar.
    short = {known.removeprefix("UNISONO_"): known for known in VARIABLES}
    near = difflib.get_close_matches(name.removeprefix("UNISONO_").upper(), short, n=1)
    return short[near[0]] if near else f"one of {' '.join(VARIABLES)}"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Also false for NaN.
    if not value > 0:
        raise ValueError(f"is not a time, expected seconds > 0, got {text!r}")
    return value


def _count(text: str) -> int:
    # `isdecimal` alone accepts digits of other scripts.
    if not (text.isascii() and text.isdecimal()) or not int(text):
        raise ValueError(f"is not a number of threads, expected an integer > 0, got {text!r}")
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"is not a switch, expected 0 or 1, got {text!r}")
    return text == "1"


def _link(text: str) -> Mapping[str, float]:
    try:
        return links.parse(text)
    except ValueError as error:
        raise ValueError(f"does not describe a link: {error}") from None


def _one_of(words: Sequence[str], text: str) -> str:
    if text not in words:
        raise ValueError(f"must be one of {' '.join(words)}, got {text!r}")
    return text


# Variable -> (setting, function that parses its text).
_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "UNISONO_TIMEOUT": ("timeout", _seconds),
    "UNISONO_STALL_WARNING": ("stall_warning", _seconds),
    "UNISONO_CHECK": ("check", partial(_one_of, get_args(Check))),
    "UNISONO_SHARED_MEMORY": ("shared_memory", lambda text: None if text == "off" else text),
    "UNISONO_STORES": ("stores", partial(_one_of, get_args(Stores))),
    "UNISONO_RECORDER_DIR": ("recorder_dir", str),
    "UNISONO_TIMELINE": ("timeline", str),
    "UNISONO_ABORT_ON_EXCEPTION": ("abort_on_exception", _switch),
    "UNISONO_TRACEBACK": ("traceback", partial(_one_of, get_args(Traceback))),
    "UNISONO_MPI_SETTINGS": ("mpi_settings", _switch),
    "UNISONO_TUNED": ("tuned", str),
    "UNISONO_NODE_LINK": ("node_link", _link),
    "UNISONO_NETWORK_LINK": ("network_link", _link),
    "UNISONO_WAIT_LIMIT": ("wait_limit", _seconds),
    "UNISONO_CALL_THREADS": ("call_threads", _count),
    "UNISONO_UPDATE_THREADS": ("update_threads", _count),
    "UNISONO_CUDA_AWARE": ("cuda_aware", partial(_one_of, get_args(CudaAware))),
    "UNISONO_NCCL": ("nccl", partial(_one_of, get_args(Nccl))),
}

# Variables that must be equal on all ranks of the world, or of each node. Others concern one
# process alone, or the ranks agree on one value (`calls.shared_settings`).
EQUAL: dict[str, Literal["world", "node"]] = {
    "UNISONO_SHARED_MEMORY": "node",
    "UNISONO_NCCL": "world",
    "UNISONO_CLUSTER": "world",
    "UNISONO_TORCH_REPLACE": "world",
}

VARIABLES = (
    *_READERS, "UNISONO_CLUSTER", "UNISONO_EVENTS", "UNISONO_FAULT", "UNISONO_TORCH_REPLACE",
)  # fmt: skip
"""Variables that the packages read."""
