"""Validation and averaging of a worker's gradients before a push."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from strategies.averaging.local_replicas import ReplicaGradients, mean_over_replicas
from strategies.core.array_ops import dtype_name
from strategies.core.sparse import Gradient, Rows, checked_rows
from strategies.parameter_server.variable import ServedVariable
from strategies.replicas.replica_view import to_host

__all__ = ["Pairs", "checked"]

Pairs = list[tuple[Gradient, ServedVariable]]


def checked(
    replicas: Sequence[ReplicaGradients], variables: Mapping[str, ServedVariable]
) -> tuple[Pairs, int | None]:
    """Return the gradients of a worker as messages carry them, and of how many rows they are.

    Args:
        replicas: of this worker.
        variables: of the strategy, by name.

    Returns:
        Pairs of those that there are, none if they are the mean of no rows; examples.

    Raises:
        ValueError: a shape or dtype does not fit, a variable is given twice or is another's.
        TypeError: `examples` is not an integer.
    """
    own = mean_over_replicas(replicas)
    pairs: Pairs = []
    names: set[str] = set()
    for gradient, variable in own.pairs:
        known = variables.get(getattr(variable, "name", ""))
        if known is None or known is not variable:
            raise ValueError(
                f"apply_gradients: expected a variable of this strategy, got {variable!r:.200}"
            )
        if known.name in names:
            raise ValueError(f"apply_gradients: a variable is given twice (variable: {known.name})")
        names.add(known.name)
        if gradient is not None:
            given = _on_host(gradient)
            where = f"variable: {known.name}"
            checked_rows(given, known.shape, dtype_name(known), "apply_gradients", where)
            pairs.append((given, known))
    examples = _count(own.examples)
    return [] if examples == 0 else pairs, examples


def _on_host(gradient: Any) -> Gradient:
    """Return a gradient as messages carry it."""
    if isinstance(gradient, Rows):
        return Rows(gradient.indices, to_host(gradient.values))
    return to_host(gradient)


def _count(examples: Any) -> int | None:
    """Return a number of examples as one that messages can carry."""
    try:
        return None if examples is None else operator.index(examples)
    except TypeError:
        raise TypeError(
            f"apply_gradients: bad examples, expected an integer >= 0, got {examples!r}"
        ) from None
