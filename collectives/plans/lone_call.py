"""Prepared calls of a group of one rank."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.calls import signature
from collectives.calls.call import Call
from collectives.plans.prepared_calls import CompiledCall, NodeCall

__all__ = ["LoneCall"]


class LoneCall(NodeCall):
    """A call of a group of one rank: a copy of its array.

    Python copies until `node_call`, because loading compiled code takes 0.1 s.

    Args:
        call: the described call that creates the plan.
        nbytes: bytes of the array.
        shape: shape of the result; None for the shape of the array.
    """

    def __init__(self, call: Call, nbytes: int, shape: tuple[int, ...] | None = None) -> None:
        CompiledCall.__init__(self, call, shape)
        self.fields.pop(signature.NUMBER, None)  # every call has its own number
        self._nbytes = nbytes
        self._before = 0
        self._is_loaded = False

    def node_call(self) -> NodeCall | None:
        """Load the kernel, and return this call."""
        if not self._is_loaded:
            self._engine = self.group.lone_engine()
            self._use(self._engine.plan_own_copy(self._nbytes))
            self._is_loaded = True
        return self

    def run(
        self,
        send: Array | None,
        out: Array | None,
        timeout: float | None,
        frame: FrameType,
        then: Callable[[], Exception | None] | None = None,
    ) -> Array | None:
        """Repeat the call as `PreparedCall.run`."""
        made = None
        if out is None and self.shape is not None and send is not None:
            made = np.empty(self.shape, send.dtype)
        CompiledCall.run(self, send, made if out is None else out, timeout, frame, then)
        return made

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Run the call that created the plan."""
        self.meet(send, out, None)

    def meet(self, send: Array | None, out: Array | None, timeout: float | None) -> None:
        """Copy the array."""
        if send is not None and out is not None and out is not send:
            out.reshape(-1)[...] = send.reshape(-1)
