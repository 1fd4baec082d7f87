"""`plan_buckets`: ranks agree on buckets and lay out their memory once."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from collectives.arrays import reduction, specs
from collectives.arrays.reduction import MEAN, Op
from collectives.arrays.specs import ArraySpec
from collectives.calls.call import begin_call
from collectives.calls.group import Group
from collectives.fusion import bucket_layout
from collectives.fusion.buckets import Buckets
from collectives.fusion.device_buffer import DeviceBucketBuffer, if_all_on_device
from collectives.fusion.host_buffer import BucketBuffer, BucketOptions, HostBucketBuffer
from collectives.kernels.compression import NONE, Compression, resolve
from collectives.operations import split

__all__ = ["plan_buckets"]

# Bytes that complete a bucket: the first one is small so that its reduction starts early; later
# ones in shared memory and by messages. `benchmarks/gradients.py`, 2 ranks on 2 cores, views of
# 102 MB, ms, minimum of 11: buckets of 1 MiB 12.0, 4 MiB 8.0, 8 MiB 7.2, 32 MiB 6.5. Small buckets
# leave less work after the last gradient.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES, BUCKET_BYTES_MESSAGES = 4 << 20, 16 << 20

# Buckets without a name are numbered.
_numbers = itertools.count()


def plan_buckets(
    group: Group,
    like: Sequence[Any],
    *,
    op: Op = MEAN,
    compression: Compression | None = NONE,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    name: str | None = None,
    names: Sequence[str] | None = None,
) -> Buckets:
    """Plan buckets for arrays that are reduced in every step.

    *Collective*: all ranks, with the same shapes, dtypes and options.

    Args:
        like: for every array an array of its kind, shape and dtype, which is not changed, or a pair
            (shape, dtype) for a NumPy array. Views on the host keep the strides of dense PyTorch
            tensors (`channels_last`), which must be equal on all ranks.
        op: reduction operation, defined for all dtypes.
        compression: as for `allreduce`; with feedback, every bucket has its own residual.
        bucket_bytes: bytes that complete a bucket; None picks 4 MiB in shared memory, else 16 MiB.
        first_bucket_bytes: bytes that complete the first bucket; None picks 1 MiB.
        algorithm: as for `allreduce`, for each bucket; not "nccl".
        timeout: seconds for the reduction of each bucket; None uses UNISONO_TIMEOUT.
        name: name of the buckets, for compression with feedback; None numbers them.
        names: names of the arrays, for errors; None uses their numbers.

    Raises:
        TypeError: a dtype is unknown, the op is not defined for it, `compression` has another type,
            or a number of bytes is not an integer.
        ValueError: an option is out of range, or the algorithm is unknown.
        MismatchError: ranks differ in number, shapes or dtypes, or in the options; on all ranks.

    Cost: the bytes of all arrays, in shared memory if available.

    Example:
        >>> import collectives as cc, numpy as np
        >>> comm = cc.init()
        >>> with comm.plan_buckets([((2, 3), "float32"), ((3,), "float32")]) as buckets:
        ...     weight, bias = buckets.allreduce([np.ones((2, 3), np.float32), None])
        ...     bool((weight == 1).all()), bias.tolist()
        (True, [0.0, 0.0, 0.0])
    """
    with begin_call(group, "plan_buckets", timeout) as call:
        compression = resolve(compression, call.operation)
        kinds = [specs.spec_of(x, operation=call.operation) for x in like]
        # Each dtype once, because models have hundreds of arrays of few dtypes.
        for dtype in {kind.dtype for kind in kinds}:
            reduction.check(op, dtype, operation=call.operation, algorithm=algorithm)
            compression.codec(dtype, op, network=True, name="")
        in_memory = call.engine_for(algorithm) is not None
        limits = _limits(first_bucket_bytes, bucket_bytes, in_memory)
        if names is not None and len(names) != len(kinds):
            raise ValueError(
                f"plan_buckets: expected a name for each of {len(kinds)} arrays, got {len(names)}"
            )
        # The limits are part of the description, because all ranks must form equal buckets.
        call.describe(
            op=op.value, count=len(kinds), compression=compression, bytes=limits,
            arrays=bucket_layout.summary([(_words(kind), kind.shape) for kind in kinds]),
            algorithm=algorithm,
        )  # fmt: skip
        call.agree()
    # Only after the agreement, because a duplicate is a call of its own.
    ranks = split.dup(group)
    name = name or f"buckets {next(_numbers)}"
    there = [] if reduction.is_on_host(op) else if_all_on_device(ranks, like, timeout)
    if there and bucket_bytes is None:  # slices pass through host memory in any case
        limits = limits[0], BUCKET_BYTES_MESSAGES
    options = BucketOptions(op, compression, limits, timeout, name, in_memory, algorithm)
    places: BucketBuffer = (
        DeviceBucketBuffer(ranks, kinds, options, there)
        if there
        else HostBucketBuffer(ranks, kinds, options)
    )
    return Buckets(ranks, places, names or [str(i) for i in range(len(kinds))])


def _limits(first: int | None, later: int | None, in_memory: bool) -> tuple[int, int]:
    """Return the bytes of the first bucket, and of the later ones."""
    usual = BUCKET_BYTES if in_memory else BUCKET_BYTES_MESSAGES
    limits = (
        operator.index(FIRST_BUCKET_BYTES if first is None else first),
        operator.index(usual if later is None else later),
    )
    if min(limits) <= 0:
        raise ValueError(f"plan_buckets: expected bytes > 0, got {limits} (first, later)")
    return limits


def _words(kind: ArraySpec) -> str:
    """Describe the dtype of an array and its memory order."""
    # With the order of axes: equal shapes with different strides would mix up elements.
    return kind.dtype.name if kind.order is None else f"{kind.dtype.name} in order {kind.order} "
