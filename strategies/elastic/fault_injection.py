"""Fault injection at given steps, for tests.

    UNISONO_FAULT="step=12,rank=2,kind=kill; step=20,rank=0,kind=slow:5" mpirun ...

| kind | effect on that rank at that step |
| --- | --- |
| `kill` | SIGKILL, as sent by the out-of-memory killer |
| `exception` | raises an error, like one of the program |
| `stop` | SIGSTOP: the process stops silently |
| `slow:SECONDS` | sleeps |
| `corrupt` | flips one bit of the rank's first array silently |

Each fault happens once per process: a repeated step runs without it. Rank numbers are those at the
start of the program, also after deaths.
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
    """The error raised by faults of kind "exception"."""


class Fault(NamedTuple):
    """A fault to inject.

    Attributes:
        step: step of the fault.
        rank: rank of the fault, by the number at the start of the program.
        kind: kind of the fault.
        seconds: duration of "slow".
    """

    step: int
    rank: int
    kind: FaultKind
    seconds: float = 0.0


def parse(text: str) -> list[Fault]:
    """Parse faults, separated by semicolons.

    Raises:
        ValueError: the text is malformed.

    Example:
        >>> parse("step=12,rank=2,kind=kill")
        [Fault(step=12, rank=2, kind='kill', seconds=0.0)]
    """
    return [_fault(part) for part in text.split(";") if part.strip()]


def _fault(text: str) -> Fault:
    try:
        named = [field.strip().split("=", 1) for field in text.split(",")]
        fields = dict(named)
        # In a dict, a repeated field would silently replace the first one.
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
    """Inject the faults that `UNISONO_FAULT` defines for this step of this rank.

    Sessions call this at every step with the arrays of their saver; your own loop needs one line.
    It costs less than a microsecond if the variable is not set.

    Args:
        step: step that begins.
        arrays: "corrupt" flips a bit in the first of them that is not empty.

    Raises:
        InjectedFault: a fault of kind "exception".
        ValueError: the variable is malformed, or there is no array to corrupt.
    """
    global _left
    if _left is None:
        # Read once per process: a job that resumes after a fault must not repeat it.
        _left = parse(os.environ.get(VARIABLE, ""))
    # At every step: it is unknown before `init`, and a later shrink must not change it.
    own = event_log.number_at_start()
    for fault in [fault for fault in _left if (fault.step, fault.rank) == (step, own)]:
        # Before it happens: it may raise, and the step may then be repeated.
        _left.remove(fault)
        event_log.write("fault", step=step, kind=fault.kind)
        _happen(fault, arrays)


_left: list[Fault] | None = None  # of all ranks; None before the first step


def _happen(fault: Fault, arrays: Iterable[Any]) -> None:
    # A killed process would lose its buffered output.
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
    """Flip the highest bit of the exponent of the first number."""
    for array in arrays:
        memory = of_any_library.host(array)
        if memory is not None and memory.size and memory.flags.writeable:
            # `flat` copies, and works for arrays of any layout, so the bits are written back below.
            bits = memory.flat[:1].view(np.uint8)
            # Little-endian: the last byte has the sign and the highest bits of the exponent.
            bits[-1] ^= 0x40
            memory.flat[:1] = bits.view(memory.dtype)
            return
    raise ValueError(f"{VARIABLE}: nothing to corrupt, expected an array in host memory")
