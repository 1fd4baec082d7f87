"""Plans: what a call needs but for its arrays, made in the first such call and run in later ones.

What a call needs follows from its operation, op, dtype, shape, root and algorithm, its *key*. The
first call looks at its arguments, describes itself, makes a plan of what it found
(`collectives.operations.ready`), and runs that; the group keeps it. Later calls with contiguous
NumPy arrays find it by the key, and run it.

Cost: 1 to 2 us of Python per call in shared memory; at most 256 plans, without arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple

import numpy as np

from collectives.algorithms.letters import Block
from collectives.arrays import reduction
from collectives.arrays.host import Array
from collectives.errors import MismatchError
from collectives.kernels import addresses
from collectives.node.shared_arrays import Place
from collectives.node.words import NOTED
from collectives.operations import compare, messages
from collectives.operations.call import Call
from collectives.operations.group import Group
from collectives.operations.messages import Reduction
from collectives.operations.ready import AnyPlan, LetterPlan, MessagePlan, NodePlan, given
from collectives.operations.signatures import A

__all__ = [
    "LATER",
    "MOST",
    "Plan",
    "Steps",
    "again",
    "allreduce",
    "broadcast",
    "broadcast_part",
    "by_letter",
    "into",
    "keep",
    "reduce_scatter",
]

Key = tuple[object, ...]

# How many plans a group keeps; a training step makes a few dozen different calls.
MOST = 256

# In place of an array: the caller finds one for the result, perhaps as the ranks meet.
LATER: Any = object()

# What goes wrong in a look-up and is for the long way, which tells the other ranks of it: an
# unknown call, arguments that cannot be looked for or compared, no memory for the result.
_NOT_FOUND = (KeyError, TypeError, ValueError, MemoryError)


def again(group: Group, key: Key, x: Any, out: Any, timeout: float | None) -> Any:
    """Make a call that is like an earlier one, by the plan of that one.

    Args as the caller's; plans are found for contiguous arrays of NumPy. `out` may be `LATER`.

    Returns:
        Where the result is: `out`, or a new array; `LATER` if that was given and the plan makes
        none. None where no plan is known, or something needs a closer look: nothing has happened
        then.

    Raises:
        As `NodePlan.run`.
    """
    if type(x) is not np.ndarray:
        return None
    try:
        dtype, shape = x.dtype, x.shape
        plan = group.plans[key, dtype, shape, _place(group, x) if out is x else None]
        result = np.empty(shape, dtype) if out is None else out
        if (
            not group.look.bind(plan.arrays, x, result)
            or group.watcher is not group.status  # who wants to know more than a kernel tells
            or not (timeout is None or timeout > 0)
        ):
            return _by_addresses(group, key, x, out, timeout)
    except _NOT_FOUND:
        return _by_addresses(group, key, x, out, timeout)
    plan.repeat(timeout)
    return result


def _place(group: Group, x: Array) -> Place | None:
    """Say where an array that is reduced in place lies in shared memory, for its plan's key."""
    engine = group.node_engine
    if engine is None or not engine.shared:
        return None
    return engine.shared.place_at(group.look.readable(x), x.nbytes)


def _by_addresses(group: Group, key: Key, x: Array, out: Any, timeout: float | None) -> Any:
    """As `again`, for plans of any kind, and arrays that are only then known to share memory."""
    try:
        readable, writable, _ = group.look
        send: Any = readable(x)
        if not send or not (timeout is None or timeout > 0):
            return None
        target: Any = 0
        place = None
        if out is not None and out is not LATER:
            target = writable(x, out)
            if not target:
                return None
            if target == send:
                engine = group.node_engine  # its place in shared memory is a part of the key
                place = None if engine is None else engine.shared.place_at(send, x.nbytes)
            elif -x.nbytes < target - send < x.nbytes:  # what is written would be read again
                return None
        plan = group.plans[key, x.dtype, x.shape, place]
        if out is None:
            out = np.empty(x.shape if plan.shape is None else plan.shape, x.dtype)
            target = readable(out)
        if plan.by_messages:
            send, target = x.reshape(-1), None if out is LATER else out.reshape(-1)
    except _NOT_FOUND:
        return None
    made = plan.run(send, target, timeout)
    return out if made is None else made


def into(group: Group, key: Key, x: Any, out: Any, timeout: float | None) -> Any:
    """As `again`, for a call whose result has another shape than `x`, and goes into `out`.

    Either of them may be a part of the other one, in its place.

    Returns:
        `out`; None where no plan is known, or something needs a closer look.
    """
    if type(x) is not np.ndarray or type(out) is not np.ndarray:
        return None
    try:
        plan = group.plans[key, x.dtype, x.shape, None]
        readable = group.look.readable
        send: Any = readable(x)
        target: Any = readable(out)
        fits = out.shape == plan.shape and out.dtype == x.dtype and out.flags.writeable
        apart = target - send >= x.nbytes or send - target >= out.nbytes
        apart = apart or (plan.inside is not None and target + plan.inside == send)
        if not (send and target and fits and apart and (timeout is None or timeout > 0)):
            return None
        if plan.by_messages:
            send, target = x.reshape(-1), out.reshape(-1)
    except _NOT_FOUND:
        return None
    plan.run(send, target, timeout)
    return out


def keep(group: Group, key: Key, x: Any, result: Any, plan: object) -> None:
    """Keep the plan of a call with `x` and its result, if later ones can find it."""
    if type(x) is np.ndarray and x.flags.c_contiguous and x.dtype.isnative:
        engine, place = group.node_engine, None
        if engine is not None and isinstance(result, np.ndarray):
            place = engine.shared.place_of(x, result)
        if group.size > 1:  # nothing is compiled for a rank alone
            group.look = addresses.look()
        if len(group.plans) >= MOST:
            group.plans.clear()
        group.plans[key, x.dtype, x.shape, place] = plan


def allreduce(call: Call, send: Array, out: Array, how: Reduction) -> AnyPlan:
    """Plan the all-reduce of flat arrays that a call has described."""
    engine = call.engine_for(how.algorithm)
    if engine is None:
        small = by_letter(call, send, how)
        return small or MessagePlan(call, partial(messages.allreduce, how=how))
    if place := engine.shared.place_of(send, out):  # which is reduced by another kernel
        call.add(memory=f"shared array {place.number} + {place.offset} bytes")
    return NodePlan(call, engine.plan_allreduce(send, out, how.op, call.digest))


def by_letter(call: Call, send: Array, how: Reduction) -> LetterPlan | None:
    """Plan an all-reduce that compiled code sends and combines with the comparison, if it can."""
    group, op = call.group, how.op
    if (
        how.codec is not None
        or not call.carries(how.algorithm, send.nbytes, compare.most(group.layout))
        or reduction.work_dtype(send.dtype) != send.dtype
        or compare.by_nodes(group.layout)
        or (found := compare.letters_of(group)) is None
    ):
        return None
    return LetterPlan(call, found, Block(found, send.dtype, send.size, op, fill=True))


def reduce_scatter(
    call: Call,
    send: Array,
    bounds: Sequence[int],
    how: Reduction,
    shape: tuple[int, ...] | None = None,
) -> NodePlan | MessagePlan:
    """Plan a reduction of flat arrays, of which each rank takes a chunk; of that shape, or flat."""
    shape = (bounds[call.group.rank + 1] - bounds[call.group.rank],) if shape is None else shape
    engine = call.engine_for(how.algorithm)
    if engine is None:
        move = partial(messages.reduce_scatter, how=how, bounds=bounds)
        return MessagePlan(call, move, shape)
    work = engine.plan_reduce_scatter(send, None, bounds, how.op, call.digest)
    before = bounds[call.group.rank] * send.itemsize  # the kernel counts from the whole's begin
    return NodePlan(call, work, shape, before)


def broadcast(
    call: Call, buffer: Array, root: int, algorithm: str = "auto"
) -> NodePlan | MessagePlan:
    """Plan the broadcast of arrays like a flat one, in a call that has been described."""
    engine = call.engine_for(algorithm)
    if engine is None:
        return MessagePlan(call, partial(messages.broadcast, root=root, algorithm=algorithm))
    own, nbytes = call.group.rank == root, buffer.nbytes
    wanted = [] if own or not nbytes else [(root, 0, nbytes, 0)]
    work = engine.plan_publish(nbytes if own else 0, wanted, call.digest, nbytes)
    return NodePlan(call, work)


def broadcast_part(call: Call, buffer: Array, root: int, algorithm: str = "auto") -> None:
    """Broadcast a part of what the ranks have agreed on, or will as they meet."""
    if call.engine_for(algorithm) is None:
        call.algorithm("broadcast", algorithm, buffer.nbytes)(buffer, root, call.deadline)
    else:
        broadcast(call, buffer, root, algorithm).first(call, buffer, buffer)


class Steps(NamedTuple):
    """A call that is more than one plan.

    Attributes:
        group: the ranks.
        run: makes the call, with flat arrays; as `MessagePlan.run`.
    """

    group: Group
    run: Callable[[Array, Array, float | None], None]
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
        "_address", "_group", "_kept", "_kernel", "_operation", "_out", "_plan", "_send",
        "_timeout", "array",
    )  # fmt: skip

    def __init__(
        self,
        array: A,
        send: Array,
        out: Array,
        plan: AnyPlan | Steps,
        operation: str,
        timeout: float | None,
    ) -> None:
        self.array = array
        self._kept = send, out
        self._send, self._out = given(plan, send), given(plan, out)
        self._plan = plan
        self._operation = operation
        self._group = plan.group
        self._timeout = timeout
        self._kernel = None
        if isinstance(plan, NodePlan):  # whose block knows the arrays
            plan.bind(send, out)
            self._kernel, self._address = plan.kernel, plan.block
        elif isinstance(plan, LetterPlan):
            plan.ours -= 1  # it is run without `again`

    def __call__(self) -> A:
        """Make the call, and return the array with its result."""
        if self._kernel is None:
            self._plan.run(self._send, self._out, self._timeout)
            return self.array
        if self._group.unusable is not None:
            self._group.check_usable(self._operation)
        try:
            if status := self._kernel(self._address):
                self._go_on(status)
        except BaseException as error:
            if not isinstance(error, MismatchError):
                self._group.failed(self._operation, error)  # also after Ctrl-C
            raise
        return self.array

    def _go_on(self, status: int) -> None:
        """Wait for the others, and record that."""
        assert isinstance(self._plan, NodePlan)
        if status == NOTED:  # it is over, and for the timeline only
            self._group.planned(self._operation, self._plan.fields)
            return
        record = self._group.begin(self._operation, self._plan.fields)
        failure = None
        try:
            self._plan.go_on(status, self._timeout)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._group.end(record, failure)
