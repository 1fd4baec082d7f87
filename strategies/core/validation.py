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

    A float, and no NumPy scalar, since that would widen the arithmetic of float32 arrays.

    Args:
        operation: beginning of the message.
        name: of the argument.
        value: anything that `float` takes, but no text.
        least: smallest number that is right.
        below: smallest number that is too large.
        context: end of the message.

    Raises:
        ValueError: it is not such a number.
    """
    try:
        checked = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        checked = math.nan
    if not least <= checked < below:
        word = name.replace(" ", "_")
        bounds = (
            f"a number >= {least:g}" if below == math.inf else f"{least:g} <= {word} < {below:g}"
        )
        got = repr(value) if isinstance(value, (str, bytes)) else value  # so that text is seen
        raise ValueError(f"{operation}: bad {name}, expected {bounds}, got {got}{context}")
    return checked


def integer(operation: str, name: str, value: Any, *, least: int = 1) -> int:
    """Return `value` if it is an integer >= least, of Python or NumPy, but no bool.

    Raises:
        ValueError: it is not.
    """
    try:
        checked = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        checked = least - 1
    if checked < least:
        raise ValueError(f"{operation}: bad {name}, expected an integer >= {least}, got {value!r}")
    return checked


def choice(operation: str, what: str, word: Any, words: Any) -> Any:
    """Return `word` if it is one of a `Literal`.

    Raises:
        ValueError: it is not.
    """
    known = get_args(words)
    if word not in known:
        raise ValueError(
            f"{operation}: no such {what}, expected one of {' '.join(known)}, got {word!r}"
        )
    return word
