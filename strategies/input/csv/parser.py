"""`decode_csv`: one array per column.

A compiled loop (`kernel`) decodes whole batches of plain numbers. `exact` decodes every other row,
so results and errors are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.core.validation import choice
from strategies.errors import InvalidArgumentError
from strategies.input.csv.exact import CONVERTERS, BadRecord, Column, Format, decode
from strategies.input.reader import Damage
from strategies.queues.store import Array

__all__ = ["decode_csv"]

# The compiled loop takes 0.3 s to load, and 1 to 2 s to compile in its first use on a machine.
# `exact` decodes this many fields in 0.35 s, so a process with fewer fields does without the loop
# and its consumer without that pause.
_fields_before_loop = 1 << 22


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
    on_damage: Damage = "raise",
) -> list[Any]:
    r"""Decode lines of comma-separated values.

    A field that begins with a quote may contain delimiters and line ends; a doubled quote in it is
    one quote. Fields that are empty or equal to `na_value` take the default of their column.
    Numbers may have spaces around them; text keeps its spaces.

    Args:
        records: lines without their ends: one string, or an array or nested sequence of strings.
        record_defaults: one value per column, which defines its type (NumPy scalars, or Python's
            `float` for float32, `int` for int32, `str`), or an array of that dtype with one
            element, or with no element if the field is required: `np.array([], "int32")`.
        field_delim: one character.
        use_quote_delim: whether quotes are special; otherwise they are ordinary characters.
        na_value: additional text that means missing.
        select_cols: columns to decode, increasing, one per default; None decodes all.
        blank_is_missing: whether fields of spaces alone are missing; otherwise they are errors.
        keys: names of the records for errors, such as `file:line`; one per record.
        on_damage: handling of malformed records: "raise"; or "skip", which returns shorter arrays
            of one dimension.

    Returns:
        One array per column (float32, float64, int32, int64; objects for text) of the shape of
        `records`; scalars for a single line.

    Raises:
        InvalidArgumentError: a record has a wrong number of fields, lacks a required field, is
            quoted incorrectly, or has a field that is not a number; names the record.
        ValueError: invalid defaults, `field_delim`, `select_cols` or `keys`.
        TypeError: a default of another dtype, or records that are not strings.

    Example:
        >>> decode_csv(["1,one", ",two"], [np.int32(7), ""])
        [array([1, 7], dtype=int32), array(['one', 'two'], dtype=object)]
    """
    # Columns often share one default object, such as `[np.float32(0)] * 64`, so convert it once.
    by_identity: dict[int, Column] = {}
    for index, default in enumerate(record_defaults):
        if id(default) not in by_identity:
            by_identity[id(default)] = _as_column(index, default)
    # One Column object per default object, so that columns that share a default share the work.
    columns = [by_identity[id(default)] for default in record_defaults]
    select = _checked_selection(select_cols, len(columns))
    form = Format(field_delim, use_quote_delim, na_value, select, blank_is_missing)
    if len(field_delim) != 1 or field_delim in "\r\n" or (use_quote_delim and field_delim == '"'):
        raise ValueError(
            "decode_csv: field_delim must be one character, no line end and no quote, "
            f"got {field_delim!r}"
        )
    choice("decode_csv", "on_damage", on_damage, Damage)
    # The usual case without a copy: the reader passes a list of plain strings.
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
    # Without the loop all records count as odd, and `exact` fills the uninitialized arrays.
    decoded, odd = _decode_fast(lines, columns, form) or (
        [np.empty(len(lines), column.dtype) for column in columns],
        range(len(lines)),
    )
    misfits = _fill(decoded, odd, lines, columns, form) if odd else []
    if on_damage == "skip":
        # A malformed record leaves its row undefined in all columns, so it is removed from all.
        good = np.delete(np.arange(len(lines)), [row for row, _ in misfits])
        return [values[good] for values in decoded]
    for row, misfit in misfits:
        # The message is built around the record's number, see `BadRecord`.
        text = f" record {row}".join(misfit.args)
        if keys is None:
            raise InvalidArgumentError(text)
        # The likely cause: a header in the first line.
        if misfit.args[1] and keys[row].endswith(":1"):
            text += "; skip_header_lines=1 skips a line of column names"
        raise InvalidArgumentError(f"{text} ({keys[row]})")
    if len(shape) == 1:
        return decoded
    # `[()]` turns an array of 0 dimensions into a scalar, and leaves other arrays.
    return [values.reshape(shape)[()] for values in decoded]


def _decode_fast(
    lines: list[str], columns: list[Column], form: Format
) -> tuple[list[Array], list[int]] | None:
    """Decode numbers with the compiled loop; return them and the numbers of odd records.

    Returns None if the loop does not apply or does not pay off yet.
    """
    global _fields_before_loop
    dtypes = [column.dtype for column in columns]
    # Text columns are decoded by `exact` alone.
    if not lines or not dtypes or np.dtype(object) in dtypes:
        return None
    if _fields_before_loop > 0:
        # Each call counts until the loop pays off.
        _fields_before_loop -= len(lines) * len(columns)
        return None
    from strategies.input.csv import kernel

    if not kernel.can_split(form.delimiter, form.na_value):
        return None
    return kernel.parse(lines, dtypes, form.delimiter, form.quotes, form.select)


def _fill(
    out: list[Array], rows: Sequence[int], lines: list[str], columns: list[Column], form: Format
) -> list[tuple[int, BadRecord]]:
    """Decode records into their rows of `out`; return the malformed ones with their errors."""
    chosen = lines if len(rows) == len(lines) else [lines[row] for row in rows]
    try:
        decoded = decode(chosen, columns, form)
    except BadRecord as misfit:
        # One by one, to find every malformed record and not only the first.
        if len(rows) == 1:
            return [(rows[0], misfit)]
        return [found for row in rows for found in _fill(out, [row], lines, columns, form)]
    # A slice is faster than a list of all row numbers.
    places = slice(None) if len(rows) == len(lines) else list(rows)
    for array, values in zip(out, decoded, strict=True):
        array[places] = values
    return []


def _as_column(index: int, default: Any) -> Column:
    array = np.asarray(default)
    if array.ndim > 1 or array.size > 1:
        raise ValueError(
            f"decode_csv: default of column {index} must be a scalar or an array of at most one "
            f"element, got shape {array.shape}"
        )
    dtype = array.dtype
    if not isinstance(default, (np.ndarray, np.generic)) and dtype.kind in "if":
        # Python numbers carry no width, so use TensorFlow's defaults.
        dtype = np.dtype("int32" if dtype.kind == "i" else "float32")
    # Text of any length is stored as objects.
    dtype = np.dtype(object) if dtype.kind == "U" else dtype
    values = array.ravel().tolist()
    if dtype not in CONVERTERS or any(dtype.hasobject != isinstance(v, str) for v in values):
        raise TypeError(
            f"decode_csv: default of column {index} must be a value of float32, float64, int32, "
            f"int64 or str, such as np.float32(0) or '', got {default!r:.80} of dtype {array.dtype}"
        )
    try:
        for value in values:
            # The default must be a value that the column itself could hold.
            CONVERTERS[dtype](str(value))
    except ValueError:
        raise ValueError(
            f"decode_csv: default of column {index} does not fit {dtype}, got {values[0]}"
        ) from None
    return Column(dtype, values[0] if values else None, CONVERTERS[dtype])


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
