"""How two numbers become one in compiled loops: what `arrays.reduction.RULES` names.

Importing this module loads numba, so import it inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.kernels.float16 import jitable

__all__ = [
    "BITWISE",
    "FUNCTIONS",
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "maximum",
    "minimum",
    "multiply",
]


@jitable
def add(a: Any, b: Any) -> Any:
    """Return the sum."""
    return a + b


@jitable
def multiply(a: Any, b: Any) -> Any:
    """Return the product."""
    return a * b


@jitable
def minimum(a: Any, b: Any) -> Any:
    """Return the smaller one; a NaN on either side wins, as in numpy.minimum."""
    return a if a < b or a != a else b


@jitable
def maximum(a: Any, b: Any) -> Any:
    """Return the larger one; a NaN on either side wins."""
    return a if a > b or a != a else b


@jitable
def bitwise_and(a: Any, b: Any) -> Any:
    """Return the bits that both have."""
    return a & b


@jitable
def bitwise_or(a: Any, b: Any) -> Any:
    """Return the bits that one of them has."""
    return a | b


@jitable
def bitwise_xor(a: Any, b: Any) -> Any:
    """Return the bits that exactly one of them has."""
    return a ^ b


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": add,
    "multiply": multiply,
    "minimum": minimum,
    "maximum": maximum,
}
BITWISE: dict[str, Callable[..., Any]] = {
    "bitwise_and": bitwise_and,
    "bitwise_or": bitwise_or,
    "bitwise_xor": bitwise_xor,
}
