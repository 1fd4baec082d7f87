"""Unisono under PyTorch: its optimizers, wrapped, and a backend of torch.distributed.

Importing this makes "unisono" a backend of torch.distributed; where the project is installed,
importing PyTorch does so, too.
"""

from __future__ import annotations

import torch  # noqa: F401  (before it is told of the backend)

import unisono_torch
from strategies.torch.ddp import DdpOptions, ddp_hook, recover

unisono_torch.register()

__all__ = ["DdpOptions", "ddp_hook", "recover"]
