"""Process sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import collectives as cc
from strategies.horovod.controller.controller import Controller

__all__ = ["Bound", "ProcessSet", "global_process_set"]


class Bound(NamedTuple):
    """What a process set is once it has been added.

    Attributes:
        session: what it was added to.
        number: its own.
        ranks: of the world, sorted.
        comm: of operations that all members make in one order; None on other ranks.
        controller: of those that are found by name; None on other ranks.
    """

    session: Any
    number: int
    ranks: tuple[int, ...]
    comm: cc.Communicator | None
    controller: Controller | None


class ProcessSet:
    """Some ranks of the world, numbered anew in their order.

    Args:
        ranks: each at most once, in any order.

    Attributes:
        ranks: sorted.
        process_set_id: its number, None before it was added and after it was removed.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(int(rank) for rank in ranks)
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"ProcessSet: a rank is listed twice, got {self.ranks}")
        self._bound: Bound | None = None

    def __copy__(self) -> ProcessSet:
        """Return this set: a model that holds it can be copied."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self

    @property
    def process_set_id(self) -> int | None:
        """Its number."""
        return None if self._bound is None else self._bound.number

    def included(self) -> bool | None:
        """Whether this rank is a member; None unless it was added."""
        return None if self._bound is None else self._bound.comm is not None

    def size(self) -> int | None:
        """Return the number of members; None unless it was added."""
        return None if self._bound is None else len(self._bound.ranks)

    def rank(self) -> int | None:
        """Return this rank's number among the members; None if it has none."""
        comm = None if self._bound is None else self._bound.comm
        return None if comm is None else comm.rank

    def bind(self, bound: Bound | None) -> None:
        """Note that it was added, or removed."""
        self._bound = bound
        if bound is not None:
            self.ranks = list(bound.ranks)

    def bound(self, operation: str) -> Bound:
        """Return what it is.

        Raises:
            ValueError: it was not added, or this rank is not a member.
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
        """Return the communicator of the members; on another rank one of that rank alone.

        Raises:
            ValueError: it was not added.
        """
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
