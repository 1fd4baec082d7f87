"""Exact CSV decoding rules: fields, defaults and errors.

A batch is decoded column by column. If a field does not fit, the batch is decoded again record by
record to find the first malformed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["CONVERTERS", "Column", "Format", "BadRecord", "decode"]


class Column(NamedTuple):
    """How to decode one column.

    Attributes:
        dtype: dtype of the values; object for text.
        default: value of missing fields; None if the column is required.
        convert: converts a field to a value, or raises `ValueError`.
    """

    dtype: np.dtype[Any]
    default: Any
    convert: Callable[[str], Any]


class Format(NamedTuple):
    """How a record is split and which fields count as missing; see `decode_csv`."""

    delimiter: str
    quotes: bool
    na_value: str
    select: tuple[int, ...] | None
    blank_is_missing: bool


class BadRecord(Exception):
    """A malformed record; `args` are the message before and after the record number."""


def decode(lines: Sequence[str], columns: Sequence[Column], form: Format) -> list[Any]:
    """Decode records and return the values of each column.

    Raises:
        BadRecord: the first malformed record.
    """
    values = _by_column(lines, columns, form)
    # The fast path has no error messages; the slow one finds the first malformed record.
    if values is not None:
        return values
    table = [_values(_split_record(line, form), columns, form) for line in lines]
    return list(zip(*table, strict=True)) or [()] * len(columns)


def _by_column(lines: Sequence[str], columns: Sequence[Column], form: Format) -> list[Any] | None:
    """Return the values of each column; None if any record is malformed."""
    text = "\n".join(lines)
    try:
        # Quotes, line ends or empty lines need the rules of `_split_record`.
        if (
            (form.quotes and '"' in text)
            or "\r" in text
            or text.count("\n") != len(lines) - 1
            or not all(lines)
        ):
            fields = [_split_record(line, form) for line in lines]
        else:
            fields = [_select(line.split(form.delimiter), form) for line in lines]
        # All records must have the right number of fields, otherwise one of them is malformed.
        if {len(columns)} != set(map(len, fields)):
            return None
        # Python's int and float also accept 1_000 and the digits of all scripts.
        plain = text.isascii() and "_" not in text
        pairs = zip(zip(*fields, strict=True), columns, strict=True)
        return [_column_values(parts, column, form, plain) for parts, column in pairs]
    except (BadRecord, ValueError):
        return None


def _column_values(parts: Sequence[str], column: Column, form: Format, plain: bool) -> Any:
    """Return the values of one column, converted in one call if no field needs a closer check."""
    if plain and column.dtype != object:
        given, missing = parts, ("", form.na_value)
        if column.default is not None and ("" in parts or form.na_value in parts):
            # `repr` of a default converts back to the same value.
            given = [repr(column.default) if part in missing else part for part in parts]
        elif form.na_value and form.na_value in parts:
            # Raised as `ValueError`, which leads to decoding record by record.
            raise _Missing
        try:
            if column.dtype.kind == "f":
                floats = np.fromiter(map(float, given), np.float64, len(given))
                # False for NaN and infinity, whose spelling `_value` checks.
                if (np.abs(floats) <= _LARGEST[column.dtype]).all():
                    return floats
            else:
                integers = np.fromiter(map(int, given), np.int64, len(given))
                # Out of range for int32 if the conversion changes the number.
                if (integers == integers.astype(column.dtype)).all():
                    return integers
        except (ValueError, OverflowError):
            pass  # `_value` decides field by field
    return [_value(part, column, form) for part in parts]


def _value(field: str, column: Column, form: Format) -> Any:
    """Return the value of one field; raise `_Missing` if it is required and missing."""
    # Missing before converting: "" is not a number.
    if not field or field == form.na_value or (form.blank_is_missing and field.isspace()):
        if column.default is None:
            raise _Missing
        return column.default
    return column.convert(field)


class _Missing(ValueError):
    """A required field is missing."""


def _values(fields: list[str], columns: Sequence[Column], form: Format) -> list[Any]:
    if len(fields) != len(columns):
        raise BadRecord(f"Expect {len(columns)} fields but have {len(fields)} in", "")
    values: list[Any] = []
    for field, column in zip(fields, columns, strict=True):
        try:
            values.append(_value(field, column, form))
        except _Missing:
            raise BadRecord(f"Field {len(values)} is required but missing in", "") from None
        except ValueError:
            shown = field if len(field) <= 80 else field[:80] + "..."
            why = f" is not a valid {column.dtype}: {shown!r}"
            if field.isspace():
                why += "; blank_is_missing=True treats fields of spaces as missing"
            raise BadRecord(f"Field {len(values)} in", why) from None
    return values


def _number(parse: Callable[[str], Any], smallest: float, largest: float) -> Callable[[str], Any]:
    """Return a function that converts a field to a number in a range, or raises `ValueError`."""

    def convert(field: str) -> Any:
        number = parse(field)
        # Python's int and float also accept 1_000 and the digits of all scripts.
        if "_" in field or not field.isascii():
            raise ValueError
        # float() turns numbers that are too large into infinity; only a spelled "inf" or "nan" may
        # be out of range.
        if not smallest <= number <= largest and (parse is int or "n" not in field.lower()):
            raise ValueError
        return number

    return convert


_FLOAT64_END = float(np.finfo(np.float64).max)
# Larger numbers are nearer to 2**128 than to the largest float32 and would round to infinity.
_FLOAT32_END = 2.0**128 - 2.0**103 - 2.0**75
CONVERTERS: dict[np.dtype[Any], Callable[[str], Any]] = {
    np.dtype(object): str,
    np.dtype("float32"): _number(float, -_FLOAT32_END, _FLOAT32_END),
    np.dtype("float64"): _number(float, -_FLOAT64_END, _FLOAT64_END),
    np.dtype("int32"): _number(int, -(2**31), 2**31 - 1),
    np.dtype("int64"): _number(int, -(2**63), 2**63 - 1),
}
"""Converter of a field to a value, by dtype."""

_LARGEST = {np.dtype("float32"): _FLOAT32_END, np.dtype("float64"): _FLOAT64_END}


def _split_record(record: str, form: Format) -> list[str]:
    """Return the selected fields of a record."""
    # Line ends in front of a record are empty lines before it.
    record = record.lstrip("\r\n")
    if not record:
        fields = []
    elif form.quotes and '"' in record:
        fields = _split_quoted(record, form.delimiter)
    else:
        if "\n" in record or "\r" in record:
            raise BadRecord("Unquoted fields cannot have quotes/CRLFs inside,", "")
        fields = record.split(form.delimiter)
    return _select(fields, form)


def _select(fields: list[str], form: Format) -> list[str]:
    if form.select is None:
        return fields
    # A record with fewer fields is detected by its length afterwards.
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
            # A quote must open its field or be doubled inside a quoted one.
            if any(character in field for character in '"\r\n'):
                raise BadRecord("Unquoted fields cannot have quotes/CRLFs inside,", "")
        fields.append(field)
        if end == len(record):
            return fields
        start = end + 1


def _quoted_field(record: str, start: int, delimiter: str) -> tuple[str, int]:
    """Return the text of a field whose opening quote is before `start`, and the field's end."""
    parts = []
    while True:
        quote = record.find('"', start)
        if quote < 0:
            raise BadRecord("Quoted field has to end with quote followed by delim or end,", "")
        parts.append(record[start:quote])
        after = record[quote + 1 : quote + 2]
        # At the end of the record or before a delimiter the quote closes the field.
        if after in ("", delimiter):
            return "".join(parts), quote + 1
        if after != '"':
            raise BadRecord("Quote inside a string has to be escaped by another quote,", "")
        parts.append('"')
        start = quote + 2
