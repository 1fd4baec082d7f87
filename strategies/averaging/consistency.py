"""Consistency check: compares parameters of all ranks by checksum.

Data that must be equal is described by facts. Every rank hashes all of its facts, and the hashes
are compared by one small message. Only if they differ the ranks exchange the facts, and every rank
finds the same first difference::

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

_MOST_RANKS = 8  # maximum number of ranks named in an error
_OF_SHAPE = " of shape "

# Maximum size of an array in a setting that is compared. A larger array in a parameter group is a
# buffer of the optimizer, which may be uninitialized: only its type is compared.
_MOST_NUMBERS = 16


class Fingerprint(NamedTuple):
    """A fact that must be equal on all ranks.

    Attributes:
        kind: kind of data that it describes.
        name: name for errors; for an array also its dtype and shape.
        words: value, or checksum.
    """

    kind: Kind
    name: str
    words: str


ON_PURPOSE = 'compare="parameters" is for settings that differ on purpose'

# Kind -> its name in errors, and the remedy if it differs before the first step.
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

    As if every rank compared its arrays with those of rank 0, including names, shapes and dtypes.

    *Collective*: all ranks.

    Args:
        structure: a PyTorch module: its parameters, all its buffers, and the arrays, numbers, text
            and bytes of its extra state; or arrays of any library and dtype, variables, numbers and
            text in nested dicts, lists, tuples and trees of JAX.
        comm: the ranks; None for the whole job.

    Raises:
        MismatchError: ranks differ; on all ranks. Names the first different array and the ranks.
        TypeError: a leaf is not an array, a number or text; on all ranks.

    Cost: one read of all arrays, 60 to 150 ms per GB on the host, and one message of 17 bytes to
    every rank. Arrays on a device are copied to the host for it, 64 MiB at a time. The checksums
    are exchanged only if the ranks differ.

    Example:
        >>> import numpy as np
        >>> check_consistent({"w": np.ones(3), "step": 7})
    """
    comm = extend.comm_or_world(comm, "check_consistent")
    if isinstance(structure, Iterator):
        # `facts` may be read twice, and an iterator only once.
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
    """Raise an error on all ranks unless all ranks have the same facts.

    *Collective*.

    Args:
        comm: the ranks.
        what: name of the operation, for errors.
        facts: returns the facts of this rank; its error is raised on all ranks.
        earlier: when the ranks last agreed, for errors that then do not advise a broadcast.
        remedy: advice of the error; None uses the advice for each kind.

    Raises:
        MismatchError: the facts differ; names the first difference of each kind.
        Exception: as `raise_everywhere`.
    """
    explain = partial(_explain, earlier=earlier, remedy=remedy)
    agreement.compare(comm, what, lambda: (None, facts()), explain)


def fingerprints_of(kind: Kind, leaves: Iterable[tuple[str, Any]]) -> list[Fingerprint]:
    """Describe arrays, variables, numbers and text by their names and checksums.

    Raises:
        TypeError: a leaf has another type.
    """
    return [fingerprint_of(kind, name, value_of(leaf)) for name, leaf in leaves]


def fingerprint_of(kind: Kind, name: str, value: Any) -> Fingerprint:
    """Describe an array, a number or text.

    Raises:
        TypeError: the value has another type.
    """
    if array_ops.is_array(value):
        # Shape and dtype are part of the name, so that they are compared before any values.
        form = f"{name}: {array_ops.dtype_name(value)}{_OF_SHAPE}{tuple(value.shape)}"
        return Fingerprint(kind, form, checksum(value))
    if _is_comparable(value):
        # `repr` of a float has all of its bits.
        return Fingerprint(kind, f"{name}: {type(value).__name__}", repr(value))
    raise TypeError(f"expected arrays, numbers and text, got {type(value).__name__} ({name})")


def _is_comparable(value: Any) -> bool:
    return array_ops.is_array(value) or isinstance(value, (numbers.Number, str))


def _bytes_as_array(value: Any) -> Any:
    return np.frombuffer(value, np.uint8) if isinstance(value, (bytes, bytearray)) else value


def checksum(array: Any) -> str:
    """Return the CRC-32C of an array's memory, on any device, in the order of its elements."""
    from google_crc32c import extend  # 6 to 16 GB/s per core; zlib's CRC-32 reaches 3

    # The parts are chained, so the checksum does not depend on their size.
    crc = 0
    for part in array_ops.byte_views(array):
        crc = extend(crc, part)
    return f"{crc:08x}"


def setting(name: str, value: Any) -> Fingerprint:
    """Return the fact of an optimizer's setting, with the `description` of its value."""
    return Fingerprint("setting", name, description(value))


def description(value: Any) -> str:
    """Describe the value of a setting; numbers by value, regardless of their type.

    Example:
        >>> description((np.float32(0.5), 1, True)), description(np.zeros(1000))
        ('(0.5, 1.0, True)', 'of ndarray')
    """
    # Arrays of any library have `tolist`, and zero dimensions count as one number.
    if hasattr(value, "tolist") and math.prod(value.shape) <= _MOST_NUMBERS:
        value = value.tolist()  # an array of any library
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    # float(1) and 1 are equal settings: programs write both.
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(description, value))})"
    return f"of {type(value).__qualname__}"


def fingerprints_of_state(state: Any) -> list[Fingerprint]:
    """Describe the arrays, numbers and texts of an optimizer's state; ignore other values."""
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
            # The value for this step; comparing functions would compare addresses.
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
    """Describe the differences of the ranks, given the facts of all ranks, and a remedy."""
    details: list[str] = []
    helps: list[str] = []
    for kind, (title, advice) in _KINDS.items():
        # One kind after another, so that the error names all kinds that differ.
        ranks = [[fact for fact in facts if fact.kind == kind] for facts in told]
        if kind in ("value", "parameter"):
            # Values are comparable only if all ranks have the same arrays.
            other = agreement.first_difference(
                comm, what, [[fact.name for fact in facts] for facts in ranks]
            )
            if other is not None:
                return other
        if kind == "update" and details:
            break  # different parameters or states explain different updates
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
    """Describe the first difference between facts of one kind; None if they are equal."""
    own: list[dict[str, str]] = [{} for _ in ranks]
    # A name may repeat: its values are joined, so that none of them is lost.
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
    if _OF_SHAPE not in name:  # the value is readable, not a checksum
        own_words = f"{column[0]} on {named(0)}"
        return f"{name} is {own_words}, {column[others[0]]} on {named(others[0])}{more}"
    where = named(*others[:_MOST_RANKS]) + (" ..." if others[_MOST_RANKS:] else "")
    return f"{name} on {where} is not as on {named(0)}{more}"
