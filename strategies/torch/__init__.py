"""Unisono under PyTorch: its optimizers, wrapped, and what else a training loop needs of it.

`SyncBatchNorm`, `ShardedSampler` and `metric_average` are here; PyTorch is imported with the first.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ShardedSampler": "strategies.torch.sampler",
    "SyncBatchNorm": "strategies.torch.sync_batch_norm",
    "metric_average": "strategies.averaging.metrics",
}

__all__ = ["ShardedSampler", "SyncBatchNorm", "metric_average"]  # noqa: F822  # below


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
