"""`PerReplica`: one value per replica of this process."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from strategies.core.pytree import leaves, map_leaves, zip_leaves

__all__ = ["PerReplica", "differs", "regroup", "select"]


@dataclass(frozen=True)
class PerReplica:
    """The values of the replicas of this process, in their order.

    Attributes:
        values: one object per replica.
    """

    values: tuple[Any, ...]


def regroup(structures: list[Any], operation: str) -> Any:
    """Return one structure whose leaves combine the corresponding leaves of the replicas.

    A leaf that is the same object for all replicas stays unchanged; other leaves become a
    `PerReplica`. Numbers always do, because equal numbers may or may not be one object.

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
    """Return the structure as one replica sees it; the same object if it has no `PerReplica`.

    Example:
        >>> select([PerReplica((1, 2)), "all"], 1)
        [2, 'all']
    """
    # The same object, so that `regroup` of an untouched structure finds it again.
    if not differs(structure):
        return structure

    def one(leaf: Any) -> Any:
        return leaf.values[local_id] if isinstance(leaf, PerReplica) else leaf

    return map_leaves(one, structure)


def differs(structure: Any) -> bool:
    """Return whether the structure contains a `PerReplica`."""
    return any(isinstance(leaf, PerReplica) for leaf in leaves(structure))


def _group(values: tuple[Any, ...]) -> Any:
    first = values[0]
    # By identity: comparing arrays would read them, and give arrays instead of a bool.
    same = all(value is first for value in values)
    return first if same and not isinstance(first, numbers.Number) else PerReplica(values)
