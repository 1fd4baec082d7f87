"""8-bit weights for serving: a trained model in about a quarter of its memory.

A weight becomes an integer from -127 to 127 times the scale of its row. PyTorch stores a row of
weights per output unit, so a unit with small weights keeps its precision.

Example:
    >>> import numpy as np
    >>> from strategies.quantization import dequantize, quantize
    >>> weights = {"w": np.float32([[1, -2, 0.5], [0.1, 0.2, 0.3]]), "b": np.zeros(2)}
    >>> small = quantize(weights)
    >>> small["w"].codes
    array([[  64, -127,   32],
           [  42,   85,  127]], dtype=int8)
    >>> dequantize(small)["w"].round(2)
    array([[ 1.01, -2.  ,  0.5 ],
           [ 0.1 ,  0.2 ,  0.3 ]], dtype=float32)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import array_api_compat

from strategies.core import array_ops, pytree

__all__ = ["QuantizedArray", "dequantize", "quantize"]

MOST = 127  # largest code, so that codes are symmetric about 0

# The smallest normal float32, because a quotient by a subnormal scale might exceed the codes; and
# the largest whose product with a code is finite.
SCALES = 2.0**-126, 2.679388e36


class QuantizedArray(NamedTuple):
    """An array in 8 bits, as arrays of its library on its device.

    A product needs no float copy of the weights: `codes @ x * scales` equals `dequantize(w) @ x`,
    except for rounding, if the product converts each code in a register.

    Attributes:
        codes: int8, shape of the array, from -127 to 127.
        scales: float32, shape (rows,): the value of code 1 in each row.
    """

    codes: Any
    scales: Any


def quantize(weights: Any) -> Any:
    """Return weights with arrays of two and more axes in 8 bits.

    Args:
        weights: an array, or dicts, lists and tuples of arrays, such as a `state_dict()`; NumPy,
            PyTorch, JAX or CuPy. First axis: rows.

    Returns:
        the same structure with a `QuantizedArray` for each floating-point array of two and more
        axes; other leaves, such as biases, are unchanged.

    Raises:
        ValueError: a number is not finite in float32.

    Error: at most 0.502 scales per number. A scale is the largest magnitude of the row divided by
        127, so this is 0.4 % of the largest. Scales below 1.2e-38, the smallest normal float32, are
        rounded up to it.
    """
    return pytree.map_leaves(_quantize, weights)


def dequantize(weights: Any) -> Any:
    """Return a structure from `quantize` with float32 arrays for its quantized ones."""
    return pytree.map_leaves(_dequantize, weights, lambda node: isinstance(node, QuantizedArray))


def _quantize(leaf: Any) -> Any:
    if not array_ops.is_array(leaf) or leaf.ndim < 2 or 0 in leaf.shape:
        return leaf
    if array_ops.dtype_name(leaf) not in array_ops.COMPUTE:
        return leaf
    # Parameters of PyTorch would otherwise make the scales a part of their graph.
    wide = array_ops.astype(leaf.detach() if hasattr(leaf, "detach") else leaf, "float32")
    xp = array_api_compat.array_namespace(wide)
    rows = xp.reshape(wide, (wide.shape[0], -1))
    largest = xp.max(xp.abs(rows), axis=1)
    if not bool(xp.all(xp.isfinite(largest))):
        raise ValueError("quantize: expected numbers that are finite in float32, got inf or nan")
    scales = xp.clip(largest / MOST, *SCALES)
    codes = xp.round(rows / scales[:, None])
    return QuantizedArray(array_ops.astype(xp.reshape(codes, wide.shape), "int8"), scales)


def _dequantize(leaf: Any) -> Any:
    if not isinstance(leaf, QuantizedArray):
        return leaf
    codes = array_ops.astype(leaf.codes, "float32")
    return codes * leaf.scales.reshape((-1,) + (1,) * (codes.ndim - 1))
