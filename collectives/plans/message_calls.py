"""Prepared calls by messages: eager ones of compiled code, and others."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from collectives.algorithms.eager import EagerBlock, EagerExchange
from collectives.arrays.host_arrays import Array
from collectives.calls import signature
from collectives.calls.call import Call, begin_call
from collectives.kernels.structures import field_view
from collectives.plans.prepared_calls import CompiledCall, NodeCall

__all__ = ["EagerCall", "MessageCall"]


class EagerCall(CompiledCall):
    """A small call by messages of compiled code.

    Args:
        call: the described call that creates the plan.
        exchange: sends the messages.
        block: arguments of the kernel.
    """

    def __init__(self, call: Call, exchange: EagerExchange, block: EagerBlock) -> None:
        super().__init__(call)
        self.fields.pop(signature.NUMBER, None)  # every call has its own number
        self._exchange = exchange
        self._kernel = exchange.kernel
        self._block = block
        self._hash, self._inverse_hash, self._send, self._out = (
            field_view(block.fields, name) for name in ("hash", "inverse_hash", "send", "out")
        )
        # Without the number: `_fill` adds the number of each call, in less time than a hash takes.
        self._digest = signature.hash_of({"operation": self.operation, **self.fields})

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Run the call that created the plan; errors as `Call.checked`."""
        self._fill(send, out)
        call.exchange_eager(self._exchange, self._block)

    def meet(self, send: Array | None, out: Array | None, timeout: float | None) -> None:
        """Run the kernel until the call is complete; arguments and errors as `run`."""
        self._fill(send, out)
        if status := self._kernel(self._block.address):
            group = self.group
            deadline = group.deadline(self.operation, timeout)
            if not self._exchange.run(self._block, status, deadline):
                # The description has the number of the first call.
                call = {**self._description, signature.NUMBER: group.call_number}
                signature.raise_mismatch(group.transport, call, deadline)

    def _fill(self, send: Array | None, out: Array | None) -> None:
        # The number detects ranks that are out of step with equal calls.
        digest = signature.with_number(self._digest, self.group.call_number)
        # Both words, because one minimum over all ranks then finds any difference: min(~h) is
        # ~max(h).
        self._hash[0], self._inverse_hash[0] = digest, ~digest
        readable = self.group.address_reader.readable
        self._send[0] = 0 if send is None else readable(send)
        self._out[0] = 0 if out is None else readable(out)


class MessageCall:
    """A call by messages with checked arguments.

    Args:
        call: the described call that creates the plan.
        move: compares the call and moves flat arrays.
        shape: shape of the result; None for the shape of the array.
    """

    arrays = 0
    input_offset = None  # arrays may not overlap; see `NodeCall.input_offset`

    def __init__(
        self, call: Call, move: Callable[..., None], shape: tuple[int, ...] | None = None
    ) -> None:
        self.shape = shape
        self.group = call.group
        self._fields = call.description
        # `description` is a copy, so the call keeps its own fields.
        self.operation = str(self._fields.pop("operation"))
        self._fields.pop(signature.NUMBER, None)  # every call has its own number
        self._move = move

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Run the call that created the plan."""
        self._move(call, send, out)

    def node_call(self) -> NodeCall | None:
        """Return None: Python repeats the call."""
        return None

    def run(
        self, send: Array | None, out: Array | None, timeout: float | None, frame: FrameType
    ) -> None:
        """Repeat the call; arguments and errors as `PreparedCall.run`.

        `begin_call` finds the caller without `frame`: 1 us, in a call of at least 20 us.
        """
        with begin_call(self.group, self.operation, timeout) as call:
            call.describe(**self._fields)
            flat = [None if array is None else array.reshape(-1) for array in (send, out)]
            self._move(call, *flat)
