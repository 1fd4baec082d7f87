"""`hvd.Compression`."""

from __future__ import annotations

from typing import Any

import collectives as cc
from strategies.core import array_ops

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Value of `compression=`: an object with `compress` and `decompress`.

    Args:
        dtype: dtype of floating-point arrays in messages; None keeps theirs.
        codec: compression of buckets in `DistributedOptimizer`.
    """

    def __init__(self, dtype: str | None, codec: cc.Compression) -> None:
        self._dtype = dtype
        self.codec = codec

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the array to send, and the context for `decompress`; integers are unchanged."""
        own = array_ops.dtype_name(tensor)
        # Integers and complex numbers would lose their values in 16 bits.
        if self._dtype is None or own not in array_ops.COMPUTE:
            return tensor, None
        return array_ops.astype(tensor, self._dtype), own

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Return the result in the original dtype."""
        # Without a context the array was sent unchanged.
        return tensor if context is None else array_ops.astype(tensor, context)


class Compression:
    """The available compressions."""

    none = Compressor(None, cc.NONE)
    fp16 = Compressor("float16", cc.FP16)
    bf16 = Compressor("bfloat16", cc.BF16)
