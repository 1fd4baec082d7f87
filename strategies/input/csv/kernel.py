"""Compiled loop of `decode_csv`.

It knows only plain decimal numbers. A record with anything else (quotes, spaces, empty fields, nan,
more digits than a float64 holds exactly, too many or too few fields) is reported as *odd* and left
to the caller. So a number is either exactly right here or decoded elsewhere.

A decimal fraction is an integer m times a power 10**e. If m <= 2**53 and abs(e) <= 22, both are
exact float64 numbers, and one multiplication or division rounds once, which is what a correct
conversion must do (Clinger, How to read floating point numbers accurately, 1990).

Importing this module loads numba, so that it is imported when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.kernels import numba_compiler
from strategies.queues.store import Array

__all__ = ["can_split", "parse"]

_NUMBER_CHARACTERS = "0123456789+-.eE"
_SKIP, _INT32, _INT64, _FLOAT32, _FLOAT64 = range(5)
_KINDS = {
    np.dtype(name): kind
    for name, kind in zip(("int32", "int64", "float32", "float64"), range(_INT32, 5), strict=True)
}
# From half a unit in the last place above the largest float32 on, numbers round to infinity.
_FLOAT32_END = float(np.finfo(np.float32).max) * (1 + 2.0**-25)
_LINE_END, _QUOTE, _CARRIAGE_RETURN, _PLUS, _MINUS, _POINT, _ZERO, _NINE, _E, _e = b'\n"\r+-.09Ee'
_WHOLE, _FRACTION, _EXPONENT = range(3)  # parts of a number
# One more digit after this could leave int64; numbers that have one stay at the second value.
_LAST_STEP, _TOO_LONG = 10**17, 4 * 10**18
# Above the first two a float64 is not exact; exponents stop at the third, which is odd anyhow.
_EXACT_INTEGER, _EXACT_POWER, _TOO_HIGH = 2**53, 22, 10_000
_INT32_MAX = 2**31 - 1
_POWERS = np.array([float(10**power) for power in range(_EXACT_POWER + 1)])


def can_split(delimiter: str, na_value: str) -> bool:
    """Return whether the loop can tell fields apart and cannot take a missing one for a number."""
    plain = delimiter.isascii() and delimiter not in _NUMBER_CHARACTERS + '"'
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
        quotes: whether a quote in a column that is not selected is special.
        select: columns of the records to parse, increasing; all if None.

    Returns:
        An array per column, and the numbers of the odd records, whose values are not set; None if a
        record has a line end inside.
    """
    text = "\n".join(lines)
    if text.count("\n") != len(lines) - 1:
        return None
    kinds = np.zeros(len(dtypes) if select is None else select[-1] + 1, np.int8)
    kinds[slice(None) if select is None else list(select)] = [_KINDS[dtype] for dtype in dtypes]
    # The last line end makes every field end with a character.
    data = np.frombuffer((text + "\n").encode("utf-8", "surrogatepass"), np.uint8)
    integers = np.zeros((len(dtypes), len(lines)), np.int64)
    odd = np.zeros(len(lines), np.bool_)
    floats = integers.view(np.float64)
    _records(data, ord(delimiter), quotes, select is not None, kinds, integers, floats, odd)
    return _as_columns(integers, floats, dtypes), np.flatnonzero(odd).tolist()


def _as_columns(integers: Array, floats: Array, dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
    if len(set(dtypes)) == 1:  # one conversion for all columns
        values = floats if dtypes[0].kind == "f" else integers
        return list(values.astype(dtypes[0], copy=False))
    return [
        (floats[index] if dtype.kind == "f" else integers[index]).astype(dtype)
        for index, dtype in enumerate(dtypes)
    ]


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call."""
    return numba_compiler.compiled(function, nogil=True)


@_compile
def _scale(value: int, exponent: int) -> float:
    """Return value * 10**exponent, correctly rounded, or nan if that is not sure to be so."""
    if value == 0:
        return 0.0
    if value > _EXACT_INTEGER or abs(exponent) > _EXACT_POWER:
        return np.nan
    number: float = value / _POWERS[-exponent] if exponent < 0 else value * _POWERS[exponent]
    return number


# One loop over the bytes and no calls that pass arrays: those would count references for each
# field, which is 4 times slower.
@_compile
def _records(
    data: Array,
    delimiter: int,
    quotes: bool,
    more: bool,
    kinds: Array,
    integers: Array,
    floats: Array,
    odd: Array,
) -> None:
    """Parse records into outputs of shape (columns, records), and flag the odd ones."""
    row = field = column = 0
    good = True  # nothing odd in this record so far
    kind = kinds[0]
    part = _WHOLE
    fresh = True  # a sign may follow
    digits = 0  # in this part; the fraction counts with the whole
    value = np.int64(0)  # of all digits before the exponent
    shift = np.int64(0)  # decimal places after the point
    power = np.int64(0)
    negative = falling = False
    for byte in data:
        if _ZERO <= byte <= _NINE:
            digit = np.int64(byte) - _ZERO
            if part == _EXPONENT:
                power = min(power * 10 + digit, _TOO_HIGH)
            else:
                value = value * 10 + digit if value < _LAST_STEP else _TOO_LONG
                shift += part == _FRACTION
            digits += 1
            fresh = False
        elif byte == delimiter or byte == _LINE_END:  # noqa: SIM109 (a tuple is slower here)
            if kind != _SKIP:
                good = good and digits > 0 and value != _TOO_LONG
                if kind >= _FLOAT32:
                    number = _scale(value, (-power if falling else power) - shift)
                    good = good and (number < _FLOAT32_END or (kind == _FLOAT64 and number >= 0))
                    floats[column, row] = -number if negative else number
                else:
                    good = good and (kind == _INT64 or value - negative <= _INT32_MAX)
                    integers[column, row] = -value if negative else value
                column += 1
            field += 1
            if byte == _LINE_END:
                odd[row] = not good or column != len(integers)
                row += 1
                field = column = 0
                good = True
            kind = kinds[field] if field < len(kinds) else _SKIP
            good = good and (more or field < len(kinds))
            part = _WHOLE
            fresh = True
            digits = 0
            value = shift = power = np.int64(0)
            negative = falling = False
        elif kind == _SKIP:
            good = good and byte != _CARRIAGE_RETURN and not (quotes and byte == _QUOTE)
        elif fresh and (byte == _MINUS or byte == _PLUS):  # noqa: SIM109
            fresh = False
            if part == _EXPONENT:
                falling = byte == _MINUS
            else:
                negative = byte == _MINUS
        elif byte == _POINT and part == _WHOLE and kind >= _FLOAT32:
            part = _FRACTION
            fresh = False
        elif (byte == _E or byte == _e) and part != _EXPONENT and kind >= _FLOAT32:  # noqa: SIM109
            good = good and digits > 0
            part = _EXPONENT
            fresh = True
            digits = 0
        else:
            good = False
