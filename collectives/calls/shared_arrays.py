"""`shared_empty`: arrays in memory shared by the ranks of a node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from collectives.arrays import specs
from collectives.arrays.host_arrays import Array
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group

__all__ = ["allocate", "shared_empty"]


def shared_empty(
    group: Group,
    shape: SupportsIndex | Iterable[SupportsIndex],
    dtype: npt.DTypeLike,
    *,
    timeout: float | None = None,
) -> Array:
    """Return an array in memory that the ranks of a node share.

    Reducing it in place (`out=` the array itself, or a plan) copies nothing: each rank reduces one
    chunk of all arrays and writes the result into all of them.

    *Collective*: all ranks, with the same shape and dtype.

    Args:
        shape: shape of the array.
        dtype: dtype of the array, in native byte order.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        This rank's array, filled with zeros. Its slices are also in shared memory. A rank unmaps
        the memory once the program has dropped the array and all its views. Without shared memory,
        an ordinary array.

    Raises:
        TypeError: the dtype is unknown or not supported (`collectives.arrays.dtypes`), or a
            dimension is not an integer.
        ValueError: a dimension is negative.
        MismatchError: another rank refused, or the shapes or dtypes differ; on all ranks.

    Cost: the bytes of all ranks' arrays in `/dev/shm`, allocated at once.
    """
    with begin_call(group, "shared_empty", timeout) as call:
        kind = specs.numpy_spec(shape, dtype, operation=call.operation)
        call.describe(shape=kind.shape, dtype=kind.dtype)
        # A refusal of a rank must be known before all ranks allocate.
        call.agree()
        memory = allocate(call, kind.nbytes)
    if memory is None:
        return np.zeros(kind.shape, kind.dtype)
    return memory.view(kind.dtype).reshape(kind.shape)


def allocate(call: Call, nbytes: int) -> Array | None:
    """Return memory shared by all ranks of the node; None without a node engine."""
    group = call.group
    if group.node_engine is None or group.settings.shared_memory is None:
        return None
    ranks, directory = group.levels.node, group.settings.shared_memory
    shared = group.node_engine.shared
    array = shared.create(nbytes, ranks, directory, call.deadline)
    group.fast_path.clear()
    # Plans for dropped arrays hold addresses that may belong to other memory now.
    group.plans = {key: plan for key, plan in group.plans.items() if not shared.is_dropped(key)}
    return array
