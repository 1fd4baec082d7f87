"""Arrays side by side in memory that the ranks of a node share, and reductions of parts of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from collectives import bucket_layout
from collectives.arrays import views
from collectives.arrays.host import Array
from collectives.arrays.reduction import Op
from collectives.arrays.views import Kind
from collectives.compression import Compression
from collectives.operations.group import Group
from collectives.operations.planned import plan_allreduce
from collectives.operations.reduce import allreduce
from collectives.operations.shared import shared_empty
from collectives.operations.signatures import Compressing

__all__ = ["Bucket", "Options", "Places"]


class Bucket(NamedTuple):
    """Arrays that are reduced together.

    Attributes:
        members: indices of the arrays.
        has_elements: whether the ranks meet for it.
        name: of its residuals.
        reduce: reduces the arrays in place; *collective*.
    """

    members: tuple[int, ...]
    has_elements: bool
    name: str
    reduce: Callable[[], None]


@dataclass(frozen=True)
class Options:
    """How buckets are made and reduced.

    Args:
        op: how to combine.
        compression: how buckets travel.
        limits: bytes of the first bucket, and of the later ones.
        timeout: seconds, of each reduction.
        name: for residuals.
        in_memory: the ranks meet in shared memory.
    """

    op: Op
    compression: Compression
    limits: tuple[int, int]
    timeout: float | None
    name: str
    in_memory: bool


class Places:
    """Memory of several arrays, laid out once, from the last array to the first."""

    def __init__(self, group: Group, kinds: Sequence[Kind], options: Options) -> None:
        self.kinds = kinds
        self.options = options
        self._group = group
        self._sizes = [kind.nbytes for kind in kinds]
        last_first = [i for group in self._groups(range(len(kinds) - 1, -1, -1)) for i in group]
        self._starts, total = bucket_layout.places(self._sizes, last_first)
        self._memory = shared_empty(group, total, np.uint8, timeout=options.timeout)
        self.views = [
            views.show(self._memory[start : start + kind.nbytes], kind)
            for start, kind in zip(self._starts, kinds, strict=True)
        ]

    def buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Group the arrays as they become ready; *collective*.

        Neighbours in a bucket that do not lie side by side are reduced one after the other.

        Args:
            order: the indices of all arrays; equal on all ranks.
        """
        groups = self._groups(order)
        make = self._planned if self.options.in_memory else self._by_messages
        buckets = []
        for number, group in enumerate(groups):
            name = f"{self.options.name}, {number}"
            dtype = self.kinds[group[0]].dtype
            spans = bucket_layout.spans([(self._starts[i], self._sizes[i]) for i in group])
            parts = [self._memory[start:stop].view(dtype) for start, stop in spans]
            buckets.append(Bucket(group, bool(parts), name, make(parts, name)))
        return buckets

    def _groups(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        dtypes = [kind.dtype for kind in self.kinds]
        return bucket_layout.lay_out(self._sizes, dtypes, order, self.options.limits)

    def _planned(self, parts: Sequence[Array], _: str) -> Callable[[], None]:
        """Make a function that reduces stretches of shared memory in place."""
        op, timeout = self.options.op, self.options.timeout
        plans = [plan_allreduce(self._group, part, op=op, timeout=timeout) for part in parts]

        def reduce() -> None:
            for plan in plans:
                plan()

        return reduce

    def _by_messages(self, parts: Sequence[Array], name: str) -> Callable[[], None]:
        """Make a function that reduces stretches of memory in place, by one call for all."""
        cuts = list(itertools.accumulate(part.size for part in parts))[:-1]
        how = Compressing(
            op=self.options.op,
            compression=self.options.compression,
            name=name,
            timeout=self.options.timeout,
        )

        def reduce() -> None:
            if not parts:
                return
            whole = np.concatenate(parts) if cuts else parts[0]
            allreduce(self._group, whole, out=whole, **how)
            if cuts:
                for part, reduced in zip(parts, np.split(whole, cuts), strict=True):
                    part[...] = reduced

        return reduce
