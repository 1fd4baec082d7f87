"""Planner: turns a described call into a plan that later calls reuse.

The *key* of a call is its operation, op, dtype, shape, root and algorithm. The first call with a
key checks its arguments, describes itself, makes a plan (`collectives.plans.prepared_calls`) and
runs it. The group keeps the plan, and later calls find it by the key
(`collectives.operations.plan_cache`). A group keeps at most 256 plans, without their arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Generic, NamedTuple

import numpy as np

from collectives.algorithms.eager import EagerBlock
from collectives.arrays import reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MAX
from collectives.calls import signature_check
from collectives.calls.call import Call
from collectives.calls.group import Group
from collectives.calls.overloads import A
from collectives.core.errors import MismatchError
from collectives.node.control_block import NOTED
from collectives.plans import by_messages as messages
from collectives.plans.by_messages import ReduceSpec
from collectives.plans.lone_call import LoneCall
from collectives.plans.message_calls import EagerCall, MessageCall
from collectives.plans.prepared_calls import NodeCall, PreparedCall
from collectives.tracing.call_sites import caller

__all__ = [
    "MOST",
    "Plan",
    "CompositePlan",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_chunk",
    "is_alone",
    "reduce",
    "reduce_scatter",
]

# Most plans of a group; a training step makes a few dozen different calls.
MOST = 256


def allreduce(
    call: Call, send: Array, out: Array, how: ReduceSpec
) -> NodeCall | EagerCall | MessageCall:
    """Plan the all-reduce of flat arrays in a described call."""
    engine = call.engine_for(how.algorithm)
    if engine is None:
        # A codec also rounds the array of one rank.
        if is_alone(call, how.algorithm) and how.codec is None:
            return LoneCall(call, send.nbytes)
        # Prepared messages first: they carry up to 64 KiB, the comparison of a `MessageCall` 3 KiB.
        small = _eager_allreduce(call, send, how)
        return small or MessageCall(call, partial(messages.allreduce, how=how))
    if place := engine.shared.location_of_pair(send, out):  # another kernel, so all ranks need it
        call.add(memory=f"shared array {place.number} + {place.offset} bytes")
    return NodeCall(call, engine.plan_allreduce(send, out, how.op, call.digest))


def is_alone(call: Call, algorithm: str) -> bool:
    """Whether a `LoneCall` is the plan of a call: one rank, and no algorithm by name."""
    return call.group.size == 1 and algorithm == "auto"


def _eager_allreduce(call: Call, send: Array, how: ReduceSpec) -> EagerCall | None:
    """Plan an all-reduce inside the comparison's messages; None if it does not fit."""
    group, op = call.group, how.op
    if (
        how.codec is not None
        or not call.fits_eager(
            how.algorithm, send.nbytes, signature_check.max_piggyback_bytes(group.layout)
        )
        # 16-bit floats are widened for their sums, which the kernel does not do (`by_messages`).
        or reduction.work_dtype(send.dtype) != send.dtype
        # Then only one rank of each node sends messages, with the data of all ranks of the node.
        or signature_check.per_node(group.layout)
        or (found := signature_check.eager_exchange_of(group)) is None
    ):
        return None
    return EagerCall(call, found, EagerBlock(found, send.dtype, send.size, op, fill=True))


def reduce(
    call: Call, send: Array, out: Array | None, root: int, how: ReduceSpec
) -> NodeCall | MessageCall:
    """Plan the reduction of flat arrays to the root's `out`; other ranks pass None."""
    if engine := call.engine_for(how.algorithm):
        return NodeCall(call, engine.plan_reduce(send, out, how.op, root, call.digest))
    if is_alone(call, how.algorithm):
        return LoneCall(call, send.nbytes)
    return MessageCall(call, partial(messages.reduce, how=how, root=root))


def reduce_scatter(
    call: Call,
    send: Array,
    bounds: Sequence[int],
    how: ReduceSpec,
    shape: tuple[int, ...] | None = None,
) -> NodeCall | MessageCall:
    """Plan a reduction of flat arrays into one chunk per rank; `shape` is this rank's result."""
    shape = (bounds[call.group.rank + 1] - bounds[call.group.rank],) if shape is None else shape
    engine = call.engine_for(how.algorithm)
    if engine is None:
        if is_alone(call, how.algorithm):
            return LoneCall(call, send.nbytes, shape)
        move = partial(messages.reduce_scatter, how=how, bounds=bounds)
        return MessageCall(call, move, shape)
    work = engine.plan_reduce_scatter(send, None, bounds, how.op, call.digest)
    before = bounds[call.group.rank] * send.itemsize  # kernels index from the start of the array
    return NodeCall(call, work, shape, before)


def broadcast(
    call: Call, buffer: Array, root: int, algorithm: str = "auto"
) -> NodeCall | MessageCall:
    """Plan the broadcast of arrays like the flat `buffer`, in a described call."""
    engine = call.engine_for(algorithm)
    if engine is None:
        if is_alone(call, algorithm):
            return LoneCall(call, buffer.nbytes)
        return MessageCall(call, partial(messages.broadcast, root=root, algorithm=algorithm))
    own, nbytes = call.group.rank == root, buffer.nbytes
    # Also on the root, whose result may be another array.
    wanted = [(root, 0, nbytes, 0)] if nbytes else []
    work = engine.plan_publish(nbytes if own else 0, wanted, call.digest, nbytes)
    return NodeCall(call, work)


def broadcast_chunk(call: Call, buffer: Array, root: int, algorithm: str = "auto") -> None:
    """Broadcast a part of an array; by messages, the ranks have compared the call before."""
    # In the engine each part compares the calls again, at no cost.
    if call.engine_for(algorithm) is None:
        call.algorithm("broadcast", algorithm, buffer.nbytes)(buffer, root, call.deadline)
    else:
        broadcast(call, buffer, root, algorithm).first(call, buffer, buffer)


def barrier(call: Call, algorithm: str) -> NodeCall | EagerCall | MessageCall:
    """Plan a barrier, in a described call."""
    if engine := call.engine_for(algorithm):
        return NodeCall(call, engine.plan_publish(0, [], call.digest, 0))
    if is_alone(call, algorithm):
        return LoneCall(call, 0)
    # An empty contribution: the comparison of the calls is the barrier.
    small = _eager_allreduce(call, np.empty(0, np.uint8), ReduceSpec(MAX, algorithm))
    return small or MessageCall(call, partial(messages.barrier, algorithm=algorithm))


class CompositePlan(NamedTuple):
    """A call of several plans.

    Attributes:
        group: the ranks.
        run: runs the call, as `PreparedCall.run`.
    """

    group: Group
    run: Callable[[Array, Array | None, float | None, FrameType], None]

    def node_call(self) -> NodeCall | None:
        """Return None: Python repeats the call."""
        return None


class Plan(Generic[A]):
    """Repeats one call with the same arrays; created by `plan_allreduce` and similar methods.

    Calling a plan is *collective* and counts as a call of the communicator: all ranks make the same
    calls in the same order. In the node engine the plan holds everything that a call needs, so a
    call costs little more than the exchange.

    Args:
        array: result for the caller.
        send: memory of this rank's input, shape (n,).
        out: memory of `array`; may be `send`.
        plan: the prepared call.
        operation: name of the operation in descriptions and errors.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Raises (when called):
        MismatchError: the ranks do not make the same call; on all ranks.
        CollectiveTimeout: as `Communicator.allreduce`.
    """

    __slots__ = (
        "_address", "_group", "_kernel", "_out", "_plan", "_send", "_timeout", "array", "operation",
    )  # fmt: skip

    def __init__(
        self,
        array: A,
        send: Array,
        out: Array,
        plan: PreparedCall,
        operation: str,
        timeout: float | None,
    ) -> None:
        self.array = array
        self._send, self._out = send, out
        self._plan = plan
        self.operation = operation
        self._group = plan.group
        self._timeout = timeout
        self._kernel = None
        # The addresses stay in its block; Python makes a `LoneCall`, as it loads no kernel.
        if isinstance(plan, NodeCall) and not isinstance(plan, LoneCall):
            plan.bind(send, out)
            self._kernel, self._address = plan.kernel, plan.block

    def __call__(self) -> A:
        """Run the call, and return the array with the result."""
        if self._kernel is None:
            self._plan.run(self._send, self._out, self._timeout, caller())
            return self.array
        # As `NodeCall.repeat`, but without a record: that takes longer than the exchange of 8
        # bytes.
        group = self._group
        if group.gate is not None:
            group.check_free(self.operation)
        try:
            group.gate = self
            if status := self._kernel(self._address):
                self._go_on(status)
        except BaseException as error:
            # After a mismatch no data is pending and all ranks raise, so the group stays usable.
            if not isinstance(error, MismatchError):
                group.mark_failed(self.operation, error)  # also after Ctrl-C
            raise
        finally:
            group.gate = group.unusable
        return self.array

    def _go_on(self, status: int) -> None:
        """Continue a call after a nonzero status of the kernel, with a record."""
        assert isinstance(self._plan, NodeCall)
        if status == NOTED:  # complete; only the timeline needs an entry
            self._group.note_cached_call(self.operation, self._plan.fields)
            return
        # The kernel has not completed the call, so it takes long enough for a record.
        record = self._group.begin(self.operation, self._plan.fields)
        failure = None
        try:
            self._plan.go_on(status, self._timeout)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._group.end(record, failure)
