"""`decode_csv`: one array per column.

Whole batches of plain numbers take a compiled loop (`kernel`); every row in which that loop
finds anything else is decoded by `exact`, so that results and errors are the same.
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

# The compiled loop takes 0.3 s to load, and a second or two to compile when it was never used. The
# exact way decodes so many fields in 0.35 s; a process that needs no more does without the loop,
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
        blank_is_missing: whether fields of spaces alone are missing; otherwise they are errors.
        keys: what to call the records in errors, such as `file:line`; one for each.
        on_damage: what to do about records that do not fit: "raise", or "skip" to leave them out;
            the arrays are then of one dimension, and shorter.

    Returns:
        One array per column (float32, float64, int32, int64; objects for text) of the shape of
        `records`; scalars for a single line.

    Raises:
        InvalidArgumentError: a record has another number of fields, lacks a required one, is not
            quoted well, or a field is not a number of its type; says which.
        ValueError: defaults, `field_delim`, `select_cols` or `keys` do not fit.
        TypeError: a default of another dtype, or records that are not strings.

    Example:
        >>> decode_csv(["1,one", ",two"], [np.int32(7), ""])
        [array([1, 7], dtype=int32), array(['one', 'two'], dtype=object)]
    """
    # Often one default stands for many columns: `[np.float32(0)] * 64`.
    by_identity: dict[int, Column] = {}
    for index, default in enumerate(record_defaults):
        if id(default) not in by_identity:
            by_identity[id(default)] = _as_column(index, default)
    columns = [by_identity[id(default)] for default in record_defaults]
    select = _checked_selection(select_cols, len(columns))
    form = Format(field_delim, use_quote_delim, na_value, select, blank_is_missing)
    if len(field_delim) != 1 or field_delim in "\r\n" or (use_quote_delim and field_delim == '"'):
        raise ValueError(
            "decode_csv: field_delim must be one character, no line end and no quote, "
            f"got {field_delim!r}"
        )
    choice("decode_csv", "on_damage", on_damage, Damage)
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
    decoded, odd = _decode_fast(lines, columns, form) or (
        [np.empty(len(lines), column.dtype) for column in columns],
        range(len(lines)),
    )
    misfits = _fill(decoded, odd, lines, columns, form) if odd else []
    if on_damage == "skip":
        good = np.delete(np.arange(len(lines)), [row for row, _ in misfits])
        return [values[good] for values in decoded]
    for row, misfit in misfits:
        text = f" record {row}".join(misfit.args)
        if keys is None:
            raise InvalidArgumentError(text)
        if misfit.args[1] and keys[row].endswith(":1"):
            text += "; skip_header_lines=1 skips a line of column names"
        raise InvalidArgumentError(f"{text} ({keys[row]})")
    if len(shape) == 1:
        return decoded
    return [values.reshape(shape)[()] for values in decoded]


def _decode_fast(
    lines: list[str], columns: list[Column], form: Format
) -> tuple[list[Array], list[int]] | None:
    """Decode numbers with the compiled loop; return them, and the numbers of odd records.

    None if it is not worth it.
    """
    global _fields_before_loop
    dtypes = [column.dtype for column in columns]
    if not lines or not dtypes or np.dtype(object) in dtypes:
        return None
    if _fields_before_loop > 0:
        _fields_before_loop -= len(lines) * len(columns)
        return None
    from strategies.input.csv import kernel

    if not kernel.can_split(form.delimiter, form.na_value):
        return None
    return kernel.parse(lines, dtypes, form.delimiter, form.quotes, form.select)


def _fill(
    out: list[Array], rows: Sequence[int], lines: list[str], columns: list[Column], form: Format
) -> list[tuple[int, BadRecord]]:
    """Decode the given records into their places in `out`; return those that do not fit."""
    chosen = lines if len(rows) == len(lines) else [lines[row] for row in rows]
    try:
        decoded = decode(chosen, columns, form)
    except BadRecord as misfit:
        if len(rows) == 1:
            return [(rows[0], misfit)]
        return [found for row in rows for found in _fill(out, [row], lines, columns, form)]
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
        # Python's numbers do not say how many bits they mean.
        dtype = np.dtype("int32" if dtype.kind == "i" else "float32")
    dtype = np.dtype(object) if dtype.kind == "U" else dtype
    values = array.ravel().tolist()
    if dtype not in CONVERTERS or any(dtype.hasobject != isinstance(v, str) for v in values):
        raise TypeError(
            f"decode_csv: default of column {index} must be a value of float32, float64, int32, "
            f"int64 or str, such as np.float32(0) or '', got {default!r:.80} of dtype {array.dtype}"
        )
    try:
        for value in values:
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
