"""Optimizers for arrays of any library, in place.

A variable is an array of NumPy, CuPy or PyTorch, or an object with a `name` and such an array as
`value`. In host memory a compiled loop reads and writes each array once per step. On a device,
array operations do the same.

16-bit variables (float16, bfloat16) are computed in float32: variable and gradient are widened,
the new value is rounded once, and slots are float32. A step smaller than half the distance to the
next 16-bit number therefore changes nothing. If that matters, keep float32 variables.

The result for an element depends only on its own numbers, and for `LARS` also on the norms of its
variable. So the same numbers give the same bits on all ranks, whatever the memory layout.
"""

from __future__ import annotations

from strategies.optimizers import schedules
from strategies.optimizers.adaptive import Adagrad, Adam, AdamW, RMSProp
from strategies.optimizers.base import LearningRate, Optimizer
from strategies.optimizers.clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from strategies.optimizers.optax_adapter import Optax
from strategies.optimizers.sgd import LARS, SGD, Momentum, Nesterov

__all__ = [
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "LearningRate",
    "Momentum",
    "Nesterov",
    "Optax",
    "Optimizer",
    "RMSProp",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "schedules",
]
