"""Type overloads: an operation returns the kind of array it was given.

| given | returned |
| --- | --- |
| array of NumPy, JAX, CuPy and so on | the same kind, the dtype included |
| tensor or parameter of PyTorch | a tensor, without a gradient |
| number, nested sequence of numbers | a NumPy array |
| anything, with `out=` | what was given as `out=` |

Every operation has an overload for each line that it can meet. Their options are the same in all of
them, and stand here; asynchronous twins and functions of the package follow by their decorators.
No library of arrays is imported for this: who has none of them can check types, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from collectives.arrays.reduction import Op
from collectives.kernels.compression import Compression

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    Unpack = Any  # only type checkers look at annotations

__all__ = [
    "A",
    "CompressionOptions",
    "Detachable",
    "Numbers",
    "ReduceOptions",
    "ReduceScatterOptions",
    "Splits",
    "ScatterOptions",
    "Unpack",
    "CommonOptions",
]

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

# For type checkers a float counts as a complex number, and so does an int.
Numbers = complex | np.generic | Sequence[Any]

# The rows for every rank.
Splits = Sequence[int] | npt.NDArray[Any]


class Detachable(Protocol[A_co]):
    """A tensor or parameter of PyTorch, as far as its type goes."""

    def detach(self) -> A_co:
        """Return a tensor without a gradient."""


class CommonOptions(TypedDict, total=False):
    """Options of every operation."""

    algorithm: str
    timeout: float | None


class ScatterOptions(CommonOptions, total=False):
    """Options of an operation that shares rows."""

    counts: Splits | None


class ReduceOptions(CommonOptions, total=False):
    """Options of a reduction."""

    op: Op
    prescale: float
    postscale: float


class ReduceScatterOptions(ReduceOptions, total=False):
    """Options of a reduction that shares rows."""

    counts: Splits | None


class CompressionOptions(ReduceOptions, total=False):
    """Options of a reduction that may round."""

    compression: Compression | None
    name: str | None
