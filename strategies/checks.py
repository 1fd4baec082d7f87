"""Numbers that users give, checked before they are used."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["number"]


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
