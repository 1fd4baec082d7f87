"""State of variables on ps tasks as named arrays.

::

    variable/w                  the variable                                 its shape
    optimizer/momentum/w        a slot of its optimizer                      its shape
    optimizer/step/w            number of updates of each part               (number of parts,)
    updates                     number of updates of each ps                 (number of ps tasks,)

A state can be restored with other numbers of ps tasks and parts. Arrays are concatenated and split
again. If the numbers of parts or ps tasks differ, all counts become the largest saved count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import collectives as cc
from collectives import extend
from strategies.checkpoint.boxes import Slice
from strategies.parameter_server.variable import ServedVariable
from strategies.variables.variable_group import VALUE, VariableState

__all__ = [
    "UPDATES",
    "Piece",
    "check_same_updates",
    "divided",
    "is_large",
    "joined",
    "own_states",
    "pieces",
    "slices",
]

Array = npt.NDArray[Any]

UPDATES = "updates"
"""Name of the numbers of updates."""


def joined(
    variables: Iterable[ServedVariable], states: Mapping[str, VariableState], updates: Sequence[int]
) -> dict[str, Array]:
    """Return the state as named arrays.

    Args:
        variables: variables of the state.
        states: name of a part -> state.
        updates: number of updates of each ps.
    """
    result = {UPDATES: np.array(updates, np.int64)}
    for variable in variables:
        parts = [states[part.name] for part in variable.parts]
        # All parts have the same optimizer, so the first one names the slots.
        for kind in parts[0].arrays:
            pieces = [part.arrays[kind] for part in parts]
            # One part is returned in the memory of its message.
            whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            result[_key(kind, variable.name)] = whole
        for kind in parts[0].counts:
            # Counts per part, because parts are updated on different ps tasks.
            counts = [part.counts[kind] for part in parts]
            result[_key(kind, variable.name)] = np.array(counts, np.int64)
    return result


def divided(
    saved: Mapping[str, npt.ArrayLike],
    variables: Iterable[ServedVariable],
    like: Mapping[str, VariableState],
    servers: int,
) -> tuple[dict[str, VariableState], list[int]]:
    """Return the state of each part, and the number of updates of each ps.

    Args:
        saved: result of `joined`.
        variables: variables to restore.
        like: name of a part -> current state.
        servers: number of ps tasks.

    Raises:
        ValueError: a name is missing or unknown, or a shape or a dtype does not fit.
    """
    # Entries that are used are removed, so that unknown names remain.
    rest = {name: np.asarray(value) for name, value in saved.items()}
    operation = "load_state_dict"
    updates = _take_counts(operation, rest, UPDATES, servers)
    states: dict[str, VariableState] = {}
    for variable in variables:
        first = like[variable.parts[0].name]
        arrays, counts = _take_state(operation, rest, variable, first, variable.shape)
        pieces = {kind: variable.pieces(array) for kind, array in arrays.items()}
        for number, part in enumerate(variable.parts):
            states[part.name] = VariableState(
                {kind: counts[kind][number] for kind in counts},
                {kind: pieces[kind][number] for kind in pieces},
            )
    if rest:
        raise ValueError(
            f"{operation}: unknown names, expected those of this strategy's variables and "
            f"optimizer, got {sorted(rest)}"
        )
    return states, updates


def slices(
    variables: Iterable[ServedVariable],
    states: Mapping[str, VariableState],
    server: int,
    servers: int,
    updates: int,
) -> dict[str, Slice]:
    """Return one ps's slices of `joined`; see `ParameterServerStrategy.state_slices`.

    Args:
        variables: variables of the state.
        states: name -> state of each part on the ps.
        server: index of the ps.
        servers: number of ps tasks.
        updates: number of updates of the ps.

    Raises:
        ValueError: the ps has several parts of one variable: a slice is one box.
    """
    result = {UPDATES: Slice(np.array([updates], np.int64), (server,), (servers,))}
    for variable, number in _own_parts(variables, states):
        state = states[variable.parts[number].name]
        for piece in pieces(variable, number, state):
            array = state.arrays.get(piece.kind)
            if array is None:
                array = np.array([state.counts[piece.kind]], np.int64)
            result[piece.name] = Slice(array, piece.start, piece.shape)
    return result


class Piece(NamedTuple):
    """An array or a count of one part of a variable.

    Attributes:
        name: name in `joined`.
        kind: key in the state of the part.
        start: index of its first element in the array of this name.
        shape: shape of the array of this name.
    """

    name: str
    kind: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


def pieces(variable: ServedVariable, number: int, state: VariableState) -> Iterator[Piece]:
    """Yield the pieces of one part, from the kinds of its state.

    Args:
        variable: the variable.
        number: number of the part.
        state: state of the part; only the kinds are used.
    """
    # Parts are cut along the first axis alone.
    start = (variable.offsets[number],) + (0,) * (len(variable.shape) - 1)
    for kind in state.arrays:
        where = start if variable.shape else ()
        yield Piece(_key(kind, variable.name), kind, where, variable.shape)
    for kind in state.counts:
        # Like a variable of one number per part, so that a sharded checkpoint can store it.
        yield Piece(_key(kind, variable.name), kind, (number,), (len(variable.parts),))


def check_same_updates(comm: cc.Communicator, updates: int | None) -> None:
    """Check that all ps tasks have made the same number of updates; *collective* over all tasks.

    Args:
        comm: all tasks.
        updates: number of updates of this ps; None excludes this task.

    Raises:
        MismatchError: the numbers differ; on all tasks.
    """
    told = enumerate(comm.allgather_object(updates))
    by_rank = [(rank, count) for rank, count in told if count is not None]
    if len({count for _, count in by_rank}) > 1:
        counts = ", ".join(
            f"{count} on {extend.describe_ranks(comm, rank)}" for rank, count in by_rank
        )
        error = cc.MismatchError(
            f"state_slices: ps tasks are in different steps, expected no training meanwhile, got "
            f"updates {counts}"
        )
        raise extend.collective_error(comm, error)


def is_large(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether this is a variable or slot with rows, read in parts; False for counts."""
    # Counts are small, and each part needs one number of them, so they are read whole.
    counts = name == UPDATES or name.startswith(("optimizer/step/", "optimizer/updates/"))
    return bool(shape) and not counts


def own_states(
    given: Mapping[str, npt.ArrayLike],
    variables: Iterable[ServedVariable],
    like: Mapping[str, VariableState],
    server: int,
    servers: int,
) -> tuple[dict[str, VariableState], int]:
    """Return the state of each part of one ps, and its number of updates, from named arrays.

    Raises:
        ValueError: a name is missing, or a shape or a dtype does not fit.
    """
    rest = {name: np.asarray(value) for name, value in given.items()}
    operation = "load_state_slices"
    updates = _take_counts(operation, rest, UPDATES, servers)[server]
    states = {}
    for variable, number in _own_parts(variables, like):
        part = variable.parts[number].name
        shape = like[part].arrays[VALUE].shape
        arrays, counts = _take_state(operation, rest, variable, like[part], shape)
        # Counts are those of all parts, arrays only those of this ps.
        states[part] = VariableState({kind: counts[kind][number] for kind in counts}, arrays)
    return states, updates


def _own_parts(
    variables: Iterable[ServedVariable], states: Mapping[str, VariableState]
) -> Iterator[tuple[ServedVariable, int]]:
    """Yield each variable with a part on this ps, and the number of the part."""
    for variable in variables:
        found = [n for n, part in enumerate(variable.parts) if part.name in states]
        if len(found) > 1:
            raise ValueError(
                f"state_slices: a ps has several parts of a variable, expected one at most, got "
                f"{len(found)} (variable: {variable.name})"
            )
        yield from ((variable, number) for number in found)


def _key(kind: str, variable: str) -> str:
    return f"variable/{variable}" if kind == VALUE else f"optimizer/{kind}/{variable}"


def _take_state(
    operation: str,
    rest: dict[str, Array],
    variable: ServedVariable,
    like: VariableState,
    shape: tuple[int, ...],
) -> tuple[dict[str, Array], dict[str, list[int]]]:
    """Remove a variable's entries: return arrays of this shape, and the counts of each part."""
    arrays, counts = {}, {}
    for kind, now in like.arrays.items():
        name = _key(kind, variable.name)
        array = arrays[kind] = _take(operation, rest, name)
        if (array.shape, array.dtype) != (shape, now.dtype):
            raise ValueError(
                f"{operation}: an array does not fit, expected {now.dtype} of shape {shape}, "
                f"got {array.dtype} of shape {array.shape} (name: {name})"
            )
    for kind in like.counts:
        name = _key(kind, variable.name)
        counts[kind] = _take_counts(operation, rest, name, len(variable.parts))
    return arrays, counts


def _take(operation: str, rest: dict[str, Array], name: str) -> Array:
    if name not in rest:
        raise ValueError(
            f"{operation}: the state has no {name!r}, expected that of a strategy with the "
            "same variables and optimizer"
        )
    return rest.pop(name)


def _take_counts(operation: str, rest: dict[str, Array], name: str, number: int) -> list[int]:
    """Remove an entry: return `number` counts, or the saved maximum if the number differs."""
    array = _take(operation, rest, name)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0:
        raise ValueError(
            f"{operation}: bad counts, expected integers >= 0 of shape (n,), got {array.dtype} "
            f"of shape {array.shape} (name: {name})"
        )
    # With other parts, a count cannot be assigned to a part. The maximum keeps schedules and bias
    # corrections from going back.
    return [int(n) for n in array] if array.size == number else [int(array.max())] * number
