"""`hvd.Compression`."""

from __future__ import annotations

from typing import Any

import collectives as cc
from strategies.core import array_ops

__all__ = ["Compression", "Compressor"]


class Compressor:
    """What `compression=` takes: an object with `compress` and `decompress`.

    Args:
        dtype: in which floating-point arrays travel; None: as they are.
        codec: how `DistributedOptimizer` compresses buckets.
    """

    def __init__(self, dtype: str | None, codec: cc.Compression) -> None:
        self._dtype = dtype
        self.codec = codec

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return what travels, and what `decompress` needs; integers as they are."""
        own = array_ops.dtype_name(tensor)
        if self._dtype is None or own not in array_ops.COMPUTE:
            return tensor, None
        return array_ops.astype(tensor, self._dtype), own

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Return the result in the dtype that was given."""
        return tensor if context is None else array_ops.astype(tensor, context)


class Compression:
    """The compressions that there are."""

    none = Compressor(None, cc.NONE)
    fp16 = Compressor("float16", cc.FP16)
    bf16 = Compressor("bfloat16", cc.BF16)
