"""Planner: turns a described call into a plan that later calls reuse.

What a call needs follows from its operation, op, dtype, shape, root and algorithm, its *key*. The
first call looks at its arguments, describes itself, makes a plan of what it found
(`collectives.plans.prepared_calls`), and runs that; the group keeps it. Later calls find it by the
key (`collectives.operations.plan_cache`), and run it. At most 256 are kept, without arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Generic, NamedTuple

from collectives.algorithms.eager import EagerBlock
from collectives.arrays import reduction
from collectives.arrays.host_arrays import Array
from collectives.calls import signature_check
from collectives.calls.call import Call
from collectives.calls.group import Group
from collectives.calls.overloads import A
from collectives.core.errors import MismatchError
from collectives.node.control_block import NOTED
from collectives.plans import by_messages as messages
from collectives.plans.by_messages import ReduceSpec
from collectives.plans.prepared_calls import (
    AnyCall,
    EagerCall,
    MessageCall,
    NodeCall,
    as_plan_argument,
)
from collectives.tracing.call_sites import caller

__all__ = [
    "MOST",
    "Plan",
    "CompositePlan",
    "allreduce",
    "broadcast",
    "broadcast_chunk",
    "eager_allreduce",
    "reduce_scatter",
]

# How many plans a group keeps; a training step makes a few dozen different calls.
MOST = 256


def allreduce(call: Call, send: Array, out: Array, how: ReduceSpec) -> AnyCall:
    """Plan the all-reduce of flat arrays that a call has described."""
    engine = call.engine_for(how.algorithm)
    if engine is None:
        small = eager_allreduce(call, send, how)
        return small or MessageCall(call, partial(messages.allreduce, how=how))
    if place := engine.shared.location_of_pair(send, out):  # which is reduced by another kernel
        call.add(memory=f"shared array {place.number} + {place.offset} bytes")
    return NodeCall(call, engine.plan_allreduce(send, out, how.op, call.digest))


def eager_allreduce(call: Call, send: Array, how: ReduceSpec) -> EagerCall | None:
    """Plan an all-reduce that compiled code sends and combines with the comparison, if it can."""
    group, op = call.group, how.op
    if (
        how.codec is not None
        or not call.fits_eager(
            how.algorithm, send.nbytes, signature_check.max_piggyback_bytes(group.layout)
        )
        or reduction.work_dtype(send.dtype) != send.dtype
        or signature_check.per_node(group.layout)
        or (found := signature_check.eager_exchange_of(group)) is None
    ):
        return None
    return EagerCall(call, found, EagerBlock(found, send.dtype, send.size, op, fill=True))


def reduce_scatter(
    call: Call,
    send: Array,
    bounds: Sequence[int],
    how: ReduceSpec,
    shape: tuple[int, ...] | None = None,
) -> NodeCall | MessageCall:
    """Plan a reduction of flat arrays, of which each rank takes a chunk; of that shape, or flat."""
    shape = (bounds[call.group.rank + 1] - bounds[call.group.rank],) if shape is None else shape
    engine = call.engine_for(how.algorithm)
    if engine is None:
        move = partial(messages.reduce_scatter, how=how, bounds=bounds)
        return MessageCall(call, move, shape)
    work = engine.plan_reduce_scatter(send, None, bounds, how.op, call.digest)
    before = bounds[call.group.rank] * send.itemsize  # the kernel counts from the whole's begin
    return NodeCall(call, work, shape, before)


def broadcast(
    call: Call, buffer: Array, root: int, algorithm: str = "auto"
) -> NodeCall | MessageCall:
    """Plan the broadcast of arrays like a flat one, in a call that has been described."""
    engine = call.engine_for(algorithm)
    if engine is None:
        return MessageCall(call, partial(messages.broadcast, root=root, algorithm=algorithm))
    own, nbytes = call.group.rank == root, buffer.nbytes
    wanted = [] if own or not nbytes else [(root, 0, nbytes, 0)]
    work = engine.plan_publish(nbytes if own else 0, wanted, call.digest, nbytes)
    return NodeCall(call, work)


def broadcast_chunk(call: Call, buffer: Array, root: int, algorithm: str = "auto") -> None:
    """Broadcast a part of what the ranks have agreed on, or will as they meet."""
    if call.engine_for(algorithm) is None:
        call.algorithm("broadcast", algorithm, buffer.nbytes)(buffer, root, call.deadline)
    else:
        broadcast(call, buffer, root, algorithm).first(call, buffer, buffer)


class CompositePlan(NamedTuple):
    """A call that is more than one plan.

    Attributes:
        group: the ranks.
        run: makes the call, with flat arrays; as `MessageCall.run`.
    """

    group: Group
    run: Callable[[Array, Array, float | None, FrameType], None]
    by_messages: bool = True  # it is given arrays, whatever it does with them


class Plan(Generic[A]):
    """Makes one call with the same arrays, again and again; made by `plan_allreduce` and its kind.

    Calling it is *collective*, and one of the communicator's calls: all ranks make the same calls
    in the same order. In the node engine everything is resolved when the plan is made, and a call
    costs little more than the exchange itself.

    Args:
        array: what the caller gets.
        send: the memory of what this rank brings, shape (n,).
        out: the memory of `array`, perhaps the same.
        plan: of the call.
        operation: its name in descriptions and errors.
        timeout: seconds, None for the setting.

    Raises (when called):
        MismatchError: the ranks do not make the same call; on all ranks.
        CollectiveTimeout: as `Communicator.allreduce`.
    """

    __slots__ = (
        "_address", "_group", "_kept", "_kernel", "_out", "_plan", "_send", "_timeout", "array",
        "operation",
    )  # fmt: skip

    def __init__(
        self,
        array: A,
        send: Array,
        out: Array,
        plan: AnyCall | CompositePlan,
        operation: str,
        timeout: float | None,
    ) -> None:
        self.array = array
        self._kept = send, out
        self._send, self._out = as_plan_argument(plan, send), as_plan_argument(plan, out)
        self._plan = plan
        self.operation = operation
        self._group = plan.group
        self._timeout = timeout
        self._kernel = None
        if isinstance(plan, NodeCall):  # whose block knows the arrays
            plan.bind(send, out)
            self._kernel, self._address = plan.kernel, plan.block

    def __call__(self) -> A:
        """Make the call, and return the array with its result."""
        if self._kernel is None:
            self._plan.run(self._send, self._out, self._timeout, caller())
            return self.array
        group = self._group
        if group.gate is not None:
            group.check_free(self.operation)
        try:
            group.gate = self
            if status := self._kernel(self._address):
                self._go_on(status)
        except BaseException as error:
            if not isinstance(error, MismatchError):
                group.mark_failed(self.operation, error)  # also after Ctrl-C
            raise
        finally:
            group.gate = group.unusable
        return self.array

    def _go_on(self, status: int) -> None:
        """Wait for the others, and record that."""
        assert isinstance(self._plan, NodeCall)
        if status == NOTED:  # it is over, and for the timeline only
            self._group.note_cached_call(self.operation, self._plan.fields)
            return
        record = self._group.begin(self.operation, self._plan.fields)
        failure = None
        try:
            self._plan.go_on(status, self._timeout)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._group.end(record, failure)
