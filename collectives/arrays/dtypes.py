"""Supported dtypes, and their names in messages.

| dtype | moved | reduced |
| --- | --- | --- |
| bool, integers, float16 to float64, bfloat16, complex64, complex128 | yes | yes |
| the other dtypes of `ml_dtypes`: float8, int4 and so on | yes | error |
| longdouble, datetime64, timedelta64, text (U, S), void (V) | yes | error |
| structured dtypes of the dtypes above | yes | error |
| object, StringDType, structured with such a field | error: elements are pointers | error |

Arrays move as bytes. `collectives.arrays.reduction` lists the dtypes of each reduction.
"""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np

from collectives.arrays.device import BFLOAT16, is_added

__all__ = ["NUMBERS", "NUMBER_NAMES", "can_move", "named", "spelled"]

# Dtypes that can be reduced. `q` and `Q` are int64 and uint64 under a second name.
NUMBERS = frozenset([*map(np.dtype, "?bBhHiIlLqQefdFD"), BFLOAT16])

# `NUMBERS` in error messages.
NUMBER_NAMES = "bool, an integer, float16, bfloat16, float32, float64, complex64 or complex128"


def can_move(dtype: np.dtype[Any]) -> bool:
    """Return whether the bytes of an element have the same meaning in another process."""
    # The usual dtypes first, without a look at their fields.
    if dtype in NUMBERS:
        return True
    if dtype.hasobject or not dtype.itemsize:  # pointers, or no bytes at all
        return False
    base = dtype.base  # another dtype if a field is itself an array
    if base.fields is not None:
        return all(can_move(field[0]) for field in base.fields.values())
    # Other packages' dtypes may have state outside of the bytes.
    return not is_added(base) or hasattr(ml_dtypes, base.name)


def spelled(dtype: np.dtype[Any]) -> str:
    """Return the text of a dtype that can be moved; `named` returns the dtype of a text.

    Example:
        >>> spelled(np.dtype("float32")), spelled(np.dtype("<U3"))
        ('float32', '<U3')
        >>> named(spelled(np.dtype([("a", "i1"), ("b", "<f4", 2)])))
        dtype([('a', 'i1'), ('b', '<f4', (2,))])
    """
    form = _form(dtype)
    # Not Python literals: in CPython 3.11, `ast` may fail if two threads parse at the same time.
    return form if isinstance(form, str) else json.dumps(form, separators=(",", ":"))


def named(text: str) -> np.dtype[Any]:
    """Return the dtype for a text of `spelled`."""
    # JSON begins with a bracket or brace; a name never does.
    return _dtype(json.loads(text) if text.startswith(("{", "[")) else text)


def _dtype(form: Any) -> np.dtype[Any]:
    """Return the dtype for a form of `_form`."""
    if isinstance(form, list):
        base, shape = form
        form = (_dtype(base), tuple(shape))
    elif isinstance(form, dict):
        form = {**form, "formats": [_dtype(field) for field in form["formats"]]}
    dtype: np.dtype[Any] = np.dtype(form)
    return dtype


def _form(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as JSON values: its name, a pair of base and shape, or a dict of fields."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return _form(base), shape
    if dtype.names is None:
        # By its name, because `str` of `ml_dtypes` is only "V1" or similar.
        return dtype.name if dtype in NUMBERS or is_added(dtype) else dtype.str
    fields = [dtype.fields[name] for name in dtype.names]  # type: ignore[index]
    return {
        "names": list(dtype.names),
        "formats": [_form(field[0]) for field in fields],
        # With offsets, because structured dtypes may have padding.
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }
