"""Measured link costs: alpha (latency), beta (per byte sent) and gamma (per byte combined).

For each number, the first of three sources counts:

1. a setting, `UNISONO_NODE_LINK` or `UNISONO_NETWORK_LINK`, such as "alpha=2us,beta=8GB/s";
2. the file that `python -m collectives tune` wrote on this cluster
   (`collectives.core.tuning_file`);
3. the defaults below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = [
    "DEFAULT",
    "LinkCost",
    "MeasuredMachine",
    "Machine",
    "defaults",
    "facts",
    "with_overrides",
    "parse",
    "seconds",
    "seconds_per_byte",
    "table",
]


class LinkCost(NamedTuple):
    """Cost of one way of moving bytes."""

    alpha: float  # seconds per message
    beta: float  # seconds per byte moved
    gamma: float  # seconds per byte combined with another, for bytes that arrived this way
    eager: float = math.inf  # seconds per small message of compiled code; at most alpha
    program: float = math.inf  # part of alpha spent in each of the two programs; at most half
    call: float = 0.0  # seconds of Python before the messages of a call, for any size

    def compiled(self) -> LinkCost:
        """Return the cost of messages from compiled code (`algorithms.eager`)."""
        return self._replace(alpha=min(self.alpha, self.eager))


class Machine(NamedTuple):
    """The links of a cluster."""

    shared: LinkCost  # the node engine
    node: LinkCost  # messages between ranks of a node
    network: LinkCost  # messages between nodes; beta is for a node's link, in either direction

    @property
    def inside(self) -> float:
        """Seconds that a message inside a node costs each of its two programs."""
        # At most half of alpha: both programs take part in it.
        return min(self.node.program, self.node.alpha / 2)

    @property
    def between(self) -> float:
        """Seconds that a message between nodes costs each of its two programs.

        The rest of alpha is latency. If not measured, the cost of a message inside a node.
        """
        if self.network.program < math.inf:
            return min(self.network.program, self.network.alpha / 2)
        return min(self.inside, self.network.alpha / 2)


class MeasuredMachine(NamedTuple):
    """The links, and a text about the source of each."""

    machine: Machine
    sources: tuple[str, str, str]  # in the order of `Machine`


# Measured on two cores of an AMD EPYC with Open MPI 5.0.11. `shared`: a planned all-reduce of two
# ranks takes 0.32 us for 8 bytes, 3.3 us for 64 KiB, 0.95 ms for 16 MiB. `node`: a step of a ring
# of two ranks takes 8.2 us for 4 KiB, 0.23 to 0.48 ms for 4 MiB. gamma: numpy.add of float32 in
# place, 16 MiB in 0.56 ms. `network`: a link shaped to 1 Gbit/s between network namespaces, 4 MiB
# in 35.5 ms; 8 bytes take 16 us between two machines, and 0.3 ms if four share the two cores; the
# number here is in between. A faster network needs its own figures. `eager`: on two cores of an
# Intel Xeon.
DEFAULT = Machine(
    shared=LinkCost(alpha=3.2e-7, beta=2.3e-11, gamma=2.3e-11),
    node=LinkCost(alpha=8.2e-6, beta=8e-11, gamma=3.3e-11, eager=2e-6),
    network=LinkCost(alpha=7e-5, beta=8.5e-9, gamma=3.3e-11, eager=1.4e-5),
)

_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "ps": 1e-12}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"K": 1024.0, "M": 1024.0**2, "G": 1024.0**3, "T": 1024.0**4}


def seconds(text: str) -> float:
    """Parse a time, with or without a unit.

    Raises:
        ValueError: the text is not a time above zero.

    Example:
        >>> seconds("2us"), seconds("0.5 ms"), seconds("1e-6")
        (2e-06, 0.0005, 1e-06)
    """
    number, unit = _split_unit(text)
    # Infinite and zero costs would make the model useless.
    if unit not in _SECONDS or not 0 < number < math.inf:
        raise ValueError(f"not a time, expected one above 0 as 2us, 0.1ms or 2e-6, got {text!r}")
    return _times(number, _SECONDS[unit])


def seconds_per_byte(text: str) -> float:
    """Parse the cost of a byte: a rate, or a time.

    Raises:
        ValueError: the text is neither, or not above zero.

    Example:
        >>> seconds_per_byte("8GB/s"), seconds_per_byte("1Gbit/s"), seconds_per_byte("0.1ns/B")
        (1.25e-10, 8e-09, 1e-10)
    """
    number, unit = _split_unit(text)
    if 0 < number < math.inf:
        if rate := re.fullmatch("([kKMGT]?)(i?)(B|bit)/s", unit):
            prefix, binary, of = rate.groups()
            if prefix or not binary:
                # A binary prefix needs a letter: "iB/s" is not a unit.
                factor = (_BINARY if binary else _PREFIXES)[prefix.upper()]
                return (1 if of == "B" else 8) / (number * factor)
        if unit.removesuffix("/B") in _SECONDS:
            return _times(number, _SECONDS[unit.removesuffix("/B")])
    raise ValueError(
        "not a rate or a time of a byte, expected one above 0 as 8GB/s, 100Gbit/s, 0.12ns or "
        f"1.2e-10, got {text!r}"
    )


def _split_unit(text: str) -> tuple[float, str]:
    """Split "8GB/s" into its number and its unit; NaN if there is no number."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(\D*)", text.strip())
    try:
        return (float(match[1]), match[2].strip()) if match else (math.nan, "")
    except ValueError:
        return math.nan, ""


def _times(number: float, unit: float) -> float:
    """Multiply, rounded so that "2us" becomes 2e-06."""
    return float(f"{number * unit:.12g}")


_READERS: dict[str, Callable[[str], float]] = {
    "alpha": seconds,
    "beta": seconds_per_byte,
    "gamma": seconds_per_byte,
    "eager": seconds,
    "program": seconds,
    "call": seconds,
}
# Other numbers refine a link, and leave the source of the three.
_MESSAGES = ("alpha", "beta", "gamma")  # a setting with these replaces the whole link


def parse(text: str) -> dict[str, float]:
    """Parse the value of a link setting.

    Args:
        text: some of alpha, beta, gamma, eager, program and call, as "alpha=2us,beta=8GB/s".

    Returns:
        Name -> seconds, or seconds per byte.

    Raises:
        ValueError: the text is invalid.

    Example:
        >>> parse("alpha=2us, beta=100Gbit/s")
        {'alpha': 2e-06, 'beta': 8e-11}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in _READERS or name in found:
            raise ValueError(
                f"expected some of {', '.join(_READERS)}, each once, as alpha=2us,beta=8GB/s, "
                f"got {text!r}"
            )
        try:
            found[name] = _READERS[name](value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def defaults() -> MeasuredMachine:
    """Return the defaults."""
    return MeasuredMachine(DEFAULT, ("default", "default", "default"))


def with_overrides(
    links: MeasuredMachine, changes: Mapping[str, Mapping[str, float]], source: str
) -> MeasuredMachine:
    """Return links with some numbers replaced.

    Args:
        links: the links.
        changes: name of a link -> name of a number -> its value.
        source: source of the changes, as text; "{}" is replaced by the link's name in capitals.
    """
    machine = links.machine._asdict()
    sources = dict(zip(Machine._fields, links.sources, strict=True))
    # Without numbers the source of the link stays.
    for name, numbers in changes.items():
        if not numbers:
            continue
        # Fewer numbers leave the rest to the earlier source, which the text then names.
        whole = numbers.keys() >= set(_MESSAGES)
        own = source.replace("{}", name.upper())
        sources[name] = own if whole else f"{own} ({' '.join(numbers)}), else {sources[name]}"
        machine[name] = machine[name]._replace(**numbers)
    return MeasuredMachine(
        Machine(**machine), (sources["shared"], sources["node"], sources["network"])
    )


def facts(links: MeasuredMachine) -> dict[str, dict[str, Any]]:
    """Return the costs of each link in seconds, None where a link has none, and their sources."""

    def finite(link: LinkCost) -> dict[str, float | None]:
        return {name: x if math.isfinite(x) else None for name, x in link._asdict().items()}

    return {
        name: {**finite(link), "from": source}
        for (name, link), source in zip(links.machine._asdict().items(), links.sources, strict=True)
    }


def table(links: MeasuredMachine) -> str:
    """Return the links and their sources as a table for people."""
    rows = [
        f"{'link':<10}{'us/message':>12}{'us/eager':>12}{'ns/byte':>12}"
        f"{'ns/byte reduced':>18}  from"
    ]
    for (name, link), source in zip(links.machine._asdict().items(), links.sources, strict=True):
        # The node engine sends no messages of compiled code.
        eager = "-" if name == "shared" else f"{1e6 * link.compiled().alpha:.2f}"
        numbers = f"{1e6 * link.alpha:12.2f}{eager:>12}{1e9 * link.beta:12.4f}"
        rows.append(f"{name:<10}{numbers}{1e9 * link.gamma:18.4f}  {source}")
    return "\n".join(rows)
