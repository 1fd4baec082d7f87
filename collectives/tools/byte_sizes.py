"""Parsing and formatting of byte counts."""

from __future__ import annotations

__all__ = ["size_text", "sizes"]


def sizes(text: str) -> list[int]:
    """Parse byte counts: "FIRST:LAST" (in steps of 4 times, and LAST), or "A,B,C".

    Raises:
        ValueError: the text is neither.

    Example:
        >>> sizes("8:1K"), sizes("512,2M")
        ([8, 32, 128, 512, 1024], [512, 2097152])
    """
    first, colon, last = text.partition(":")
    if not colon:
        return [_bytes(part) for part in text.split(",")]
    size, most = _bytes(first), _bytes(last)
    if size > most:
        raise ValueError(f"sizes: expected FIRST <= LAST, got {text!r}")
    steps = []
    while size < most:
        steps.append(size)
        size *= 4
    return [*steps, most]


_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def _bytes(text: str) -> int:
    # KiB, KB and K mean the same here.
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    digits = number.removesuffix(unit)
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"sizes: not a number of bytes, expected 8, 64K, 16M or 1G, got {text!r}")
    return int(digits) << _UNITS[unit]


def size_text(nbytes: int) -> str:
    """Format a byte count for people, as "64K" if that is exact."""
    for unit, shift in reversed(_UNITS.items()):
        # Only exact multiples, so that no text shows a rounded size.
        if shift and nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)
