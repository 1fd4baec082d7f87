"""PyTorch support: wrapped optimizers, a torch.distributed backend, and samplers.

Importing this module registers the backend "unisono" with torch.distributed. If the package is
installed, importing PyTorch registers it as well.
"""

import torch  # noqa: F401  (before the backend is registered)

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
