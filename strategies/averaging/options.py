"""Options of `DistributedOptimizer`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import collectives as cc
from strategies.averaging.consistency import Compare, description, settings_of
from strategies.core.validation import choice, integer

__all__ = ["OPERATION", "Early", "AveragingOptions", "SyncEvery"]

OPERATION = "DistributedOptimizer"
"""Name of the operation in errors."""

Early = bool | Literal["auto"]
"""Whether gradients are reduced during the backward pass."""


SyncEvery = int | Callable[[int], int]
"""Number of local steps per synchronization, or a function of the steps already taken."""

# Options that steps by a rank's own gradients exclude.
_OWN_STEPS = {
    "op": "parameters are averaged, not gradients",
    "backward_passes_per_step": "each rank accumulates as many passes as it likes",
    "allow_partial_steps": "each rank accumulates as many passes as it likes",
    "gradient_predivide_factor": "parameters are averaged, not gradients",
    "average_aggregated_gradients": "each rank accumulates as many passes as it likes",
    "clip_global_norm": "each rank steps by its own gradients and clips them itself",
    "sparse_as_dense": "parameters are averaged, not gradients",
    "shard_state": "each rank needs the state of its own steps",
}

# Option -> the options that it excludes, each with the reason.
_EXCLUDED = {
    "sync_every": {
        **_OWN_STEPS,
        "overlap": "only every k-th step communicates",
        "delay": "the difference of a round is not a gradient",
    },
    "neighbours": {
        **_OWN_STEPS,
        "overlap": "parameters are averaged after the step",
        "delay": "parameters are averaged after the step",
        "sync_every": "neighbours average in every step",
        "compression": "neighbours send all bits of their parameters",
        "bucket_bytes": "all parameters of a dtype are sent at once",
        "compare_every": "the parameters of ranks differ after the first step",
    },
    "shard_state": {
        "compression": "a reduce-scatter sends all bits",
        "sparse_as_dense": "its gradients are dense",
        "bucket_bytes": "all gradients of a dtype are one bucket",
        "overlap": "gradients are reduced in the step",
        "delay": "the buckets hold parameters during the step",
    },
    "delay": {
        "sparse_as_dense": "the rows with a gradient differ from step to step",
        "overlap": "reductions overlap with the next step already",
    },
}


@dataclass(frozen=True)
class AveragingOptions:
    """How gradients are combined; see `strategies.DistributedOptimizer` for the fields."""

    op: Any = cc.MEAN
    compression: cc.Compression = cc.NONE
    backward_passes_per_step: int = 1
    allow_partial_steps: bool = False
    gradient_predivide_factor: float = 1.0
    average_aggregated_gradients: bool = False
    clip_global_norm: float | None = None
    sparse_as_dense: bool = False
    bucket_bytes: int | None = None
    overlap: Early = "auto"
    compare: Compare = "all"
    compare_every: int | None = None
    sync_every: SyncEvery | None = None
    outer: Any = None
    neighbours: Any = None
    shard_state: bool = False
    delay: int = 0

    def check(self) -> None:
        """Raise `TypeError` or `ValueError` for invalid options."""
        factor = self.gradient_predivide_factor
        if self.op not in (cc.MEAN, cc.SUM):
            _refuse(f"gradients are added, expected MEAN or SUM, got {self.op}")
        if not isinstance(self.compression, cc.Compression):
            kind = type(self.compression).__name__
            raise TypeError(
                f"{OPERATION}: expected NONE, FP16, BF16, INT8 or TOPK as compression, got {kind}"
            )
        choice(OPERATION, "compare", self.compare, Compare)
        if self.overlap not in (True, False, "auto"):
            _refuse(f"expected True, False or 'auto' as overlap, got {self.overlap!r}")
        integer(OPERATION, "backward_passes_per_step", self.backward_passes_per_step)
        if self.compare_every is not None:
            integer(OPERATION, "compare_every", self.compare_every)
        if not 0 < factor < math.inf:
            _refuse(f"expected gradient_predivide_factor > 0, got {factor}")
        if factor != 1 and self.op is not cc.MEAN:
            _refuse(f"gradient_predivide_factor is for MEAN, got {self.op.value}")
        if self.clip_global_norm is not None and not 0 < self.clip_global_norm < math.inf:
            _refuse(f"expected clip_global_norm > 0, got {self.clip_global_norm}")
        if self.sync_every is not None and not callable(self.sync_every):
            integer(OPERATION, "sync_every", self.sync_every)
        if self.outer is not None and self.sync_every is None:
            _refuse("outer updates by the mean of local steps, expected sync_every with it")
        if self.delay not in (0, 1):
            _refuse(f"expected 0 or 1 as delay, got {self.delay!r}")
        self._check_excluded()

    def _check_excluded(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for option, excluded in _EXCLUDED.items():
            if getattr(self, option) == defaults[option]:
                continue
            for name, reason in excluded.items():
                if getattr(self, name) not in (defaults[name], False):
                    _refuse(f"{option} excludes {name}: {reason}, got {getattr(self, name)}")

    def __str__(self) -> str:
        """Return the options as text, for comparison among ranks."""
        fields = {**self.__dict__, "op": self.op.value}
        # A function's text is its address, which differs between ranks.
        if callable(self.sync_every):
            fields["sync_every"] = "function"
        if self.outer is not None:
            given = settings_of(self.outer, schedules=False)
            fields["outer"] = {name: description(value) for name, value in given.items()}
        return ", ".join(f"{name}={value}" for name, value in fields.items())


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"{OPERATION}: {why}")
