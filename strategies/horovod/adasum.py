"""Adasum: adds arrays that are orthogonal, and averages arrays that are parallel.

    adasum(a, b) = (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b

An array of zeros changes nothing. Ranks combine their arrays in pairs, as a tree that depends on
the number of ranks alone. For 6 ranks::

    0   1   2   3   4   5
    0+4 1+5 2   3             ranks from 4 on, the largest power of two, give theirs away
     \\ /    \\ /               distance 1
      0,1    2,3              distance 2
        0 .. 3                the result, also for ranks 4 and 5

Between powers of two the schedule is recursive halving with doubling distances: in each round two
ranks exchange halves of their parts, and each combines one half. Scalar products need the whole
arrays, so the ranks that hold the parts add their partial products. Then the parts return in the
reverse order.

Cost per rank, with k = floor(log2 P) and n arrays: 2 k messages with 2 (1 - 2^-k) S bytes, and
k (k + 1)/2 messages of 24 n bytes. For P between powers of two, up to 2 messages of S bytes more.

Order: fixed by P and the sizes of the arrays. Products are float64; a combined array is rounded
once per round. All ranks get the same bits.

Source: S. Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021,
section 4.2.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies.core import array_ops

__all__ = ["Adasum", "AdasumOp", "adasum"]

Array = npt.NDArray[Any]

# Elements that are converted to float64 at a time: both arrays stay in a core's cache.
_PIECE = 1 << 14

# Below it a squared norm has lost digits to underflow, and the array counts as zeros.
_LEAST = math.sqrt(np.finfo(np.float64).tiny)


class AdasumOp(enum.Enum):
    """Type of `hvd.Adasum`; the value is its name in messages."""

    ADASUM = "ADASUM"


Adasum = AdasumOp.ADASUM
"""Adds orthogonal arrays and averages parallel ones; see `strategies.horovod.adasum`."""


class _Round(NamedTuple):
    """One round: the partner, and the parts of the buffer to keep and to give away."""

    partner: int
    keep: slice
    give: slice


def _rounds(rank: int, size: int, count: int) -> Iterator[_Round]:
    """Yield the rounds of a rank among `size` ranks, a power of two, for `count` elements.

    Example:
        >>> [(r.partner, r.keep.start, r.keep.stop) for r in _rounds(1, 4, 10)]
        [(0, 5, 10), (3, 5, 7)]
    """
    start, stop, distance = 0, count, 1
    while distance < size:
        partner, middle = rank ^ distance, (start + stop) // 2
        lower, upper = slice(start, middle), slice(middle, stop)
        keep, give = (lower, upper) if rank < partner else (upper, lower)
        yield _Round(partner, keep, give)
        start, stop, distance = keep.start, keep.stop, 2 * distance


def adasum(comm: cc.Communicator, arrays: Sequence[Any]) -> list[Any]:
    """Combine the arrays of all ranks, each array by its own products.

    *Collective*: all ranks, with the same shapes and dtypes.

    Args:
        comm: the ranks; no other thread sends messages through it meanwhile.
        arrays: floating-point arrays of any library.

    Returns:
        New arrays of the same kinds; the same bits on all ranks.
    """
    results: list[Any] = [None] * len(arrays)
    names = [array_ops.dtype_name(array) for array in arrays]
    # One buffer for each dtype, in an order that is the same on all ranks.
    for name in dict.fromkeys(names):
        own = [i for i, other in enumerate(names) if other == name]
        parts = [array_ops.to_host(arrays[i]).reshape(-1) for i in own]
        bounds = [0, *itertools.accumulate(part.size for part in parts)]
        buffer = np.concatenate(parts)
        # Overflow gives infinity or NaN on all ranks, without a warning.
        with np.errstate(all="ignore"):
            _combine_in_place(comm, buffer, bounds)
        for i, start, stop in zip(own, bounds, bounds[1:], strict=False):
            # In float32, since other libraries cannot read NumPy's bfloat16.
            part = array_ops.arithmetic_dtype(buffer[start:stop].reshape(arrays[i].shape))
            results[i] = array_ops.astype(array_ops.on_same_device(arrays[i], part), name)
    return results


def _combine_in_place(comm: cc.Communicator, buffer: Array, bounds: Sequence[int]) -> None:
    """Replace the buffers of all ranks by their combination; `bounds` separate the arrays."""
    power = 1 << (comm.size.bit_length() - 1)
    if comm.rank >= power:
        comm.send(buffer, comm.rank - power)
        comm.recv(comm.rank - power, out=buffer)
        return
    guest = comm.rank + power
    if guest < comm.size:
        pair = buffer, comm.recv(guest)
        _combine(pair, _products(pair, bounds), bounds, buffer)
    rounds = list(_rounds(comm.rank, power, buffer.size))
    for number, (partner, keep, give) in enumerate(rounds, start=1):
        own, other = buffer[keep], comm.sendrecv(buffer[give], partner, partner)
        # The lower ranks' array is the first one on all ranks that add products.
        pair = (own, other) if comm.rank < partner else (other, own)
        inside = [min(max(bound, keep.start), keep.stop) - keep.start for bound in bounds]
        products = _products(pair, inside)
        # The partners so far hold the other parts of both arrays.
        for helper in rounds[:number]:
            products += comm.sendrecv(products, helper.partner, helper.partner)
        _combine(pair, products, inside, own)
    for partner, keep, give in reversed(rounds):
        comm.sendrecv(buffer[keep], partner, partner, out=buffer[give])
    if guest < comm.size:
        comm.send(buffer, guest)


def _products(pair: tuple[Array, Array], bounds: Sequence[int]) -> Array:
    """Return a row (a.b, |a|^2, |b|^2) for each array between two bounds."""
    rows = np.zeros((len(bounds) - 1, 3))
    for row, piece in _pieces(bounds):
        a, b = (part[piece].astype(np.float64) for part in pair)
        rows[row] += a @ b, a @ a, b @ b
    return rows


def _combine(pair: tuple[Array, Array], products: Array, bounds: Sequence[int], out: Array) -> None:
    """Write the combination of two buffers to `out`, which may be one of them."""
    dots, squares = products[:, :1], products[:, 1:]
    safe = np.where(squares < _LEAST, np.inf, squares)
    weights = 1 - dots / (2 * safe)
    for row, piece in _pieces(bounds):
        a, b = (part[piece].astype(np.float64) for part in pair)
        out[piece] = weights[row, 0] * a + weights[row, 1] * b


def _pieces(bounds: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield the number of each array with its slices of at most `_PIECE` elements."""
    for row, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for first in range(start, stop, _PIECE):
            yield row, slice(first, min(first + _PIECE, stop))
