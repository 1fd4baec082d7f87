"""Every environment variable that Unisono reads, with its type, unit and default.

| variable | type | default | meaning |
| --- | --- | --- | --- |
| `UNISONO_TIMEOUT` | seconds > 0 | 600 | how long one operation may wait for another rank |
| `UNISONO_STALL_WARNING` | seconds > 0 | 60 | after how long a wait is reported in the log |
| `UNISONO_CHECK` | off, sample, always | always | compare calls first; the strictest counts |
| `UNISONO_SHARED_MEMORY` | directory, or off | /dev/shm | where ranks of a node meet |
| `UNISONO_RECORDER_DIR` | directory | unisono-recorder-JOB | where flight records go |
| `UNISONO_ABORT_ON_EXCEPTION` | 0 or 1 | 1 | an uncaught exception on one rank ends the whole job |
| `UNISONO_MPI_SETTINGS` | 0 or 1 | 1 | give Open MPI the settings listed in `launch.py` |
| `UNISONO_TUNED` | file, or off | see `tuned.py` | what `python -m collectives tune` measured |
| `UNISONO_CUDA_AWARE` | auto, on, off | auto | MPI takes arrays of CUDA devices; auto: as it says |
| `UNISONO_NODE_LINK` | alpha=2us,beta=8GB/s,gamma=30GB/s | tuned | cost of messages inside a node |
| `UNISONO_NETWORK_LINK` | as above | tuned | cost of messages between nodes |

Read by `strategies`: `UNISONO_CLUSTER`, such as `ps:2,worker:*`, the jobs of a cluster's ranks.

A variable that begins with `UNISONO_` and is none of those is most likely a slip: `init` warns.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from collectives import links

__all__ = ["VARIABLES", "Check", "CudaAware", "Settings", "from_environment", "slips"]

Check = Literal["off", "sample", "always"]
CudaAware = Literal["auto", "on", "off"]

W = TypeVar("W", bound=str)

VARIABLES = (
    "UNISONO_ABORT_ON_EXCEPTION", "UNISONO_CHECK", "UNISONO_CLUSTER", "UNISONO_CUDA_AWARE",
    "UNISONO_MPI_SETTINGS", "UNISONO_NETWORK_LINK", "UNISONO_NODE_LINK", "UNISONO_RECORDER_DIR",
    "UNISONO_SHARED_MEMORY", "UNISONO_STALL_WARNING", "UNISONO_TIMEOUT", "UNISONO_TUNED",
)  # fmt: skip
"""What the packages read."""

# Of slurm/train.sbatch, which the processes that it starts inherit, and of the tests.
_OTHERS = (
    "UNISONO_CHECKOUT", "UNISONO_PROGRAM", "UNISONO_REQUIRE", "UNISONO_TEST_WORLD",
    "UNISONO_VENV",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the user chose through the environment; times are in seconds."""

    # Ten minutes: the first step of a real job waits for the slowest rank to compile its model
    # and to fill its input queues, which takes minutes on a busy file system.
    timeout: float = 600.0
    stall_warning: float = 60.0
    check: Check = "always"
    shared_memory: str | None = "/dev/shm"
    recorder_dir: str | None = None
    abort_on_exception: bool = True
    mpi_settings: bool = True
    tuned: str | None = None  # a file, "off", or None for the usual place
    node_link: Mapping[str, float] = field(default_factory=dict)  # as `links.parse` returns it
    network_link: Mapping[str, float] = field(default_factory=dict)
    # What follows from the last three, the same on all ranks: `tuned.agreed` puts it here.
    links: links.Links = field(default_factory=links.defaults)
    cuda_aware: CudaAware = "auto"  # "on" or "off" once the ranks agree: `cuda_aware.agreed`


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environ: the variables to read, `os.environ` if None.

    Raises:
        ValueError: a variable has a value that cannot be used; the message names it.
    """
    env = os.environ if environ is None else environ
    default = Settings()
    return Settings(
        timeout=_seconds(env, "UNISONO_TIMEOUT", default.timeout),
        stall_warning=_seconds(env, "UNISONO_STALL_WARNING", default.stall_warning),
        check=_one_of(env, "UNISONO_CHECK", get_args(Check), default.check),
        shared_memory=_directory(env, "UNISONO_SHARED_MEMORY", default.shared_memory),
        recorder_dir=env.get("UNISONO_RECORDER_DIR", "").strip() or None,
        abort_on_exception=_switch(env, "UNISONO_ABORT_ON_EXCEPTION", default.abort_on_exception),
        mpi_settings=_switch(env, "UNISONO_MPI_SETTINGS", default.mpi_settings),
        tuned=env.get("UNISONO_TUNED", "").strip() or None,
        node_link=_link(env, "UNISONO_NODE_LINK"),
        network_link=_link(env, "UNISONO_NETWORK_LINK"),
        cuda_aware=_one_of(env, "UNISONO_CUDA_AWARE", get_args(CudaAware), default.cuda_aware),
    )


def slips(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence about every variable that is called as ours are and that nothing reads."""
    unknown = sorted(
        name
        for name in environ
        if name.startswith("UNISONO_") and name not in (*VARIABLES, *_OTHERS)
    )
    return [f"settings: {name} is not read, expected {_nearest(name)}" for name in unknown]


def _nearest(name: str) -> str:
    """Return the variables that may have been meant."""
    # What all have in common would make all of them similar.
    short = {known.removeprefix("UNISONO_"): known for known in VARIABLES}
    near = difflib.get_close_matches(name.removeprefix("UNISONO_").upper(), short, n=1)
    return short[near[0]] if near else f"one of {' '.join(VARIABLES)}"


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(f"settings: {name} is not a time, expected seconds > 0, got {text!r}")
    return value


def _switch(env: Mapping[str, str], name: str, default: bool) -> bool:
    text = env.get(name, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"settings: {name} is not a switch, expected 0 or 1, got {text!r}")
    return default if not text else text == "1"


def _directory(env: Mapping[str, str], name: str, default: str | None) -> str | None:
    text = env.get(name, "").strip()
    if not text:
        return default
    return None if text == "off" else text


def _link(env: Mapping[str, str], name: str) -> Mapping[str, float]:
    text = env.get(name, "").strip()
    try:
        return links.parse(text) if text else {}
    except ValueError as error:
        raise ValueError(f"settings: {name} does not describe a link: {error}") from None


def _one_of(env: Mapping[str, str], name: str, words: Sequence[W], default: W) -> W:
    text = env.get(name, "").strip()
    for word in words:
        if text == word:
            return word
    if text:
        raise ValueError(f"settings: {name} must be one of {' '.join(words)}, got {text!r}")
    return default
