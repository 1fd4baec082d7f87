"""Fault injection at given steps, for tests.

    UNISONO_FAULT="step=12,rank=2,kind=kill; step=20,rank=0,kind=slow:5" mpirun ...

| kind | what happens on that rank, when it comes to that step |
| --- | --- |
| `kill` | the process is gone, as if for lack of memory |
| `exception` | an error is raised, as by the program itself |
| `stop` | the process stands still, and nobody is told |
| `slow:SECONDS` | it waits for so long |
| `corrupt` | one bit of its first array changes, and nobody is told |

Each of them happens once in a process: a step that is made again is made without it. Ranks go by
their numbers at the start of the program, also when some have died since.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from strategies.core import array_ops as of_any_library
from strategies.elastic import event_log

__all__ = ["VARIABLE", "Fault", "InjectedFault", "inject", "parse"]

VARIABLE = "UNISONO_FAULT"

FaultKind = Literal["kill", "exception", "stop", "slow", "corrupt"]


class InjectedFault(RuntimeError):
    """The error of a fault of kind "exception"."""


class Fault(NamedTuple):
    """What shall happen.

    Attributes:
        step: when.
        rank: where, by the number at the start of the program.
        kind: what.
        seconds: for how long, if it is "slow".
    """

    step: int
    rank: int
    kind: FaultKind
    seconds: float = 0.0


def parse(text: str) -> list[Fault]:
    """Read faults, separated by semicolons.

    Raises:
        ValueError: the text is not understood.

    Example:
        >>> parse("step=12,rank=2,kind=kill")
        [Fault(step=12, rank=2, kind='kill', seconds=0.0)]
    """
    return [_fault(part) for part in text.split(";") if part.strip()]


def _fault(text: str) -> Fault:
    try:
        named = [field.strip().split("=", 1) for field in text.split(",")]
        fields = dict(named)
        twice = len(fields) < len(named)
        kind, _, seconds = fields.pop("kind").partition(":")
        step, rank = int(fields.pop("step")), int(fields.pop("rank"))
        timed = kind == "slow"
        if fields or twice or kind not in get_args(FaultKind) or timed != bool(seconds):
            raise ValueError(text)
        length = float(seconds) if timed else 0.0
        if not 0 <= length < math.inf:
            raise ValueError(text)
        return Fault(step, rank, kind, length)  # type: ignore[arg-type]
    except (KeyError, ValueError):
        raise ValueError(
            f"{VARIABLE}: not a fault, expected step=12,rank=2,kind=kill, where kind is kill, "
            f"exception, stop, slow:SECONDS or corrupt, got {text.strip()!r}"
        ) from None


def inject(step: int, arrays: Iterable[Any] = ()) -> None:
    """Let those faults happen that `UNISONO_FAULT` has for this step of this rank.

    Sessions call this at every step, with the arrays of their saver; a loop of one's own does it by
    one line. Where the variable is not set it costs less than a microsecond.

    Args:
        step: which one begins.
        arrays: what "corrupt" changes a bit of: the first one that is not empty.

    Raises:
        InjectedFault: a fault of kind "exception".
        ValueError: the variable cannot be understood, or there is nothing to corrupt.
    """
    global _left
    if _left is None:
        own = event_log.number_at_start()
        _left = [fault for fault in parse(os.environ.get(VARIABLE, "")) if fault.rank == own]
    for fault in [fault for fault in _left if fault.step == step]:
        _left.remove(fault)
        event_log.write("fault", step=step, kind=fault.kind)
        _happen(fault, arrays)


_left: list[Fault] | None = None  # of this rank; None before the first step


def _happen(fault: Fault, arrays: Iterable[Any]) -> None:
    sys.stdout.flush()
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "corrupt":
        _corrupt(arrays)
    else:
        raise InjectedFault(f"a fault that {VARIABLE} asked for (step: {fault.step})")


def _corrupt(arrays: Iterable[Any]) -> None:
    """Change the highest bit of the exponent of the first number."""
    for array in arrays:
        memory = of_any_library.host(array)
        if memory is not None and memory.size and memory.flags.writeable:
            bits = memory.flat[:1].view(np.uint8)
            bits[-1] ^= 0x40
            memory.flat[:1] = bits.view(memory.dtype)
            return
    raise ValueError(f"{VARIABLE}: nothing to corrupt, expected an array in host memory")
