"""State of variables on ps tasks as named arrays.

::

    variable/w                  the variable                                 its shape
    optimizer/momentum/w        a slot of its optimizer                      its shape
    optimizer/step/w            how often each part of it was updated        (number of parts,)
    updates                     of each ps                                   (number of ps tasks,)

What was saved with some number of ps tasks and parts goes on with another one as well. Arrays are
joined and cut again; of counts that differ among parts or ps tasks, the largest holds for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies.checkpoint.boxes import Slice
from strategies.parameter_server.variable import ServedVariable
from strategies.variables.stored_variable import StoredVariable

__all__ = [
    "ServerState",
    "divided",
    "is_large",
    "joined",
    "load",
    "own_states",
    "slices",
    "state_of",
]

Array = npt.NDArray[Any]

_VALUE = "value"  # stands where the name of a slot stands, for the variable itself
_UPDATES = "updates"


class ServerState(NamedTuple):
    """What a checkpoint keeps of a part.

    Attributes:
        counts: "step", the updates so far, and what else the optimizer counts.
        arrays: "value" and name of each slot -> array, of the part's shape.
    """

    counts: dict[str, int]
    arrays: dict[str, Array]


def state_of(part: StoredVariable) -> ServerState:
    """Return all of a part, as it is now."""
    assert part.optimizer is not None
    found = ServerState({}, {_VALUE: part.view()})
    for key, entry in part.optimizer.state_dict().items():
        kind = key.removesuffix(f"/{part.name}")
        (found.arrays if isinstance(entry, np.ndarray) else found.counts)[kind] = entry
    return found


def load(part: StoredVariable, state: ServerState) -> None:
    """Let a part go on from a state.

    Raises:
        ValueError: it belongs to another optimizer.
    """
    assert part.optimizer is not None
    entries: dict[str, Any] = {**state.counts, **state.arrays}
    value = entries.pop(_VALUE)
    part.optimizer.load_state_dict(
        {kind if kind == "step" else f"{kind}/{part.name}": entries[kind] for kind in entries}
    )
    part.writable(keep=False)[...] = value


def joined(
    variables: Iterable[ServedVariable], states: Mapping[str, ServerState], updates: Sequence[int]
) -> dict[str, Array]:
    """Return named arrays.

    Args:
        variables: whose state it is.
        states: name of a part -> its state.
        updates: of each ps.
    """
    result = {_UPDATES: np.array(updates, np.int64)}
    for variable in variables:
        parts = [states[part.name] for part in variable.parts]
        for kind in parts[0].arrays:
            pieces = [part.arrays[kind] for part in parts]
            whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            result[_key(kind, variable.name)] = whole
        for kind in parts[0].counts:
            counts = [part.counts[kind] for part in parts]
            result[_key(kind, variable.name)] = np.array(counts, np.int64)
    return result


def divided(
    saved: Mapping[str, npt.ArrayLike],
    variables: Iterable[ServedVariable],
    like: Mapping[str, ServerState],
    servers: int,
) -> tuple[dict[str, ServerState], list[int]]:
    """Return what each part takes, and the updates of each ps.

    Args:
        saved: what `joined` has given.
        variables: whose state it is to be.
        like: name of a part -> its state now.
        servers: how many ps tasks there are.

    Raises:
        ValueError: a name is missing or unknown, or a shape or a dtype does not fit.
    """
    rest = {name: np.asarray(value) for name, value in saved.items()}
    updates = _counts(_take(rest, _UPDATES), servers, _UPDATES)
    states: dict[str, ServerState] = {}
    for variable in variables:
        kinds = like[variable.parts[0].name]
        arrays = {}
        for kind, now in kinds.arrays.items():
            name = _key(kind, variable.name)
            arrays[kind] = _check_fit(_take(rest, name), variable.shape, now.dtype, name)
        counts = {}
        for kind in kinds.counts:
            name = _key(kind, variable.name)
            counts[kind] = _counts(_take(rest, name), len(variable.parts), name)
        pieces = {kind: variable.pieces(array) for kind, array in arrays.items()}
        for number, part in enumerate(variable.parts):
            states[part.name] = ServerState(
                {kind: counts[kind][number] for kind in counts},
                {kind: pieces[kind][number] for kind in pieces},
            )
    if rest:
        raise ValueError(
            f"load_state_dict: unknown names, expected those of this strategy's variables and "
            f"optimizer, got {sorted(rest)}"
        )
    return states, updates


def slices(
    variables: Iterable[ServedVariable],
    states: Mapping[str, ServerState],
    server: int,
    servers: int,
    updates: int,
) -> dict[str, Slice]:
    """Return what one ps holds of what `joined` gives; see `ParameterServerStrategy.state_slices`.

    Args:
        variables: whose state it is.
        states: name of each part there -> its state.
        server: index of the ps.
        servers: how many there are.
        updates: of the ps.

    Raises:
        ValueError: a ps has several parts of one variable: a slice is one box.
    """
    result = {_UPDATES: Slice(np.array([updates], np.int64), (server,), (servers,))}
    for variable, number in _own_parts(variables, states):
        state = states[variable.parts[number].name]
        start = (variable.offsets[number],) + (0,) * (len(variable.shape) - 1)
        for kind, array in state.arrays.items():
            where = start if variable.shape else ()
            result[_key(kind, variable.name)] = Slice(array, where, variable.shape)
        for kind, count in state.counts.items():
            one, whole = np.array([count], np.int64), (len(variable.parts),)
            result[_key(kind, variable.name)] = Slice(one, (number,), whole)
    return result


def is_large(name: str, part: Slice) -> bool:
    """Whether this is a variable or a slot with rows, of which a task reads its own only."""
    counts = name == _UPDATES or name.startswith(("optimizer/step/", "optimizer/updates/"))
    return bool(part.shape) and not counts


def own_states(
    given: Mapping[str, npt.ArrayLike],
    variables: Iterable[ServedVariable],
    like: Mapping[str, ServerState],
    server: int,
    servers: int,
) -> tuple[dict[str, ServerState], int]:
    """Return the state of each part of one ps, and its updates, from what `slices` has named.

    Raises:
        ValueError: a name is missing, or a shape or a dtype does not fit.
    """
    rest = {name: np.asarray(value) for name, value in given.items()}
    updates = _counts(_take(rest, _UPDATES), servers, _UPDATES)[server]
    states = {}
    for variable, number in _own_parts(variables, like):
        part = variable.parts[number].name
        arrays, counts = {}, {}
        for kind, now in like[part].arrays.items():
            name = _key(kind, variable.name)
            arrays[kind] = _check_fit(_take(rest, name), now.shape, now.dtype, name)
        for kind in like[part].counts:
            name = _key(kind, variable.name)
            counts[kind] = _counts(_take(rest, name), len(variable.parts), name)[number]
        states[part] = ServerState(counts, arrays)
    return states, updates


def _own_parts(
    variables: Iterable[ServedVariable], states: Mapping[str, ServerState]
) -> Iterator[tuple[ServedVariable, int]]:
    """Yield the variables of which a ps has a part, and the number of it."""
    for variable in variables:
        found = [n for n, part in enumerate(variable.parts) if part.name in states]
        if len(found) > 1:
            raise ValueError(
                f"state_slices: a ps has several parts of a variable, expected one at most, got "
                f"{len(found)} (variable: {variable.name})"
            )
        yield from ((variable, number) for number in found)


def _key(kind: str, variable: str) -> str:
    return f"variable/{variable}" if kind == _VALUE else f"optimizer/{kind}/{variable}"


def _take(rest: dict[str, Array], name: str) -> Array:
    if name not in rest:
        raise ValueError(f"load_state_dict: a name is missing, expected {name!r}")
    return rest.pop(name)


def _check_fit(array: Array, shape: tuple[int, ...], dtype: Any, name: str) -> Array:
    if (array.shape, array.dtype) != (shape, dtype):
        raise ValueError(
            f"load_state_dict: an array does not fit, expected {dtype} of shape {shape}, got "
            f"{array.dtype} of shape {array.shape} (name: {name})"
        )
    return array


def _counts(array: Array, number: int, name: str) -> list[int]:
    """Return counts for `number` parts or tasks, from those of as many or of others."""
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0:
        raise ValueError(
            f"load_state_dict: bad counts, expected integers >= 0 of shape (n,), got {array.dtype} "
            f"of shape {array.shape} (name: {name})"
        )
    return [int(n) for n in array] if array.size == number else [int(array.max())] * number
