"""Optimizers for arrays of any library, in place.

A variable is an array of NumPy, CuPy or PyTorch, or an object with a `name` and a `value` that is
one. In host memory each array is read and written once per step, by a compiled loop; on a device,
array operations do the same.

16-bit variables (float16, bfloat16) are computed in float32: variable and gradient are widened,
the new value is rounded once, and slots are float32. A step smaller than half the distance to the
next 16-bit number therefore changes nothing; where that matters, keep float32 variables.

The result for an element depends on the numbers that belong to it, and for `LARS` on the norms of
its variable: on all ranks, wherever an array lies, the same numbers give the same bits.
"""

from __future__ import annotations

from strategies.optimizers import schedules
from strategies.optimizers.adaptive import Adagrad, Adam, AdamW, RMSProp
from strategies.optimizers.base import LearningRate, Optimizer
from strategies.optimizers.clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from strategies.optimizers.optax_adapter import Optax
from strategies.optimizers.sgd import LARS, SGD, Momentum

__all__ = [
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "LearningRate",
    "Momentum",
    "Optax",
    "Optimizer",
    "RMSProp",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "schedules",
]
