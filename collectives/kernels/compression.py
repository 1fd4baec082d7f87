"""Compression of floats to 16 or 8 bits or their largest, with error feedback.

Compression permits rounding: float32 and float64 arrays are sent as float16 (`FP16`), bfloat16
    (`BF16`), or blocks of 64 8-bit numbers with a scale (`INT8`); other dtypes are sent unchanged.
    The receiver sums in float32, so a number is rounded twice for any number of ranks: as a
    contribution and as a result. A single rank also rounds, so that its program behaves as with
    several.

| | largest | error of a rounding | below the normal numbers |
| --- | --- | --- | --- |
| `FP16` | 65504 | 2^-11, relative | under 2^-14: 2^-25, absolute |
| `BF16` | 3.4e38, as float32 | 2^-8, relative | under 2^-126: 2^-134, absolute |
| `INT8` | 3.4e38 | 0.4 % of the largest number of the block | as above |

Infinities and NaNs survive. A finite number too large for float16 becomes an infinity and is never
clamped, because a loss scaler must detect the overflow. MEAN divides before it rounds, so it
overflows only if the mean does, or is within a rounding of the largest number.

On the "network", only messages between nodes are rounded. Ranks of one node add their arrays
without rounding; one rounding makes the node's sum its contribution, and another one the result. On
a single node nothing is rounded. An all-reduce that rounds everywhere does the same between nodes
of several ranks unless you name another algorithm: in shared memory fewer bits would save nothing.

With feedback, the error of every rounding is kept and added to the next array of the same name, so
that errors do not accumulate over the steps.

`TOPK(fraction)` sends only the largest elements of each contribution, as float32 with an index, and
counts the others as zeros, which feedback adds to the next array. It adds: SUM and MEAN of float32
and float64.

Source: H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu, "DoubleSqueeze: parallel stochastic gradient
descent with double-pass error-compensated compression", ICML 2019, algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MEAN, RULES, SUM, Op
from collectives.kernels import half_loops, int8, top_k

__all__ = [
    "BF16", "FP16", "INT8", "NONE", "TOPK", "Codec", "Compression", "Residuals", "Where", "resolve",
    "kernels_for", "elements_per_item",
]  # fmt: skip

Where = Literal["everywhere", "network"]

_COMPRESSIBLE = (np.dtype(np.float32), np.dtype(np.float64))


class Residuals:
    """Rounding errors of one rank, by name.

    A name has two residuals: of the rank's contributions, and of the results that the rank rounds
    for all ranks. They belong to one communicator and one loss scale.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str], Any] = {}
        self._claims: dict[str, tuple[int, np.dtype[Any]]] = {}

    def array(
        self, name: str, part: str, count: int, dtype: np.dtype[Any],
        make: Callable[[int, np.dtype[Any]], Any] = np.zeros,
    ) -> Any:  # fmt: skip
        """Return a residual, which callers change in place: shape (count,), zeros at first.

        `make` allocates memory outside the host, under a `part` of its own.

        Raises:
            ValueError: the name belongs to an array of another length or dtype.
        """
        known = self._arrays.get((name, part))
        if known is None:
            known = self._arrays[name, part] = make(count, dtype)
        if known.size != count or known.dtype != dtype:
            raise ValueError(
                f"feedback: the residual belongs to another array, expected {known.size} elements "
                f"of {known.dtype}, got {count} of {dtype} (name: {name}, part: {part})"
            )
        return known

    def acquire(self, name: str, count: int, dtype: np.dtype[Any]) -> None:
        """Bind a name to arrays of `count` elements of a dtype.

        Raises:
            ValueError: the name is bound to another array. Raised on all ranks, because it concerns
                the whole array, and ranks may hold different parts.
        """
        # Bound at the first call, before any residual exists.
        known = self._claims.setdefault(name, (count, dtype))
        if known != (count, dtype):
            raise ValueError(
                f"feedback: the name belongs to another array, expected {known[0]} elements of "
                f"{known[1]}, got {count} of {dtype} (name: {name})"
            )

    def saved(self, name: str) -> dict[str, Any]:
        """Return copies of the residuals of a name, by part."""
        # Copies, because residuals are changed in place.
        return {part: x.copy() for (owner, part), x in self._arrays.items() if owner == name}

    def restore(self, name: str, kept: dict[str, Any]) -> None:
        """Replace the residuals of a name by a result of `saved`."""
        # Parts that were not saved are dropped, as they did not exist then.
        others = {key: array for key, array in self._arrays.items() if key[0] != name}
        self._arrays = others | {(name, part): array for part, array in kept.items()}

    def forget(self, name: str) -> None:
        """Remove the residuals of a name, which may then be bound to another array."""
        self._arrays = {key: array for key, array in self._arrays.items() if key[0] != name}
        self._claims.pop(name, None)

    def clear(self) -> None:
        """Remove all residuals, as after a change of the loss scale or of the group of ranks."""
        self._arrays.clear()
        self._claims.clear()


def elements_per_item(dtype: np.dtype[Any]) -> int:
    """Return the number of floats per element of a packed dtype."""
    return int8.NUMBERS if dtype == int8.BLOCK else 1


def kernels_for(dtype: np.dtype[Any]) -> Any:
    """Return the module with `narrow`, `widen` and `reduce` for a packed dtype."""
    return int8 if dtype == int8.BLOCK else half_loops


@dataclass(frozen=True)
class Codec:
    """Packing of the array of one call, as a `Compression` has decided it.

    Attributes:
        dtype: packed dtype: float16, bfloat16, blocks of 8 bits or entries of top-k.
        name: name of the array, for its residuals.
        residuals: kept rounding errors; None without feedback.
        fraction: fraction of the elements that are sent; None for all.
    """

    dtype: np.dtype[Any]
    name: str = ""
    residuals: Residuals | None = None
    fraction: float | None = None

    def acquire(self, count: int, dtype: np.dtype[Any]) -> None:
        """Reject an array other than the named one, or with more elements than top-k can index.

        Raises:
            ValueError: see `Residuals.acquire`, or the array is too long; on all ranks.
        """
        if self.fraction is not None and count > top_k.MOST:
            raise ValueError(
                f"compression: top-k has 32-bit indices, expected at most {top_k.MOST} elements, "
                f"got {count}; split the array, or use FP16, BF16 or INT8"
            )
        if self.residuals is not None:
            self.residuals.acquire(self.name, count, dtype)

    def pack(self, source: Array, divisor: int = 1) -> Array:
        """Return a rank's contribution, rounded; arguments as `packing`."""
        packed, pack = self.packing(source, divisor)
        pack(0, packed.size)
        return packed

    def packing(self, source: Array, divisor: int = 1) -> tuple[Array, Callable[[int, int], None]]:
        """Prepare to round a rank's contribution, part by part.

        Args:
            source: shape (n,), float32 or float64, contiguous; not changed.
            divisor: divides the source before the rounding.

        Returns:
            a new array of the codec's dtype, shape (n,), or one element per block of 8 bits; and a
            function (start, stop) that fills a range of its elements. Call it once per element.
        """
        each, narrow = elements_per_item(self.dtype), kernels_for(self.dtype).narrow
        # Rounded up: the last block may be partly filled.
        packed = np.empty(-(-source.size // each), self.dtype)
        residual = self.contribution_residual(source.size, source.dtype)

        def pack(start: int, stop: int) -> None:
            # The last part may end inside a block.
            part = slice(each * start, min(each * stop, source.size))
            left = None if residual is None else residual[part]
            narrow(source[part], packed[start:stop], divisor=divisor, residual=left)

        return packed, pack

    def unpack(self, packed: Array, out: Array) -> None:
        """Fill `out`, shape (n,), float32 or float64, with a packed array."""
        kernels_for(self.dtype).widen(packed, out)

    def contribution_residual(self, count: int, dtype: np.dtype[Any]) -> Array | None:
        """Return the residual of this rank's contributions of `count` elements."""
        return self._residual("contribution", count, dtype)

    def result_residual(self, count: int, rank: int, size: int) -> Array | None:
        """Return the residual of `count` sums, which this rank rounds for all ranks."""
        # The group is a part of the name: ranks would not all fail alike if its size were checked.
        part, count = f"results of rank {rank} of {size}", count * elements_per_item(self.dtype)
        return self._residual(part, count, np.dtype(np.float32))

    def _residual(self, part: str, count: int, dtype: np.dtype[Any]) -> Array | None:
        if self.residuals is None:
            return None
        residual: Array = self.residuals.array(self.name, part, count, dtype)
        return residual


@dataclass(frozen=True)
class Compression:
    """How floats are sent: `NONE`, `FP16`, `BF16`, `INT8`, `TOPK(...)`, or their methods' result.

    Attributes:
        dtype: packed dtype of float32 and float64 arrays; None to send them unchanged.
        where: "everywhere", or "network" to round only messages between nodes.
        residuals: kept rounding errors; None without feedback.
        fraction: fraction of the elements that are sent; None for all.

    Example:
        >>> FP16.on("network")
        FP16.on('network')
        >>> str(FP16.on("network"))
        'float16 on network'
    """

    dtype: np.dtype[Any] | None
    where: Where = "everywhere"
    residuals: Residuals | None = None
    fraction: float | None = None

    def __repr__(self) -> str:
        """Return the expression that creates this compression."""
        where = "" if self.where == "everywhere" else f".on({self.where!r})"
        feedback = "" if self.residuals is None else ".with_feedback()"
        fraction = "" if self.fraction is None else f"({self.fraction})"
        return f"{_spelling(self.dtype)[0]}{fraction}{where}{feedback}"

    def __str__(self) -> str:
        """Return the words that ranks compare."""
        where = "" if self.where == "everywhere" else f" on {self.where}"
        feedback = "" if self.residuals is None else " with feedback"
        fraction = "" if self.fraction is None else f" {self.fraction}"
        return f"{_spelling(self.dtype)[1]}{fraction}{where}{feedback}"

    def on(self, where: Where) -> Compression:
        """Return this compression for "everywhere", or only for the "network" between nodes.

        Raises:
            ValueError: the place is unknown.
        """
        if where not in get_args(Where):
            raise ValueError(
                f"compression: no such place, expected one of {' '.join(get_args(Where))}, "
                f"got {where!r}"
            )
        return dataclasses.replace(self, where=where)

    def with_feedback(self) -> Compression:
        """Return this compression with new residuals, all zero.

        Keep the result for the whole training, and name every array: a call adds the errors of
        earlier calls with the same name. The error of top-k is all that was not sent. Every rank
        keeps an array of the size of the named one, and, except for top-k, a P-th of that in
        float32 for the results.

        Raises:
            ValueError: this is `NONE`, which rounds nothing.
        """
        if self.dtype is None:
            raise ValueError("compression: NONE rounds nothing, so it has no feedback")
        return dataclasses.replace(self, residuals=Residuals())

    def codec(
        self, dtype: np.dtype[Any], op: Op, *, network: bool, name: str | None = None
    ) -> Codec | None:
        """Decide how the array of one call is sent.

        Args:
            dtype: dtype of the array.
            op: the reduction.
            network: whether the array is sent between nodes.
            name: name of the array; required with feedback.

        Returns:
            the codec, or None to send the array unchanged.

        Raises:
            ValueError: an operation of the user; feedback without a name; feedback or top-k with an
                op that does not add; top-k of another dtype. Also raised if the array is sent
                unchanged, so that a test on one node finds the mistake.
        """
        if self.dtype is not None and RULES[op].own is not None:
            raise ValueError(
                f"compression: {op.value} is an operation of the program, expected NONE, got {self}"
            )
        # Sums and means add errors; a maximum of errors has no meaning.
        if self.residuals is not None and op not in (SUM, MEAN):
            raise ValueError(
                f"compression: feedback adds up errors, expected SUM or MEAN, got {op.value}"
            )
        if self.residuals is not None and name is None:
            raise ValueError(
                "compression: feedback keeps a residual for each name, expected name=, got None"
            )
        # "network" compresses only where messages leave the node.
        here = self.where == "everywhere" or network
        if self.fraction is not None and (op not in (SUM, MEAN) or dtype not in _COMPRESSIBLE):
            raise ValueError(
                f"compression: top-k adds floats, expected SUM or MEAN of float32 or float64, "
                f"got {op.value} of {dtype}; use NONE, or FP16, BF16 or INT8, which send other "
                "dtypes unchanged"
            )
        if self.dtype is None or dtype not in _COMPRESSIBLE or not here:
            return None
        return Codec(self.dtype, name or "", self.residuals, self.fraction)


NONE = Compression(None)
FP16 = Compression(np.dtype(np.float16))
BF16 = Compression(np.dtype(ml_dtypes.bfloat16))
INT8 = Compression(int8.BLOCK)
_NAMES = {
    NONE.dtype: ("NONE", "none"),
    FP16.dtype: ("FP16", "float16"),
    BF16.dtype: ("BF16", "bfloat16"),
    INT8.dtype: ("INT8", "int8"),
    top_k.ENTRY: ("TOPK", "top-k"),
}


def TOPK(fraction: float) -> Compression:  # noqa: N802  # named as the other compressions
    """Return a compression that sends only the largest elements of each array.

    Use it with feedback, which sends the other elements in later calls. Ranks get the same bits.

    Args:
        fraction: fraction of the elements, rounded up, > 0 and <= 1.

    Raises:
        ValueError: the fraction is out of range.

    Cost: 8 (P - 1) bytes per rank for each element that is sent.

    Example:
        >>> TOPK(0.01).with_feedback()
        TOPK(0.01).with_feedback()
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"compression: expected a fraction > 0 and <= 1, got {fraction}")
    return Compression(top_k.ENTRY, fraction=float(fraction))


def _spelling(dtype: np.dtype[Any] | None) -> tuple[str, str]:
    """Return the name of a compression in a program, and the word that ranks compare."""
    return _NAMES.get(dtype, (f"Compression({dtype!r})", str(dtype)))


def resolve(given: Compression | None, operation: str) -> Compression:
    """Return the compression of an argument, `NONE` for None.

    Raises:
        TypeError: the argument is not a compression.
    """
    if given is None:
        return NONE
    if not isinstance(given, Compression):
        raise TypeError(
            f"{operation}: not a compression, expected NONE, FP16, BF16, INT8, TOPK(...) or "
            f"what their methods return, got {given!r}"
        )
    return given
