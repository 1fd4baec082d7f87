"""Compilation of the loop in `strategies.input.csv.kernel`.

Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import carray, types
from numba.extending import register_jitable

from collectives.kernels import numba_compiler
from collectives.kernels.numba_compiler import pointer
from strategies.input.csv.kernel import ARGUMENTS, FLOAT32, FLOAT64, INT64, SKIP

__all__ = ["all_words", "make"]

# Numbers from half a unit in the last place above the largest float32 round to infinity.
_FLOAT32_END = float(np.finfo(np.float32).max) * (1 + 2.0**-25)
_LINE_END, _QUOTE, _CARRIAGE_RETURN, _PLUS, _MINUS, _POINT, _ZERO, _NINE, _E, _e = b'\n"\r+-.09Ee'
_WHOLE, _FRACTION, _EXPONENT = range(3)  # parts of a number
# Another digit beyond the first value could overflow int64; such numbers become the second value.
_LAST_STEP, _TOO_LONG = 10**17, 4 * 10**18
# float64 is inexact above the first two. Exponents saturate at the third; those records are odd.
_EXACT_INTEGER, _EXACT_POWER, _TOO_HIGH = 2**53, 22, 10_000
_INT32_MAX = 2**31 - 1
_POWERS = np.array([float(10**power) for power in range(_EXACT_POWER + 1)])


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with the loop; arguments as `machine_code.load`."""
    signature = types.void(*[types.int64] * ARGUMENTS)
    return numba_compiler.object_code({"records": _records}[kind], signature, symbol)


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all loops."""
    yield ("records",)


@register_jitable
def _scale(value: int, exponent: int) -> float:
    """Return value * 10**exponent if it is surely correctly rounded, otherwise nan."""
    # 0 needs no power, and 0 * 10**400 is 0.
    if value == 0:
        return 0.0
    if value > _EXACT_INTEGER or abs(exponent) > _EXACT_POWER:
        return np.nan
    number: float = value / _POWERS[-exponent] if exponent < 0 else value * _POWERS[exponent]
    return number


# One loop over the bytes, without calls that take arrays: numba would count references per field,
# which is 4 times slower.
def _records(
    text: int,
    size: int,
    delimiter: int,
    quotes: int,
    more: int,
    of_fields: int,
    fields: int,
    result: int,
    columns: int,
    rows: int,
    flags: int,
) -> None:
    """Parse records, and flag the odd ones.

    Args:
        text: address of the records, `size` bytes, each with a line end.
        size: number of bytes.
        delimiter: the byte between fields.
        quotes: whether a quote in an unselected column makes the record odd.
        more: whether records may have more fields than `fields`.
        of_fields: address of the kinds of the fields, as int8.
        fields: number of kinds.
        result: address of the result, shape (columns, rows), as int64 or float64.
        columns: number of parsed columns.
        rows: number of records.
        flags: address of a bool per record.
    """
    data = carray(pointer(text), size, np.uint8)
    kinds = carray(pointer(of_fields), fields, np.int8)
    integers = carray(pointer(result), (columns, rows), np.int64)
    floats = carray(pointer(result), (columns, rows), np.float64)
    odd = carray(pointer(flags), rows, np.bool_)
    row = field = column = 0
    good = True  # nothing odd in this record so far
    kind = kinds[0]
    # State of the current field, which is reset at each delimiter.
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
                # Saturates, so that an exponent of many digits cannot overflow.
                power = min(power * 10 + digit, _TOO_HIGH)
            else:
                value = value * 10 + digit if value < _LAST_STEP else _TOO_LONG
                # Decimal places are counted, and the point itself is dropped.
                shift += part == _FRACTION
            digits += 1
            fresh = False
        elif byte == delimiter or byte == _LINE_END:  # noqa: SIM109 (a tuple is slower here)
            if kind != SKIP:
                # A field without digits is empty, a sign or text: decoded elsewhere.
                good = good and digits > 0 and value != _TOO_LONG
                if kind >= FLOAT32:
                    number = _scale(value, (-power if falling else power) - shift)
                    # NaN fails the first comparison; a float64 passes if it is a number at all.
                    good = good and (number < _FLOAT32_END or (kind == FLOAT64 and number >= 0))
                    floats[column, row] = -number if negative else number
                else:
                    # `value - negative`: -2**31 is an int32, although 2**31 is not.
                    good = good and (kind == INT64 or value - negative <= _INT32_MAX)
                    integers[column, row] = -value if negative else value
                column += 1
            field += 1
            if byte == _LINE_END:
                # Too few columns; too many have made the record odd already.
                odd[row] = not good or column != columns
                row += 1
                field = column = 0
                good = True
            kind = kinds[field] if field < fields else SKIP
            # `more`: with selected columns, further fields are allowed.
            good = good and (more != 0 or field < fields)
            part = _WHOLE
            fresh = True
            digits = 0
            value = shift = power = np.int64(0)
            negative = falling = False
        elif kind == SKIP:
            # An unselected field may hold anything but quotes and line ends, see `exact`.
            good = good and byte != _CARRIAGE_RETURN and not (quotes and byte == _QUOTE)
        elif fresh and (byte == _MINUS or byte == _PLUS):  # noqa: SIM109
            fresh = False
            if part == _EXPONENT:
                falling = byte == _MINUS
            else:
                negative = byte == _MINUS
        elif byte == _POINT and part == _WHOLE and kind >= FLOAT32:
            part = _FRACTION
            fresh = False
        elif (byte == _E or byte == _e) and part != _EXPONENT and kind >= FLOAT32:  # noqa: SIM109
            # An exponent needs digits before it.
            good = good and digits > 0
            part = _EXPONENT
            fresh = True
            digits = 0
        else:
            good = False
