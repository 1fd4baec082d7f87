"""Numbers of bytes, times and rates as people write and read them."""

from __future__ import annotations

import math
import re

__all__ = ["seconds", "seconds_per_byte", "size_text", "sizes"]


def sizes(text: str) -> list[int]:
    """Read sizes in bytes: "FIRST:LAST" (each four times the one before, and the last), or "A,B,C".

    Raises:
        ValueError: it is neither.

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
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    digits = number.removesuffix(unit)
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"sizes: no number of bytes, expected 8, 64K, 16M or 1G, got {text!r}")
    return int(digits) << _UNITS[unit]


def size_text(nbytes: int) -> str:
    """Write a number of bytes for people, as "64K" where that is exact."""
    for unit, shift in reversed(_UNITS.items()):
        if shift and nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "ps": 1e-12}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"K": 1024.0, "M": 1024.0**2, "G": 1024.0**3, "T": 1024.0**4}


def seconds(text: str) -> float:
    """Read a time, with or without a unit.

    Raises:
        ValueError: it is none, or not above zero.

    Example:
        >>> seconds("2us"), seconds("0.5 ms"), seconds("1e-6")
        (2e-06, 0.0005, 1e-06)
    """
    number, unit = _split(text)
    if unit not in _SECONDS or not 0 < number < math.inf:
        raise ValueError(f"no time, expected one above 0 as 2us, 0.1ms or 2e-6, got {text!r}")
    return _times(number, _SECONDS[unit])


def seconds_per_byte(text: str) -> float:
    """Read what a byte costs: a rate, or a time.

    Raises:
        ValueError: it is neither, or not above zero.

    Example:
        >>> seconds_per_byte("8GB/s"), seconds_per_byte("1Gbit/s"), seconds_per_byte("0.1ns/B")
        (1.25e-10, 8e-09, 1e-10)
    """
    number, unit = _split(text)
    if 0 < number < math.inf:
        if rate := re.fullmatch("([kKMGT]?)(i?)(B|bit)/s", unit):
            prefix, binary, of = rate.groups()
            if prefix or not binary:
                factor = (_BINARY if binary else _PREFIXES)[prefix.upper()]
                return (1 if of == "B" else 8) / (number * factor)
        if unit.removesuffix("/B") in _SECONDS:
            return _times(number, _SECONDS[unit.removesuffix("/B")])
    raise ValueError(
        "no rate and no time of a byte, expected one above 0 as 8GB/s, 100Gbit/s, 0.12ns or "
        f"1.2e-10, got {text!r}"
    )


def _split(text: str) -> tuple[float, str]:
    """Cut "8GB/s" into its number and its unit; not a number where there is none."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(\D*)", text.strip())
    try:
        return (float(match[1]), match[2].strip()) if match else (math.nan, "")
    except ValueError:
        return math.nan, ""


def _times(number: float, unit: float) -> float:
    """Multiply so that "2us" is the number that people would write: 2e-06."""
    return float(f"{number * unit:.12g}")
