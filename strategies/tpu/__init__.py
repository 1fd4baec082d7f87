"""`TPUStrategy`: one program for all JAX devices of a process."""

from __future__ import annotations

from strategies.tpu.strategy import TPUStrategy

__all__ = ["TPUStrategy"]
