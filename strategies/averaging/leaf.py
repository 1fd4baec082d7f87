"""One parameter, as ranks compare it and as buckets have a place for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from strategies import arrays
from strategies.averaging import alike
from strategies.averaging.alike import Fact

__all__ = ["Leaf"]


class Leaf(NamedTuple):
    """One parameter: its name for people, its shape and dtype, and an array of its kind."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    like: Any

    @classmethod
    def of(cls, name: str, array: Any) -> Leaf:
        """Return the leaf of a parameter that is this array."""
        return cls(name, tuple(array.shape), arrays.dtype_name(array), array)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} of shape {self.shape}"

    def fact(self, compared: bool) -> Fact:
        """Say what it is, and what it holds if that is compared, too."""
        return Fact("parameter", str(self), alike.checksum(self.like) if compared else "")
