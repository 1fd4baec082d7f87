"""CSV text to arrays, one per column.

Whole batches of plain numbers take a compiled loop (`csv_kernel`); every row in which that loop
finds anything else is decoded here, slowly and exactly, so that results and errors are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from strategies.errors import InvalidArgumentError
from strategies.input.rows import Array

__all__ = ["decode_csv"]

# The compiled loop takes 0.3 s to load, and a second or two to compile when it was never used. The
# exact way decodes so many fields in 0.3 s; a process that needs no more does without the loop.
_fields_before_loop = 1 << 20


class _Column(NamedTuple):
    """How to decode one column; `dtype` is object for text, `default` None for a required field."""

    dtype: np.dtype[Any]
    default: Any
    convert: Callable[[str], Any]


class _Format(NamedTuple):
    """How a record is split and which fields count as missing."""

    delimiter: str
    quotes: bool
    na_value: str
    select: tuple[int, ...] | None
    blank_is_missing: bool


def decode_csv(
    records: Any,
    record_defaults: Sequence[Any],
    *,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    blank_is_missing: bool = False,
    keys: Sequence[str] | None = None,
) -> list[Any]:
    r"""Decode lines of comma-separated values.

    A field that begins with a quote may hold delimiters and line ends, and a doubled quote for a
    quote. Fields that are empty, or equal to `na_value`, take the default of their column. Numbers
    may have spaces around them, text keeps its spaces.

    Args:
        records: lines without their ends: one string, or an array or nested sequence of strings.
        record_defaults: per column a value whose type is that of the column (NumPy scalars, or
            Python's `float` for float32, `int` for int32, `str`), or an array of that dtype with
            one element, or with none if the field is required: `np.array([], "int32")`.
        field_delim: one character.
        use_quote_delim: whether quotes are special; otherwise they are ordinary characters.
        na_value: one more text that means missing.
        select_cols: columns to decode, increasing, one per default; all if None.
        blank_is_missing: whether fields of spaces alone are missing; otherwise they are no numbers.
        keys: what to call the records in errors, such as `file:line`; one for each.

    Returns:
        One array per column (float32, float64, int32, int64; objects for text) of the shape of
        `records`; scalars for a single line.

    Raises:
        InvalidArgumentError: a record has another number of fields, lacks a required one, is not
            quoted well, or a field is not a number of its type; says which.
        ValueError: defaults, `field_delim`, `select_cols` or `keys` do not fit.
        TypeError: a default of another dtype, or records that are no text.

    Example:
        >>> decode_csv(["1,one", ",two"], [np.int32(7), ""])
        [array([1, 7], dtype=int32), array(['one', 'two'], dtype=object)]
    """
    columns = [_as_column(index, default) for index, default in enumerate(record_defaults)]
    select = _checked_selection(select_cols, len(columns))
    form = _Format(field_delim, use_quote_delim, na_value, select, blank_is_missing)
    if len(field_delim) != 1 or field_delim in "\r\n" or (use_quote_delim and field_delim == '"'):
        raise ValueError(
            "decode_csv: field_delim must be one character, no line end and no quote, "
            f"got {field_delim!r}"
        )
    if isinstance(records, list) and all(type(record) is str for record in records):
        lines, shape = records, (len(records),)
    else:
        array = np.asarray(records, object)
        lines, shape = array.ravel().tolist(), array.shape
        for line in lines:
            if not isinstance(line, str):
                raise TypeError(f"decode_csv: records must be str, got {type(line).__name__}")
    if keys is not None and len(keys) != len(lines):
        raise ValueError(f"decode_csv: expected {len(lines)} keys, one per record, got {len(keys)}")
    decoded = _decode_fast(lines, columns, form, keys)
    if decoded is None:
        decoded = [np.empty(len(lines), column.dtype) for column in columns]
        _decode_exactly(range(len(lines)), lines, columns, form, keys, decoded)
    if len(shape) == 1:
        return decoded
    return [values.reshape(shape)[()] for values in decoded]


def _decode_fast(
    lines: list[str], columns: list[_Column], form: _Format, keys: Sequence[str] | None
) -> list[Array] | None:
    """Decode numbers with the compiled loop and odd rows exactly; None if it is not worth it."""
    global _fields_before_loop
    dtypes = [column.dtype for column in columns]
    if not lines or not dtypes or np.dtype(object) in dtypes:
        return None
    if _fields_before_loop > 0:
        _fields_before_loop -= len(lines) * len(columns)
        return None
    from strategies.input import csv_kernel

    if not csv_kernel.can_split(form.delimiter, form.na_value):
        return None
    parsed = csv_kernel.parse(lines, dtypes, form.delimiter, form.quotes, form.select)
    if parsed is None:
        return None
    decoded, odd = parsed
    _decode_exactly(odd, lines, columns, form, keys, decoded)
    return decoded


def _decode_exactly(
    rows: Sequence[int],
    lines: list[str],
    columns: list[_Column],
    form: _Format,
    keys: Sequence[str] | None,
    out: list[Array],
) -> None:
    """Decode the given rows, in this order, into their places in `out`."""
    table = []
    for row in rows:
        try:
            table.append(_values(_split(lines[row], form), columns, form))
        except _RecordError as error:
            what, why = error.args
            key = "" if keys is None else f" ({keys[row]})"
            raise InvalidArgumentError(f"{what} record {row}{why}{key}") from None
    places = slice(None) if len(rows) == len(lines) else list(rows)
    for array, values in zip(out, zip(*table, strict=True), strict=False):
        array[places] = values


class _RecordError(Exception):
    """What is wrong, in two parts: before and after the number of the record."""


def _values(fields: list[str], columns: list[_Column], form: _Format) -> list[Any]:
    if len(fields) != len(columns):
        raise _RecordError(f"Expect {len(columns)} fields but have {len(fields)} in", "")
    values: list[Any] = []
    na_value, blanks = form.na_value, form.blank_is_missing
    for field, (dtype, default, convert) in zip(fields, columns, strict=True):
        if not field or field == na_value or (blanks and field.isspace()):
            if default is None:
                raise _RecordError(f"Field {len(values)} is required but missing in", "")
            values.append(default)
            continue
        try:
            values.append(convert(field))
        except ValueError:
            shown = field if len(field) <= 80 else field[:80] + "..."
            why = f" is not a valid {dtype}: {shown!r}"
            raise _RecordError(f"Field {len(values)} in", why) from None
    return values


def _number(parse: Callable[[str], Any], smallest: float, largest: float) -> Callable[[str], Any]:
    """A function from a field to a number in a range, which raises `ValueError` for all others."""

    def convert(field: str) -> Any:
        number = parse(field)
        # Python also takes 1_000 and the digits of all scripts.
        if "_" in field or not field.isascii():
            raise ValueError
        # What is too large has become infinite, but infinity must be spelled. nan is in no range.
        if not smallest <= number <= largest and (parse is int or "n" not in field.lower()):
            raise ValueError
        return number

    return convert


_FLOAT64_END = float(np.finfo(np.float64).max)
# What is nearer to 2**128 than to the largest float32 would become infinite.
_FLOAT32_END = 2.0**128 - 2.0**103 - 2.0**75
_CONVERTERS: dict[np.dtype[Any], Callable[[str], Any]] = {
    np.dtype(object): str,
    np.dtype("float32"): _number(float, -_FLOAT32_END, _FLOAT32_END),
    np.dtype("float64"): _number(float, -_FLOAT64_END, _FLOAT64_END),
    np.dtype("int32"): _number(int, -(2**31), 2**31 - 1),
    np.dtype("int64"): _number(int, -(2**63), 2**63 - 1),
}


def _split(record: str, form: _Format) -> list[str]:
    """The selected fields of a record."""
    record = record.lstrip("\r\n")
    if not record:
        fields = []
    elif form.quotes and '"' in record:
        fields = _split_quoted(record, form.delimiter)
    else:
        if "\n" in record or "\r" in record:
            raise _RecordError("Unquoted fields cannot have quotes/CRLFs inside,", "")
        fields = record.split(form.delimiter)
    if form.select is None:
        return fields
    return [fields[index] for index in form.select if index < len(fields)]


def _split_quoted(record: str, delimiter: str) -> list[str]:
    fields = []
    start = 0
    while True:
        if record.startswith('"', start):
            field, end = _quoted_field(record, start + 1, delimiter)
        else:
            end = record.find(delimiter, start)
            end = len(record) if end < 0 else end
            field = record[start:end]
            if any(character in field for character in '"\r\n'):
                raise _RecordError("Unquoted fields cannot have quotes/CRLFs inside,", "")
        fields.append(field)
        if end == len(record):
            return fields
        start = end + 1


def _quoted_field(record: str, start: int, delimiter: str) -> tuple[str, int]:
    """The text of a field whose opening quote is before `start`, and where the field ends."""
    parts = []
    while True:
        quote = record.find('"', start)
        if quote < 0:
            raise _RecordError("Quoted field has to end with quote followed by delim or end,", "")
        parts.append(record[start:quote])
        after = record[quote + 1 : quote + 2]
        if after in ("", delimiter):
            return "".join(parts), quote + 1
        if after != '"':
            raise _RecordError("Quote inside a string has to be escaped by another quote,", "")
        parts.append('"')
        start = quote + 2


def _as_column(index: int, default: Any) -> _Column:
    array = np.asarray(default)
    if array.ndim > 1 or array.size > 1:
        raise ValueError(
            f"decode_csv: default of column {index} must be a scalar or an array of at most one "
            f"element, got shape {array.shape}"
        )
    dtype = array.dtype
    if not isinstance(default, (np.ndarray, np.generic)) and dtype.kind in "if":
        # Python's numbers do not say how many bits they mean.
        dtype = np.dtype("int32" if dtype.kind == "i" else "float32")
    dtype = np.dtype(object) if dtype.kind == "U" else dtype
    values = array.ravel().tolist()
    if dtype not in _CONVERTERS or any(dtype.hasobject != isinstance(v, str) for v in values):
        raise TypeError(
            f"decode_csv: default of column {index} must be float32, float64, int32, int64 or str, "
            f"got {array.dtype}"
        )
    try:
        for value in values:
            _CONVERTERS[dtype](str(value))
    except ValueError:
        raise ValueError(
            f"decode_csv: default of column {index} does not fit {dtype}, got {values[0]}"
        ) from None
    return _Column(dtype, values[0] if values else None, _CONVERTERS[dtype])


def _checked_selection(columns: Sequence[int] | None, count: int) -> tuple[int, ...] | None:
    if columns is None:
        return None
    chosen = tuple(columns)
    if len(chosen) != count:
        raise ValueError(f"decode_csv: expected {count} select_cols, one per default, got {chosen}")
    if any(index < 0 for index in chosen) or any(
        a >= b for a, b in zip(chosen, chosen[1:], strict=False)
    ):
        raise ValueError(f"decode_csv: select_cols must be increasing and >= 0, got {chosen}")
    return chosen
