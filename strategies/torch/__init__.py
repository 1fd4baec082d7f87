"""Unisono under PyTorch: its optimizers, wrapped, a backend of torch.distributed, and what else a
training loop needs.

Importing this makes "unisono" a backend of torch.distributed; where the project is installed,
importing PyTorch does so, too.
"""

from __future__ import annotations

import torch  # noqa: F401  (before it is told of the backend)

import unisono_torch
from strategies.averaging.metrics import metric_average
from strategies.core.malloc import keep_memory
from strategies.torch.ddp import DdpOptions, ddp_hook, recover
from strategies.torch.sampler import ShardedSampler
from strategies.torch.sync_batch_norm import SyncBatchNorm

unisono_torch.register()

__all__ = [
    "DdpOptions",
    "ShardedSampler",
    "SyncBatchNorm",
    "ddp_hook",
    "keep_memory",
    "metric_average",
    "recover",
]
