"""Fusion buffer in node-shared memory, and reductions of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.arrays import host_arrays, reduction, specs
from collectives.arrays.host_arrays import Array, address
from collectives.arrays.reduction import Op
from collectives.arrays.specs import ArraySpec
from collectives.calls.group import Group
from collectives.calls.overloads import CompressionOptions
from collectives.calls.shared_arrays import shared_empty
from collectives.fusion.bucket_layout import BucketLayout
from collectives.kernels.compression import Compression
from collectives.operations.persistent import plan_allreduce
from collectives.operations.reduce import allreduce

__all__ = ["Bucket", "BucketBuffer", "BucketOptions", "HostBucketBuffer", "check_fits", "layout_of"]


class Bucket(NamedTuple):
    """Arrays that are reduced together.

    Attributes:
        members: indices of the arrays.
        has_elements: whether the bucket is nonempty, so that its reduction synchronizes the ranks.
        name: name of its residuals.
        reduce: reduces the arrays in place; *collective*.
    """

    members: tuple[int, ...]
    has_elements: bool
    name: str
    reduce: Callable[[], None]


@dataclass(frozen=True)
class BucketOptions:
    """Options of buckets.

    Args:
        op: reduction operation.
        compression: compression of messages.
        limits: bytes of the first bucket, and of the later ones.
        timeout: seconds for each reduction; None uses the setting.
        name: prefix of the residuals' names.
        in_memory: whether the ranks reduce in shared memory.
        algorithm: algorithm of the reductions.
    """

    op: Op
    compression: Compression
    limits: tuple[int, int]
    timeout: float | None
    name: str
    in_memory: bool
    algorithm: str


class BucketBuffer(Protocol):
    """Memory in which several arrays are reduced, on the host or on a device.

    Attributes:
        kinds: specs of the arrays.
        options: options of all reductions.
        shown: views of the arrays for the caller.
    """

    kinds: Sequence[ArraySpec]
    options: BucketOptions
    shown: list[Any]

    def results(self) -> list[Any]:
        """Return the results for the caller."""

    def checked(self, operation: str, index: int, value: Any, name: str) -> Any:
        """Check an array and convert it for `pack` and `write`; errors as `check_fits`."""

    def pack(self, bucket: Bucket, arrays: Sequence[Any], scale: float) -> None:
        """Copy the arrays of one bucket, out of all arrays, to their memory; None writes zeros."""

    def write(self, index: int, array: Any) -> None:
        """Copy one array to its memory; None if the caller has written to the view."""

    def buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Group the arrays by their order of readiness; *collective*.

        Members of a bucket that are not adjacent in memory are reduced one after the other.

        Args:
            order: indices of all arrays; equal on all ranks.
        """


class HostBucketBuffer:
    """Host memory of a `BucketBuffer`, laid out once, from the last array to the first.

    Attributes:
        shown: views of the arrays for the caller.
    """

    def __init__(self, group: Group, kinds: Sequence[ArraySpec], options: BucketOptions) -> None:
        self.kinds = kinds
        self.options = options
        self._group = group
        self._layout = layout_of(kinds, options)
        # One allocation for all arrays, so that a bucket is a span; ordinary memory without an
        # engine.
        self._memory = shared_empty(group, self._layout.total, np.uint8, timeout=options.timeout)
        self._views = [
            specs.as_array(self._memory[start : start + kind.nbytes], kind)
            for start, kind in zip(self._layout.starts, kinds, strict=True)
        ]
        self.shown = [view.shown for view in self._views]

    def results(self) -> list[Any]:
        """Return the results for the caller."""
        return [view.result() for view in self._views]

    def checked(self, operation: str, index: int, value: Any, name: str) -> Array:
        """Check an array and convert it to host memory; errors as `check_fits`."""
        array: Array = value
        # `host_view` takes some us, and steps pass hundreds of native arrays.
        if type(value) is not np.ndarray:
            array = host_arrays.host_view(value, operation=operation).host
        check_fits(self.kinds[index], array, operation, name)
        return array

    def pack(self, bucket: Bucket, arrays: Sequence[Array | None], scale: float) -> None:
        """Copy the arrays of one bucket, out of all arrays, to their memory; None writes zeros."""
        for i in bucket.members:
            _fill(self._views[i].memory, arrays[i], scale)

    def write(self, index: int, array: Array | None) -> None:
        """Copy one array to its memory; None if the caller has written to the view."""
        if array is not None:
            self._views[index].memory[...] = array

    def buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Group the arrays by their order of readiness; *collective*."""
        # In shared memory each span has a plan of its own; messages are few and long.
        make = self._plan_in_memory if self.options.in_memory else self._by_messages
        buckets = []
        for number, members in enumerate(self._layout.groups(order)):
            name = f"{self.options.name}, {number}"
            dtype = self.kinds[members[0]].dtype
            spans = self._layout.spans(members)
            # A span holds arrays of one dtype, because buckets do.
            parts = [self._memory[start:stop].view(dtype) for start, stop in spans]
            buckets.append(Bucket(members, bool(parts), name, make(parts, name)))
        return buckets

    def _plan_in_memory(self, parts: Sequence[Array], _: str) -> Callable[[], None]:
        """Return a function that reduces spans of shared memory in place."""
        op, algorithm, timeout = self.options.op, self.options.algorithm, self.options.timeout
        # All ranks plan the same spans in the same order, because planning is a call.
        plans = [
            plan_allreduce(self._group, part, op=op, algorithm=algorithm, timeout=timeout)
            for part in parts
        ]

        def reduce() -> None:
            for plan in plans:
                plan()

        return reduce

    def _by_messages(self, parts: Sequence[Array], name: str) -> Callable[[], None]:
        """Return a function that reduces spans of memory in place with one call."""
        cuts = list(itertools.accumulate(part.size for part in parts))[:-1]
        how = CompressionOptions(
            op=self.options.op,
            compression=self.options.compression,
            algorithm=self.options.algorithm,
            name=name,
            timeout=self.options.timeout,
        )

        def reduce() -> None:
            if not parts:
                return
            # Few long messages are fastest, so the copies pay off.
            whole = np.concatenate(parts) if cuts else parts[0]
            allreduce(self._group, whole, out=whole, **how)
            if cuts:
                for part, reduced in zip(parts, np.split(whole, cuts), strict=True):
                    part[...] = reduced

        return reduce


def layout_of(kinds: Sequence[ArraySpec], options: BucketOptions) -> BucketLayout:
    """Return the memory layout of arrays of these kinds, on the host or on a device."""
    sizes, dtypes = [kind.nbytes for kind in kinds], [kind.dtype for kind in kinds]
    return BucketLayout(sizes, dtypes, options.limits)


def check_fits(kind: ArraySpec, array: Any, operation: str, name: str) -> None:
    """Check that an array fits its view.

    Raises:
        TypeError: the dtype differs.
        ValueError: the shape differs.
    """
    if array.dtype != kind.dtype or array.shape != kind.shape:
        error = TypeError if array.dtype != kind.dtype else ValueError
        raise error(
            f"{operation}: the array does not fit, expected {kind.dtype} of shape {kind.shape}, "
            f"got {array.dtype} of shape {array.shape} (array: {name})"
        )


def _fill(memory: Array, array: Array | None, scale: float) -> None:
    if array is None:
        memory[...] = 0
    elif scale == 1:
        if address(array) != address(memory):  # else the caller has written to the view
            memory[...] = array
    else:
        # A scale may overflow, which a loss scaler expects.
        with reduction.ignore_float_errors():
            # "same_kind" allows float64 products in float32 memory, and refuses floats in integers.
            np.multiply(array, scale, out=memory, casting="same_kind")
