"""Arrays side by side in memory that the ranks of a node share, and reductions of parts of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from collectives import bucket_layout
from collectives.arrays import views
from collectives.arrays.host import Array
from collectives.arrays.reduction import Op
from collectives.arrays.views import Kind
from collectives.compression import Compression
from collectives.operations.group import Group
from collectives.operations.reduce import allreduce, plan_allreduce
from collectives.operations.shared import shared_empty

__all__ = ["Bucket", "Places"]


class Bucket(NamedTuple):
    """Arrays that are reduced together.

    Attributes:
        members: indices of the arrays.
        has_elements: whether the ranks meet for it.
        reduce: reduces the arrays in place; *collective*.
    """

    members: tuple[int, ...]
    has_elements: bool
    reduce: Callable[[], None]


class Places:
    """Memory of several arrays, laid out once, from the last array to the first.

    Args:
        group: the ranks.
        kinds: of the arrays.
        op: how to combine.
        compression: how buckets travel.
        limits: bytes of the first bucket, and of the later ones.
        timeout: seconds, of each reduction.
        name: for residuals.
        in_memory: the ranks meet in shared memory.
    """

    def __init__(
        self, group: Group, kinds: Sequence[Kind], *, op: Op, compression: Compression,
        limits: tuple[int, int], timeout: float | None, name: str, in_memory: bool,
    ) -> None:  # fmt: skip
        self.kinds = kinds
        self.timeout = timeout
        self.name = name
        self._group = group
        self._op = op
        self._compression = compression
        self._limits = limits
        self._in_memory = in_memory
        self._sizes = [kind.nbytes for kind in kinds]
        last_first = [i for group in self._groups(range(len(kinds) - 1, -1, -1)) for i in group]
        self._starts, total = bucket_layout.places(self._sizes, last_first)
        self._memory = shared_empty(group, total, np.uint8, timeout=timeout)
        self.views = [
            views.show(self._memory[start : start + kind.nbytes], kind)
            for start, kind in zip(self._starts, kinds, strict=True)
        ]
        self._residuals: list[str] = []

    def buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Group the arrays as they become ready; *collective*.

        Neighbours in a bucket that do not lie side by side are reduced one after the other.

        Args:
            order: the indices of all arrays; equal on all ranks.
        """
        groups = self._groups(order)
        if self._compression.residuals is not None:
            for name in self._residuals:  # the name stands for other arrays from now on
                self._compression.residuals.forget(name)
        self._residuals = [f"{self.name}, {k}" for k in range(len(groups))]
        make = self._planned if self._in_memory else self._by_messages
        buckets = []
        for group, name in zip(groups, self._residuals, strict=True):
            dtype = self.kinds[group[0]].dtype
            spans = bucket_layout.spans([(self._starts[i], self._sizes[i]) for i in group])
            parts = [self._memory[start:stop].view(dtype) for start, stop in spans]
            buckets.append(Bucket(group, bool(parts), make(parts, name)))
        return buckets

    def _groups(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        dtypes = [kind.dtype for kind in self.kinds]
        return bucket_layout.lay_out(self._sizes, dtypes, order, self._limits)

    def _planned(self, parts: Sequence[Array], _: str) -> Callable[[], None]:
        """Make a function that reduces stretches of shared memory in place."""
        plans = [
            plan_allreduce(self._group, part, op=self._op, timeout=self.timeout) for part in parts
        ]

        def reduce() -> None:
            for plan in plans:
                plan()

        return reduce

    def _by_messages(self, parts: Sequence[Array], name: str) -> Callable[[], None]:
        """Make a function that reduces stretches of memory in place, by one call for all."""
        cuts = list(itertools.accumulate(part.size for part in parts))[:-1]

        def reduce() -> None:
            if not parts:
                return
            whole = np.concatenate(parts) if cuts else parts[0]
            allreduce(
                self._group, whole, op=self._op, out=whole, compression=self._compression,
                name=name, timeout=self.timeout,
            )  # fmt: skip
            if cuts:
                for part, reduced in zip(parts, np.split(whole, cuts), strict=True):
                    part[...] = reduced

        return reduce
