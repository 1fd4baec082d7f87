"""Specification of one parameter, compared among ranks and used by buckets."""

from __future__ import annotations

from typing import Any, NamedTuple

from strategies.averaging import consistency
from strategies.averaging.consistency import Fingerprint
from strategies.core import array_ops

__all__ = ["ParameterKey", "ParameterSpec"]

ParameterKey = tuple[str, tuple[int, ...], str, tuple[int, ...] | None]


class ParameterSpec(NamedTuple):
    """A parameter.

    Attributes:
        name: name for errors.
        shape: shape of the parameter.
        dtype: name of its dtype.
        strides: strides in elements if it is a PyTorch tensor that is not contiguous, else None;
            its gradient has the same strides.
        like: an array of its kind.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None
    like: Any

    @classmethod
    def of(cls, name: str, array: Any) -> ParameterSpec:
        """Return the specification of a parameter."""
        strides = None
        # A channels-last gradient is not contiguous. Buckets hold it in memory order, so ranks with
        # other strides would add different elements.
        if hasattr(array, "is_contiguous") and not array.is_contiguous():
            strides = tuple(array.stride())
        return cls(name, tuple(array.shape), array_ops.dtype_name(array), strides, array)

    @property
    def key(self) -> ParameterKey:
        """Name, shape, dtype and strides, which must be equal on all ranks."""
        return self[:4]

    def __str__(self) -> str:
        strides = "" if self.strides is None else f" with strides {self.strides}"
        return f"{self.name}: {self.dtype} of shape {self.shape}{strides}"

    def fingerprint(self, compared: bool) -> Fingerprint:
        """Describe the parameter; include its values if `compared`."""
        return Fingerprint(
            "parameter", str(self), consistency.checksum(self.like) if compared else ""
        )
