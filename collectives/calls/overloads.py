"""Type overloads: an operation returns the kind of array that you pass.

| passed | returned |
| --- | --- |
| array of NumPy, JAX, CuPy and so on | the same kind and dtype |
| tensor or parameter of PyTorch | a tensor without a gradient |
| number, nested sequence of numbers | a NumPy array |
| anything, with `out=` | the `out=` array |

Every operation has one overload for each row that applies. All overloads of an operation share
the option types in this module. Decorators derive the types of asynchronous variants and of the
package's functions. The module imports no array library, so type checks work without them.
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
    Unpack = Any  # the value is unused: only type checkers evaluate annotations

__all__ = [
    "A",
    "CompressionOptions",
    "Tensor",
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

# Number of rows for every rank.
Splits = Sequence[int] | npt.NDArray[Any]


class Tensor(Protocol[A_co]):
    """Protocol of a PyTorch tensor or parameter, for type checkers."""

    def detach(self) -> A_co:
        """Return a tensor without a gradient."""


class CommonOptions(TypedDict, total=False):
    """Options of every operation."""

    algorithm: str
    timeout: float | None


class ScatterOptions(CommonOptions, total=False):
    """Options of an operation that distributes rows."""

    counts: Splits | None


class ReduceOptions(CommonOptions, total=False):
    """Options of a reduction."""

    op: Op
    prescale: float
    postscale: float


class ReduceScatterOptions(ReduceOptions, total=False):
    """Options of a reduction that distributes rows."""

    counts: Splits | None


class CompressionOptions(ReduceOptions, total=False):
    """Options of a reduction with lossy compression."""

    compression: Compression | None
    name: str | None
