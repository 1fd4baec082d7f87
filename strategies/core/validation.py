"""Validation of arguments."""

from __future__ import annotations

import math
import operator
from typing import Any, get_args

__all__ = ["choice", "integer", "number"]


def number(
    operation: str,
    name: str,
    value: Any,
    *,
    least: float = 0,
    below: float = math.inf,
    context: str = "",
) -> float:
    """Return `value` as a float if least <= value < below.

    The result is a Python float, because a NumPy scalar would widen float32 arithmetic.

    Args:
        operation: beginning of the error.
        name: name of the argument.
        value: anything that `float` accepts, except strings.
        least: smallest valid number.
        below: smallest number that is too large.
        context: end of the error.

    Raises:
        ValueError: the value is not such a number.
    """
    try:
        # `float` would accept the text "1".
        checked = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        checked = math.nan
    # NaN fails every comparison, so one check rejects it as well.
    if not least <= checked < below:
        word = name.replace(" ", "_")
        bounds = (
            f"a number >= {least:g}" if below == math.inf else f"{least:g} <= {word} < {below:g}"
        )
        got = repr(value) if isinstance(value, (str, bytes)) else value  # shows strings as strings
        raise ValueError(f"{operation}: bad {name}, expected {bounds}, got {got}{context}")
    return checked


def integer(operation: str, name: str, value: Any, *, least: int = 1) -> int:
    """Return `value` if it is an integer >= least, of Python or NumPy, but not a bool.

    Raises:
        ValueError: the value is not such an integer.
    """
    try:
        # `index` accepts integers of NumPy, but not floats; bool is an integer in Python.
        checked = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        checked = least - 1
    if checked < least:
        raise ValueError(f"{operation}: bad {name}, expected an integer >= {least}, got {value!r}")
    return checked


def choice(operation: str, what: str, word: Any, words: Any) -> Any:
    """Return `word` if it is one of a `Literal`'s values.

    Raises:
        ValueError: the word is unknown.
    """
    known = get_args(words)
    if word not in known:
        raise ValueError(
            f"{operation}: no such {what}, expected one of {' '.join(known)}, got {word!r}"
        )
    return word
