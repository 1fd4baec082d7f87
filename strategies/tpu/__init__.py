"""One program for all devices of JAX in a process: `TPUStrategy`."""

from __future__ import annotations

from strategies.tpu.strategy import TPUStrategy

__all__ = ["TPUStrategy"]
