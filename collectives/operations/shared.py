"""Arrays in memory that a node shares, and plans, as methods of `Communicator`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import numpy.typing as npt

from collectives.arrays import host as arrays
from collectives.arrays import views
from collectives.arrays.host import Array
from collectives.arrays.reduction import MEAN, Op
from collectives.operations.plan import Plan
from collectives.signatures import A

if TYPE_CHECKING:
    from collectives.communicator import Communicator

__all__ = ["bucket", "plan_allreduce", "shared_empty"]


def shared_empty(
    self: Communicator,
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
        This rank's own array, of zeros. It lives as long as the communicator; slices of it are
        in shared memory, too. An ordinary array where ranks do not share memory.

    Raises:
        TypeError: there is no such dtype, or it is no number; a dimension is no integer.
        ValueError: a dimension is negative.
        MismatchError: another rank refused, or the shapes or dtypes differ; on all ranks.

    Cost: the bytes of all ranks' arrays in `/dev/shm`, allocated at once.
    """
    with self._calls.enter("shared_empty", timeout) as call:
        kind = views.numpy_kind(shape, dtype, operation=call.operation)
        self._describe(call, "auto", shape=kind.shape, dtype=kind.dtype)
        call.agree()
        memory = call.shared_empty(kind.nbytes)
    if memory is None:
        return np.zeros(kind.shape, kind.dtype)
    return memory.view(kind.dtype).reshape(kind.shape)


def plan_allreduce(
    self: Communicator, x: A, *, op: Op = MEAN, timeout: float | None = None
) -> Plan[A]:
    """Resolve an all-reduce in place once, for a call that is made at every step.

    *Collective*: all ranks, as `allreduce`. Arguments and errors as `allreduce(x, out=x)`.

    Args:
        x: shape (...), contiguous, writable; best from `shared_empty`.
        op: how to combine.
        timeout: seconds, of every later call.

    Returns:
        A function without arguments that reduces `x` in place and returns it.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> gradient = comm.shared_empty(4, "float32")
        >>> average = comm.plan_allreduce(gradient)
        >>> gradient[:] = comm.rank
        >>> average().tolist() == [(comm.size - 1) / 2] * 4
        True
    """
    with self._calls.enter("plan_allreduce", timeout) as call:
        host = self._reducible(call, x, op, None).host
        array, _ = arrays.borrow_out(x, host.shape, host.dtype, operation=call.operation)
        if array is None:
            raise TypeError(
                "plan_allreduce: the array is not in host memory, where it could be reduced in "
                f"place, got {type(x).__module__}.{type(x).__name__}"
            )
        if not array.flags.c_contiguous:
            raise ValueError("plan_allreduce: the array is not contiguous")
        facts = {"op": op.value, "dtype": array.dtype, "shape": array.shape}
        self._describe(call, "auto", **facts)
        call.agree()
    return Plan(self._calls, call, x, array.reshape(-1), op, timeout)


def bucket(self: Communicator, nbytes: int) -> Array:
    """Return memory for arrays that are packed together; *collective* where it has to grow."""
    if self._memory.size < nbytes:
        self._memory = self.shared_empty(max(nbytes, 2 * self._memory.size), np.uint8)
    return self._memory[:nbytes]
