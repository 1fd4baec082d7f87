"""Wrapped optimizers whose steps run on another task."""
