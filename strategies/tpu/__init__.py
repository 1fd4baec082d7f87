"""`TPUStrategy`: one program for all JAX devices of a process."""

from strategies.tpu.strategy import TPUStrategy

__all__ = ["TPUStrategy"]
