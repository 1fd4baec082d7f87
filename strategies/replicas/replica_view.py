"""Host copies of remote variables, as replicas see them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.cluster import local_devices as devices
from strategies.core import array_ops
from strategies.replicas import context
from strategies.replicas.context import ReplicaStrategy

__all__ = ["ReplicaView", "to_host"]

Array = npt.NDArray[Any]


class ReplicaView:
    """Host arrays as replicas see them: of a library, on the replica's device.

    Args:
        like: an array of the library. Other values mean NumPy, or the library of the strategy's
            device. If it is a tensor that requires gradients, so do the views.
    """

    def __init__(self, like: Any) -> None:
        plain = isinstance(like, (np.ndarray, np.generic)) or not array_ops.is_array(like)
        # A scalar has a library as well, but it is a plain number.
        self._place = None if plain else array_ops.device_key(like)
        self._differentiated = bool(getattr(like, "requires_grad", False))
        self._known: dict[int, tuple[Array, Any]] = {}  # replica -> array and its last view

    def last(self, own: Array, strategy: ReplicaStrategy) -> Any:
        """Return this thread's replica's view of an array; cached while the array is the same."""
        number = _replica(strategy)
        memory, shown = self._known.get(number, (None, None))
        # By identity, because comparing the elements would read the whole array.
        if memory is not own:
            shown = self(own, strategy)
            # Each replica writes its own key, so no lock is needed.
            self._known[number] = own, shown
        return shown

    def __call__(self, own: Array, strategy: ReplicaStrategy, *, is_copy: bool = False) -> Any:
        """Return this thread's replica's view of an array.

        A host tensor shares the memory, and so does a NumPy view. It is read-only unless the array
        is a copy for the caller.
        """
        shown: Any = own
        if self._place is None:
            shown = own.view()
            # Read-only: writing here would not reach the remote variable.
            shown.flags.writeable = is_copy
        else:
            xp, device = self._place
            if array_ops.dtype_name(own) == "bfloat16":  # some libraries reject NumPy's bfloat16
                shown = xp.asarray(own.astype(np.float32), device=device)
                shown = array_ops.astype(shown, "bfloat16")
            else:
                # Copy for JAX, which may keep reading the memory, and if PyTorch could not write.
                as_is = hasattr(xp, "from_numpy") and own.flags.writeable
                shown = xp.asarray(own if as_is else own.copy(), device=device)
        if strategy.is_placed:
            shown = devices.put(shown, strategy.devices[_replica(strategy)])
        # A leaf of autograd: its gradient is read after the backward pass.
        return shown.detach().requires_grad_() if self._differentiated else shown


def to_host(value: Any) -> Array:
    """Return an array of any library, or an array-like, in host memory."""
    return array_ops.to_host(value) if array_ops.is_array(value) else np.asarray(value)


def _replica(strategy: ReplicaStrategy) -> int:
    """Return the number of this thread's replica in this process."""
    top = context.current()
    if top is None or top.replica is None or top.strategy is not strategy:
        return 0
    return top.replica.local_id
