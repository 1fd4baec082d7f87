"""Options of `DistributedOptimizer`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import collectives as cc
from strategies.averaging.consistency import Compare
from strategies.core.validation import choice, integer

__all__ = ["OPERATION", "Early", "AveragingOptions"]

OPERATION = "DistributedOptimizer"
"""Name of the operation in errors."""

Early = bool | Literal["auto"]
"""Whether gradients are reduced during the backward pass."""


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

    def check(self) -> None:
        """Raise `TypeError` or `ValueError` for invalid options."""
        factor = self.gradient_predivide_factor
        if self.op not in (cc.MEAN, cc.SUM):
            _refuse(f"gradients are added, expected MEAN or SUM, got {self.op}")
        if not isinstance(self.compression, cc.Compression):
            kind = type(self.compression).__name__
            raise TypeError(
                f"{OPERATION}: expected NONE, FP16, BF16 or INT8 as compression, got {kind}"
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

    def __str__(self) -> str:
        """Return the options as text, for comparison among ranks."""
        fields = {**self.__dict__, "op": self.op.value}
        return ", ".join(f"{name}={value}" for name, value in fields.items())


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"{OPERATION}: {why}")
