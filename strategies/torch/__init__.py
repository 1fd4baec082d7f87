"""Unisono under PyTorch: its optimizers, wrapped, and the names of their parameters."""
