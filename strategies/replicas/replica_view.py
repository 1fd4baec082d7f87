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
    """Arrays of host memory, as replicas see them: of a library, on the replica's device.

    Args:
        like: an array whose library it is; anything else stands for NumPy, or for the library of
            the device that the strategy has been given. A tensor that is differentiated by lets
            each replica do so.
    """

    def __init__(self, like: Any) -> None:
        plain = isinstance(like, (np.ndarray, np.generic)) or not array_ops.is_array(like)
        self._place = None if plain else array_ops.device_key(like)
        self._differentiated = bool(getattr(like, "requires_grad", False))
        self._known: dict[int, tuple[Array, Any]] = {}  # replica -> what was shown, and how

    def last(self, own: Array, strategy: ReplicaStrategy) -> Any:
        """Return an array as the replica of this thread sees it; the same until it is another."""
        number = _replica(strategy)
        memory, shown = self._known.get(number, (None, None))
        if memory is not own:
            shown = self(own, strategy)
            self._known[number] = own, shown
        return shown

    def __call__(self, own: Array, strategy: ReplicaStrategy) -> Any:
        """Return an array as the replica of this thread sees it.

        One of NumPy is read-only, a tensor of the host is the memory itself.
        """
        shown: Any = own
        if self._place is None:
            shown = own.view()
            shown.flags.writeable = False
        else:
            xp, device = self._place
            if array_ops.dtype_name(own) == "bfloat16":  # which not every library takes from NumPy
                shown = xp.asarray(own.astype(np.float32), device=device)
                shown = array_ops.astype(shown, "bfloat16")
            else:
                # JAX may go on reading the memory that it is given; PyTorch wants to write.
                as_is = hasattr(xp, "from_numpy") and own.flags.writeable
                shown = xp.asarray(own if as_is else own.copy(), device=device)
        if strategy.is_placed:
            shown = devices.put(shown, strategy.devices[_replica(strategy)])
        return shown.detach().requires_grad_() if self._differentiated else shown


def to_host(value: Any) -> Array:
    """Return an array of any library, or what NumPy takes, in host memory."""
    return array_ops.to_host(value) if array_ops.is_array(value) else np.asarray(value)


def _replica(strategy: ReplicaStrategy) -> int:
    """Return the number of the replica of this process that this thread is."""
    top = context.current()
    if top is None or top.replica is None or top.strategy is not strategy:
        return 0
    return top.replica.local_id
