"""Compiled loop of `decode_csv`.

It parses only plain decimal numbers. Any other record (quotes, spaces, empty fields, nan, more
digits than a float64 holds exactly, too many or too few fields) is reported as *odd*, and the
caller decodes it. So every number is either exactly right here or decoded elsewhere.

A decimal fraction is an integer m times a power 10**e. If m <= 2**53 and abs(e) <= 22, both are
exact float64 numbers, and one multiplication or division rounds once, as a correct conversion must
(Clinger, How to read floating point numbers accurately, 1990).

`strategies.input.csv.loop` has the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.kernels import machine_code
from strategies.queues.store import Array

__all__ = ["ARGUMENTS", "FLOAT32", "FLOAT64", "INT32", "INT64", "SKIP", "can_split", "parse"]

_NUMBER_CHARACTERS = "0123456789+-.eE"
SKIP, INT32, INT64, FLOAT32, FLOAT64 = range(5)
"""How the loop treats a column."""

_KINDS = {
    np.dtype(name): kind
    for name, kind in zip(("int32", "int64", "float32", "float64"), range(INT32, 5), strict=True)
}

ARGUMENTS = 11
"""Number of the loop's arguments."""


def can_split(delimiter: str, na_value: str) -> bool:
    """Return whether the loop can split fields and never parses a missing value as a number."""
    # Otherwise the delimiter could be a part of a number.
    plain = delimiter.isascii() and delimiter not in _NUMBER_CHARACTERS + '"'
    # Otherwise the loop would parse the text for a missing value, such as -1.
    return plain and not (na_value and na_value[0] in _NUMBER_CHARACTERS)


def parse(
    lines: Sequence[str],
    dtypes: Sequence[np.dtype[Any]],
    delimiter: str,
    quotes: bool,
    select: Sequence[int] | None,
) -> tuple[list[Array], list[int]] | None:
    """Parse the plain records.

    Args:
        lines: records.
        dtypes: float32, float64, int32 or int64 per column.
        delimiter: one ASCII character for which `can_split` holds.
        quotes: whether a quote in an unselected column makes the record odd.
        select: columns of the records to parse, increasing; None parses all.

    Returns:
        An array per column, and the numbers of the odd records, whose values are undefined; None if
        a record contains a line end.
    """
    text = "\n".join(lines)
    # A line end inside a record would shift all later rows.
    if text.count("\n") != len(lines) - 1:
        return None
    # Columns up to the last selected one; later fields are counted only.
    kinds = np.zeros(len(dtypes) if select is None else select[-1] + 1, np.int8)
    kinds[slice(None) if select is None else list(select)] = [_KINDS[dtype] for dtype in dtypes]
    # The final line end terminates the last field, so the loop needs no end-of-data case.
    data = np.frombuffer((text + "\n").encode("utf-8", "surrogatepass"), np.uint8)
    # One buffer for both kinds, as each column has one of them.
    integers = np.zeros((len(dtypes), len(lines)), np.int64)
    odd = np.zeros(len(lines), np.bool_)
    loop = machine_code.procedure("strategies.input.csv.loop", "records", arguments=ARGUMENTS)
    loop(
        data.ctypes.data, data.size, ord(delimiter), quotes, select is not None, kinds.ctypes.data,
        kinds.size, integers.ctypes.data, len(dtypes), len(lines), odd.ctypes.data,
    )  # fmt: skip
    floats = integers.view(np.float64)
    return _as_columns(integers, floats, dtypes), np.flatnonzero(odd).tolist()


def _as_columns(integers: Array, floats: Array, dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
    if len(set(dtypes)) == 1:  # one conversion for all columns
        values = floats if dtypes[0].kind == "f" else integers
        return list(values.astype(dtypes[0], copy=False))
    return [
        (floats[index] if dtype.kind == "f" else integers[index]).astype(dtype)
        for index, dtype in enumerate(dtypes)
    ]
