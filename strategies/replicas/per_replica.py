"""`PerReplica`: one value per replica of this process."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from strategies.core.pytree import map_leaves, zip_leaves

__all__ = ["PerReplica", "differs", "regroup", "select"]


@dataclass(frozen=True)
class PerReplica:
    """The values of the replicas of this process, in their order.

    Attributes:
        values: one for each, any objects.
    """

    values: tuple[Any, ...]


def regroup(structures: list[Any], operation: str) -> Any:
    """Return one structure whose leaves hold what the replicas have at this place.

    A leaf that is the same object for all replicas stays as it is, others become a `PerReplica`.
    Numbers always become one: whether two equal numbers are one object is an accident.

    Raises:
        ValueError: the structures differ.

    Example:
        >>> nothing = None
        >>> regroup([{"loss": 1.0, "left": nothing}, {"loss": 1.0, "left": nothing}], "run")
        {'loss': PerReplica(values=(1.0, 1.0)), 'left': None}
    """
    if len(structures) == 1:
        return structures[0]
    return zip_leaves(_group, structures, operation)


def select(structure: Any, local_id: int) -> Any:
    """Return the structure as one replica sees it; the object itself if all see the same.

    Example:
        >>> select([PerReplica((1, 2)), "all"], 1)
        [2, 'all']
    """
    if not differs(structure):
        return structure

    def one(leaf: Any) -> Any:
        return leaf.values[local_id] if isinstance(leaf, PerReplica) else leaf

    return map_leaves(one, structure)


def differs(structure: Any) -> bool:
    """Tell whether anything in the structure is a `PerReplica`."""
    if isinstance(structure, PerReplica):
        return True
    if isinstance(structure, dict):
        return any(map(differs, structure.values()))
    return isinstance(structure, (list, tuple)) and any(map(differs, structure))


def _group(values: tuple[Any, ...]) -> Any:
    first = values[0]
    same = all(value is first for value in values)
    return first if same and not isinstance(first, numbers.Number) else PerReplica(values)
