"""Process sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import collectives as cc
from strategies.horovod.controller.controller import Controller

__all__ = ["Bound", "ProcessSet", "global_process_set"]


class Bound(NamedTuple):
    """The state of a process set that has been added.

    Attributes:
        session: its `HorovodContext`.
        number: its number.
        ranks: its ranks of the world, sorted.
        comm: communicator for operations in the same order on all members; None on other ranks.
        controller: controller of named operations; None on other ranks.
    """

    session: Any
    number: int
    ranks: tuple[int, ...]
    comm: cc.Communicator | None
    controller: Controller | None


class ProcessSet:
    """Some ranks of the world, renumbered in their order.

    Args:
        ranks: ranks of the world, each at most once, in any order.

    Attributes:
        ranks: the ranks, sorted.
        process_set_id: its number; None before it is added and after it is removed.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        # Sorted, because members are numbered in the order of the world.
        self.ranks = sorted(int(rank) for rank in ranks)
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"ProcessSet: a rank is listed twice, got {self.ranks}")
        # Set by `init` or `add_process_set`; None means that the set is not usable.
        self._bound: Bound | None = None

    def __copy__(self) -> ProcessSet:
        """Return this set, so that a model that holds it can be copied."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self

    @property
    def process_set_id(self) -> int | None:
        """Its number; None if it is not added."""
        return None if self._bound is None else self._bound.number

    def included(self) -> bool | None:
        """Return whether this rank is a member; None if the set is not added."""
        return None if self._bound is None else self._bound.comm is not None

    def size(self) -> int | None:
        """Return the number of members; None if the set is not added."""
        return None if self._bound is None else len(self._bound.ranks)

    def rank(self) -> int | None:
        """Return this rank's number among the members; None if it is not a member."""
        comm = None if self._bound is None else self._bound.comm
        return None if comm is None else comm.rank

    def bind(self, bound: Bound | None) -> None:
        """Record that the set was added (or removed, if None)."""
        self._bound = bound
        # The global set gets its ranks by `init`.
        if bound is not None:
            self.ranks = list(bound.ranks)

    def bound(self, operation: str) -> Bound:
        """Return the state of the set.

        Raises:
            ValueError: the set is not added, or this rank is not a member.
        """
        bound = self._bound
        if bound is None:
            if self is global_process_set:
                raise ValueError(NOT_INITIALIZED)
            raise ValueError(
                f"{operation}: the process set was not added, expected hvd.init(process_sets=...) "
                f"or hvd.add_process_set, got {self}"
            )
        if bound.comm is None:
            raise ValueError(f"{operation}: this rank is not a member of {self}")
        return bound

    def own_ranks(self, operation: str) -> cc.Communicator:
        """Return the communicator of the members; on other ranks one of that rank alone.

        Raises:
            ValueError: the set is not added.
        """
        # On other ranks than members, steps are local.
        if self._bound is not None and self._bound.comm is None:
            alone: cc.Communicator = self._bound.session.alone()
            return alone
        comm = self.bound(operation).comm
        assert comm is not None
        return comm

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


NOT_INITIALIZED = "Horovod's names have not been initialized; call hvd.init()"

global_process_set = ProcessSet(())
"""All ranks."""
