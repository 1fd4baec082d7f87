"""Compression of floats to 16 or 8 bits on the wire, with error feedback.

Compression is a permission to round, not a demand: float32 and float64 arrays travel as float16
(`FP16`), bfloat16 (`BF16`) or in blocks of 64 numbers of 8 bits with a scale (`INT8`), all others
as they are. What arrives is summed in float32, so that a number is rounded twice, whatever the
number of ranks: as a contribution and as a result. A rank that is alone rounds, too, so that its
program behaves as it will with others.

| | largest | error of a rounding | below the normal numbers |
| --- | --- | --- | --- |
| `FP16` | 65504 | 2^-11, relative | under 2^-14: 2^-25, absolute |
| `BF16` | 3.4e38, as float32 | 2^-8, relative | under 2^-126: 2^-134, absolute |
| `INT8` | 3.4e38 | 0.4 % of the largest number of the block | as above |

Infinities and NaNs survive. A finite number that is too large for float16 becomes an infinity; it
is never cut to the largest number, since a loss scaler has to see that the step is lost. MEAN
divides before it rounds, so that it overflows only where the mean does, or comes within a rounding
of the largest number.

On the "network", only what goes between nodes is rounded. Ranks of one node add up their arrays as
they are, one rounding turns the node's sum into its contribution, and another one the result; where
there is one node, nothing is rounded. An all-reduce that is asked to round everywhere does the same
between nodes of several ranks unless another algorithm is named: where ranks share memory, fewer
bits would save nothing.

With feedback, the error of every rounding is kept and added to the next array of the same name, so
that errors do not add up over the steps.

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
from collectives.arrays.reduction import MEAN, SUM, Op
from collectives.kernels import int8

__all__ = [
    "BF16", "FP16", "INT8", "NONE", "Codec", "Compression", "Residuals", "Where", "resolve",
    "kernels_for", "elements_per_item",
]  # fmt: skip

Where = Literal["everywhere", "network"]

_COMPRESSIBLE = (np.dtype(np.float32), np.dtype(np.float64))


class Residuals:
    """What the roundings of one rank have left over, by name.

    A name has two: that of the rank's contributions and that of the results which it rounds for
    all. They belong to one communicator and to one scale of the numbers.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str], Any] = {}
        self._claims: dict[str, tuple[int, np.dtype[Any]]] = {}

    def array(
        self, name: str, part: str, count: int, dtype: np.dtype[Any],
        make: Callable[[int, np.dtype[Any]], Any] = np.zeros,
    ) -> Any:  # fmt: skip
        """Return the residual that is changed in place: shape (count,), zeros at first.

        Memory that is not the host's is made by `make`, under a `part` of its own.

        Raises:
            ValueError: the name stands for an array of another length or dtype.
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
        """Let a name stand for arrays of `count` elements of a dtype from now on.

        Raises:
            ValueError: it stands for others already; on all ranks, since this concerns the whole
                array, of which ranks may hold different parts.
        """
        known = self._claims.setdefault(name, (count, dtype))
        if known != (count, dtype):
            raise ValueError(
                f"feedback: the name stands for another array, expected {known[0]} elements of "
                f"{known[1]}, got {count} of {dtype} (name: {name})"
            )

    def saved(self, name: str) -> dict[str, Any]:
        """Return copies of what belongs to a name, by part."""
        return {part: x.copy() for (owner, part), x in self._arrays.items() if owner == name}

    def restore(self, name: str, kept: dict[str, Any]) -> None:
        """Let a name have again what was `saved`, and nothing else."""
        others = {key: array for key, array in self._arrays.items() if key[0] != name}
        self._arrays = others | {(name, part): array for part, array in kept.items()}

    def forget(self, name: str) -> None:
        """Forget what belongs to a name, which may stand for another array then."""
        self._arrays = {key: array for key, array in self._arrays.items() if key[0] != name}
        self._claims.pop(name, None)

    def clear(self) -> None:
        """Forget everything, as after a change of the loss scale or of the group of ranks."""
        self._arrays.clear()
        self._claims.clear()


def elements_per_item(dtype: np.dtype[Any]) -> int:
    """Return how many numbers an element of what travels stands for."""
    return int8.NUMBERS if dtype == int8.BLOCK else 1


def kernels_for(dtype: np.dtype[Any]) -> Any:
    """Return the module whose `narrow`, `widen` and `reduce` are for what travels as a dtype."""
    if dtype == int8.BLOCK:
        return int8
    from collectives.kernels import half_loops

    return half_loops


@dataclass(frozen=True)
class Codec:
    """How the array of one call is packed: the decision that a `Compression` has taken for it.

    Attributes:
        dtype: what travels, float16, bfloat16 or blocks of 8 bits.
        name: of the array, for its residuals.
        residuals: where rounding errors are kept, or None if they are forgotten.
    """

    dtype: np.dtype[Any]
    name: str = ""
    residuals: Residuals | None = None

    def acquire(self, count: int, dtype: np.dtype[Any]) -> None:
        """Refuse an array that is not the one whose residuals are kept; see `Residuals.acquire`."""
        if self.residuals is not None:
            self.residuals.acquire(self.name, count, dtype)

    def pack(self, source: Array, divisor: int = 1) -> Array:
        """Return a rank's contribution, rounded; arguments as `packing`."""
        packed, pack = self.packing(source, divisor)
        pack(0, packed.size)
        return packed

    def packing(self, source: Array, divisor: int = 1) -> tuple[Array, Callable[[int, int], None]]:
        """Prepare to round a rank's contribution, a part after the other.

        Args:
            source: shape (n,), float32 or float64, contiguous; it is not changed.
            divisor: what it is divided by first.

        Returns:
            A new array of the codec's dtype, shape (n,), or an element for each block of 8 bits;
            and a function that fills its elements from one number up to another. Call it once for
            each of them.
        """
        each, narrow = elements_per_item(self.dtype), kernels_for(self.dtype).narrow
        packed = np.empty(-(-source.size // each), self.dtype)
        residual = self._residual("contribution", source.size, source.dtype)

        def pack(start: int, stop: int) -> None:
            part = slice(each * start, min(each * stop, source.size))
            left = None if residual is None else residual[part]
            narrow(source[part], packed[start:stop], divisor=divisor, residual=left)

        return packed, pack

    def unpack(self, packed: Array, out: Array) -> None:
        """Fill `out`, shape (n,), float32 or float64, with a packed array."""
        kernels_for(self.dtype).widen(packed, out)

    def result_residual(self, count: int, rank: int, size: int) -> Array | None:
        """Return what is to be added to the sums of `count` elements, rounded here for all."""
        # Named after the group: how many they are is no fact on which all ranks would fail alike.
        part, count = f"results of rank {rank} of {size}", count * elements_per_item(self.dtype)
        return self._residual(part, count, np.dtype(np.float32))

    def _residual(self, part: str, count: int, dtype: np.dtype[Any]) -> Array | None:
        if self.residuals is None:
            return None
        residual: Array = self.residuals.array(self.name, part, count, dtype)
        return residual


@dataclass(frozen=True)
class Compression:
    """How floats travel; one of `NONE`, `FP16`, `BF16`, `INT8`, or what their methods return.

    Attributes:
        dtype: what float32 and float64 arrays travel as, or None if as they are.
        where: "everywhere", or "network" if only what goes between nodes is rounded.
        residuals: where rounding errors are kept, or None if they are forgotten.

    Example:
        >>> FP16.on("network")
        FP16.on('network')
        >>> str(FP16.on("network"))
        'float16 on network'
    """

    dtype: np.dtype[Any] | None
    where: Where = "everywhere"
    residuals: Residuals | None = None

    def __repr__(self) -> str:
        """Return what makes it, as a program has it."""
        where = "" if self.where == "everywhere" else f".on({self.where!r})"
        feedback = "" if self.residuals is None else ".with_feedback()"
        return f"{_spelling(self.dtype)[0]}{where}{feedback}"

    def __str__(self) -> str:
        """Return the words by which ranks compare what they mean."""
        where = "" if self.where == "everywhere" else f" on {self.where}"
        feedback = "" if self.residuals is None else " with feedback"
        return f"{_spelling(self.dtype)[1]}{where}{feedback}"

    def on(self, where: Where) -> Compression:
        """Return this compression for "everywhere" or for the "network" between nodes only.

        Raises:
            ValueError: no such place.
        """
        if where not in get_args(Where):
            raise ValueError(
                f"compression: no such place, expected one of {' '.join(get_args(Where))}, "
                f"got {where!r}"
            )
        return dataclasses.replace(self, where=where)

    def with_feedback(self) -> Compression:
        """Return this compression with residuals of its own, all zero.

        Keep the result for the whole training, and give every array a name: calls of one name add
        what earlier ones have rounded away. One array of the size of the named one is kept on every
        rank, and a P-th of that in float32 for the results.

        Raises:
            ValueError: this is `NONE`, which rounds nothing.
        """
        if self.dtype is None:
            raise ValueError("compression: NONE rounds nothing, so that there is no feedback")
        return dataclasses.replace(self, residuals=Residuals())

    def codec(
        self, dtype: np.dtype[Any], op: Op, *, network: bool, name: str | None = None
    ) -> Codec | None:
        """Decide how an array of one call travels.

        Args:
            dtype: of the array.
            op: how it is reduced.
            network: whether it goes between nodes.
            name: of the array; needed for feedback.

        Returns:
            The codec, or None if the array travels as it is.

        Raises:
            ValueError: there is feedback, and no name or an op that adds nothing up. Also where the
                array would travel as it is, so that a test on one node finds the mistake.
        """
        if self.residuals is not None and op not in (SUM, MEAN):
            raise ValueError(
                f"compression: feedback adds up errors, expected SUM or MEAN, got {op.value}"
            )
        if self.residuals is not None and name is None:
            raise ValueError(
                "compression: feedback keeps a residual for each name, expected name=, got None"
            )
        here = self.where == "everywhere" or network
        if self.dtype is None or dtype not in _COMPRESSIBLE or not here:
            return None
        return Codec(self.dtype, name or "", self.residuals)


NONE = Compression(None)
FP16 = Compression(np.dtype(np.float16))
BF16 = Compression(np.dtype(ml_dtypes.bfloat16))
INT8 = Compression(int8.BLOCK)
_NAMES = {
    NONE.dtype: ("NONE", "none"),
    FP16.dtype: ("FP16", "float16"),
    BF16.dtype: ("BF16", "bfloat16"),
    INT8.dtype: ("INT8", "int8"),
}


def _spelling(dtype: np.dtype[Any] | None) -> tuple[str, str]:
    """Return how a compression is written in a program, and told apart."""
    return _NAMES.get(dtype, (f"Compression({dtype!r})", str(dtype)))


def resolve(given: Compression | None, operation: str) -> Compression:
    """Return the compression that a caller means, `NONE` for None.

    Raises:
        TypeError: it is something else.
    """
    if given is None:
        return NONE
    if not isinstance(given, Compression):
        raise TypeError(
            f"{operation}: not a compression, expected NONE, FP16, BF16, INT8 or what their "
            f"methods return, got {given!r}"
        )
    return given
