"""Unisono under PyTorch: its optimizers, wrapped, and a backend of torch.distributed.

Importing this makes "unisono" a backend of torch.distributed; where the project is installed,
importing PyTorch does so, too.
"""

import torch  # noqa: F401  (before it is told of the backend)

import unisono_torch

unisono_torch.register()
