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
    """Make an array in memory that the ranks of a node share.

    Reducing it in place (`out=` the array itself, or a plan) copies nothing: each rank combines
    its chunk of all arrays and writes the result into all of them.

    *Collective*: all ranks, with the same shape and dtype.

    Args:
        shape: of the array.
        dtype: of the array, which is in native byte order.
        timeout: seconds.

    Returns:
        This rank's array, of zeros; slices of it are also in shared memory. A rank unmaps the
        memory once the program has dropped the array and all views of it. An ordinary array where
        ranks do not share memory.

    Raises:
        TypeError: there is no such dtype, or it cannot be moved (`collectives.arrays.dtypes`); a
            dimension is not an integer.
        ValueError: a dimension is negative.
        MismatchError: another rank refused, or the shapes or dtypes differ; on all ranks.

    Cost: the bytes of all ranks' arrays in `/dev/shm`, allocated at once.
    """
    with begin_call(group, "shared_empty", timeout) as call:
        kind = specs.numpy_spec(shape, dtype, operation=call.operation)
        call.describe(shape=kind.shape, dtype=kind.dtype)
        call.agree()
        memory = allocate(call, kind.nbytes)
    if memory is None:
        return np.zeros(kind.shape, kind.dtype)
    return memory.view(kind.dtype).reshape(kind.shape)


def allocate(call: Call, nbytes: int) -> Array | None:
    """Make memory that all ranks of the node can reach; None on a node where there is none."""
    group = call.group
    if group.node_engine is None or group.settings.shared_memory is None:
        return None
    ranks, directory = group.levels.node, group.settings.shared_memory
    shared = group.node_engine.shared
    array = shared.create(nbytes, ranks, directory, call.deadline)
    group.plans = {key: plan for key, plan in group.plans.items() if not shared.is_dropped(key)}
    return array
