"""Consistency check: compares parameters of all ranks by checksum.

What has to be equal is told in facts. Every rank makes one hash of all of its facts, and the hashes
are compared by one small message. Only where they differ the facts themselves are exchanged, and
every rank finds the same first difference in them::

    Fingerprint(kind="parameter", name="fc.weight: float32 of shape (10, 64)", words="9ae0daaf")
    Fingerprint(kind="setting", name="learning_rate", words="0.1")

The checksum of an array is the CRC-32C of its memory: bits are compared, so that a NaN equals
itself and -0.0 differs from 0.0.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

import collectives as cc
from collectives import extend
from strategies.core import agreement, array_ops
from strategies.core.pytree import extra_states, is_module, named_leaves, state_dict_of, value_of
from strategies.optimizers.base import Optimizer

__all__ = [
    "ON_PURPOSE",
    "Compare",
    "Fingerprint",
    "Kind",
    "check_consistent",
    "checksum",
    "compare",
    "description",
    "fingerprint_of",
    "fingerprints_of",
    "fingerprints_of_optimizer",
    "fingerprints_of_state",
    "setting",
    "settings_of",
]

Compare = Literal["all", "parameters", "nothing"]
Kind = Literal["value", "parameter", "state", "setting", "update"]

_MOST_RANKS = 8  # named in an error
_OF_SHAPE = " of shape "

# Elements of a setting that are compared. A longer array in a parameter group is a buffer of the
# optimizer, which may be uninitialized: only its type is compared.
_MOST_NUMBERS = 16


class Fingerprint(NamedTuple):
    """One thing that has to be equal on all ranks.

    Attributes:
        kind: what it is a part of.
        name: for people; of an array also its dtype and shape.
        words: its value, or its checksum.
    """

    kind: Kind
    name: str
    words: str


ON_PURPOSE = 'compare="parameters" is for settings that differ on purpose'

# What a kind is called, and what to do where it differs before the first step.
_KINDS: dict[Kind, tuple[str, str]] = {
    "value": ("values", ""),
    "parameter": (
        "parameters",
        "call strategies.broadcast_parameters(...) before the first step",
    ),
    "state": (
        "optimizer state",
        "call strategies.broadcast_optimizer_state(...) before the first step",
    ),
    "setting": ("settings", ON_PURPOSE),
    "update": ("updates of the same gradients, as by another learning rate", ON_PURPOSE),
}


def check_consistent(structure: Any, *, comm: cc.Communicator | None = None) -> None:
    """Raise an error on all ranks unless all of them hold the same arrays, bit by bit.

    As if every rank compared its arrays with those of rank 0, names, shapes and dtypes included.

    *Collective*: all ranks.

    Args:
        structure: a module of PyTorch: its parameters, all its buffers, and the arrays, numbers,
            text and bytes of its extra state; or arrays of any library and dtype, variables,
            numbers and text in nested dicts, lists, tuples and trees of JAX.
        comm: the ranks; the whole job if None.

    Raises:
        MismatchError: ranks differ; on all ranks. It names the first array that does, and where.
        TypeError: something is not an array, a number or text; on all ranks.

    Cost: one read of all arrays, 60 to 150 ms per GB on the host, and one message of 17 bytes to
    every rank; arrays on a device are copied to the host for it, 64 MiB at a time. The checksums
    themselves are exchanged only where the ranks differ.

    Example:
        >>> import numpy as np
        >>> check_consistent({"w": np.ones(3), "step": 7})
    """
    comm = cc.init() if comm is None else comm
    if isinstance(structure, Iterator):
        structure = list(structure)

    def facts() -> list[Fingerprint]:
        extra = extra_states(structure) if is_module(structure) else {}
        states = named_leaves({name: module.get_extra_state() for name, module in extra.items()})
        values = ((name, _bytes_as_array(value)) for name, value in states)
        return [
            *fingerprints_of("value", named_leaves(state_dict_of(structure))),
            *fingerprints_of(
                "value", ((name, value) for name, value in values if _is_comparable(value))
            ),
        ]

    compare(comm, "check_consistent", facts)


def compare(
    comm: cc.Communicator,
    what: str,
    facts: Callable[[], Sequence[Fingerprint]],
    *,
    earlier: str | None = None,
    remedy: str | None = None,
) -> None:
    """Raise an error on all ranks unless the facts of all are the same.

    *Collective*.

    Args:
        comm: the ranks.
        what: the operation, for errors.
        facts: makes those of this rank; an error of it is raised on all.
        earlier: if the ranks were alike before, when that was: then no broadcast was forgotten.
        remedy: what the error advises; None: the advice for each kind.

    Raises:
        MismatchError: they are not; names the first difference of each kind.
        Exception: as `raise_everywhere`.
    """
    explain = partial(_explain, earlier=earlier, remedy=remedy)
    agreement.compare(comm, what, lambda: (None, facts()), explain)


def fingerprints_of(kind: Kind, leaves: Iterable[tuple[str, Any]]) -> list[Fingerprint]:
    """Describe arrays, variables, numbers and text by their names and checksums.

    Raises:
        TypeError: something is none of these.
    """
    return [fingerprint_of(kind, name, value_of(leaf)) for name, leaf in leaves]


def fingerprint_of(kind: Kind, name: str, value: Any) -> Fingerprint:
    """Describe an array, a number or text.

    Raises:
        TypeError: it is none of these.
    """
    if array_ops.is_array(value):
        form = f"{name}: {array_ops.dtype_name(value)}{_OF_SHAPE}{tuple(value.shape)}"
        return Fingerprint(kind, form, checksum(value))
    if _is_comparable(value):
        return Fingerprint(kind, f"{name}: {type(value).__name__}", repr(value))
    raise TypeError(f"expected arrays, numbers and text, got {type(value).__name__} ({name})")


def _is_comparable(value: Any) -> bool:
    return array_ops.is_array(value) or isinstance(value, (numbers.Number, str))


def _bytes_as_array(value: Any) -> Any:
    return np.frombuffer(value, np.uint8) if isinstance(value, (bytes, bytearray)) else value


def checksum(array: Any) -> str:
    """Return the CRC-32C of an array's memory, on any device, in the order of its elements."""
    from google_crc32c import extend  # 6 to 16 GB/s a core, where zlib's CRC-32 makes 3

    crc = 0
    for part in array_ops.byte_views(array):
        crc = extend(crc, part)
    return f"{crc:08x}"


def setting(name: str, value: Any) -> Fingerprint:
    """Return the fact of an optimizer's setting, by the `description` of its value."""
    return Fingerprint("setting", name, description(value))


def description(value: Any) -> str:
    """Describe the value of a setting: numbers by value, whatever their type.

    Example:
        >>> description((np.float32(0.5), 1, True)), description(np.zeros(1000))
        ('(0.5, 1.0, True)', 'of ndarray')
    """
    if hasattr(value, "tolist") and math.prod(value.shape) <= _MOST_NUMBERS:
        value = value.tolist()  # an array of any library
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(description, value))})"
    return f"of {type(value).__qualname__}"


def fingerprints_of_state(state: Any) -> list[Fingerprint]:
    """Describe the arrays, numbers and texts of an optimizer's state, whatever else it may hold."""
    return fingerprints_of(
        "state", ((name, x) for name, x in named_leaves(state) if _is_comparable(x))
    )


def fingerprints_of_optimizer(optimizer: Any) -> list[Fingerprint]:
    """Describe the state of an optimizer of arrays."""
    state = optimizer.state_dict() if callable(getattr(optimizer, "state_dict", None)) else None
    return fingerprints_of_state(state)


def settings_of(optimizer: Any, *, schedules: bool = True) -> dict[str, Any]:
    """Return the class and the arguments of an optimizer of arrays by name.

    Args:
        optimizer: an optimizer; for other packages' classes only its `learning_rate` is returned.
        schedules: whether to include schedules, as their values for the current step.
    """
    given = {"learning_rate": getattr(optimizer, "learning_rate", None)}
    if isinstance(optimizer, Optimizer):
        given = optimizer.settings
    found: dict[str, Any] = {"class": type(optimizer).__qualname__}
    for name, value in given.items():
        if not callable(value):
            found[name] = value
        elif schedules:
            found[name] = value(optimizer.step)
    return found


def _explain(
    comm: cc.Communicator,
    what: str,
    told: Sequence[Sequence[Fingerprint]],
    *,
    earlier: str | None,
    remedy: str | None,
) -> str:
    """Say in what the ranks differ, given the facts of all, and what helps."""
    details: list[str] = []
    helps: list[str] = []
    for kind, (title, advice) in _KINDS.items():
        ranks = [[fact for fact in facts if fact.kind == kind] for facts in told]
        if kind in ("value", "parameter"):
            other = agreement.first_difference(
                comm, what, [[fact.name for fact in facts] for facts in ranks]
            )
            if other is not None:
                return other
        if kind == "update" and details:
            break  # of other parameters or another state
        detail = _difference(comm, ranks)
        if detail is not None:
            details.append(f"{title}, {detail}")
            helps.append(advice)
    since = "" if earlier is None else f", which were alike {earlier}"
    help_text = remedy or ("" if earlier else "; ".join(filter(None, helps)))
    return f"{what}: ranks differ in their {' and in their '.join(details)}{since}" + (
        help_text and f"; {help_text}"
    )


def _difference(comm: cc.Communicator, ranks: Sequence[Sequence[Fingerprint]]) -> str | None:
    """Name the first thing that differs between facts of one kind; None if nothing does."""
    own: list[dict[str, str]] = [{} for _ in ranks]
    for words, facts in zip(own, ranks, strict=True):
        for name, value in ((fact.name, fact.words) for fact in facts):
            words[name] = f"{words[name]} {value}" if name in words else value
    names = dict.fromkeys(name for words in own for name in words)
    columns = {name: [words.get(name, "absent") for words in own] for name in names}
    different = [name for name, column in columns.items() if len(set(column)) > 1]
    if not different:
        return None
    name, column = different[0], columns[different[0]]
    others = [rank for rank, words in enumerate(column) if words != column[0]]
    more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
    named = functools.partial(extend.describe_ranks, comm)
    if _OF_SHAPE not in name:  # whose words can be read
        own_words = f"{column[0]} on {named(0)}"
        return f"{name} is {own_words}, {column[others[0]]} on {named(others[0])}{more}"
    where = named(*others[:_MOST_RANKS]) + (" ..." if others[_MOST_RANKS:] else "")
    return f"{name} on {where} is not as on {named(0)}{more}"
