"""Plans: what a call needs but for its arrays, made in the first such call and run in later ones.

What a call needs follows from its operation, op, dtype, shape, root and algorithm, its *key*. The
first call looks at its arguments, describes itself, makes a plan of what it found, and runs that;
the group keeps it. Later calls with contiguous NumPy arrays find it by the key, and run it.

| plan | ranks meet | what is kept |
| --- | --- | --- |
| `NodePlan` | in shared memory | description and its hash, kernel, loops, bounds and tables |
| `LetterPlan` | by small messages of compiled code | description and its hash, kernel, loops |
| `MessagePlan` | by messages | description, and the function that moves the arrays |

Ranks that find a plan and ranks that make one meet in the same rounds, or messages, and compare the
same hashes, so that it does not matter who found one.

Cost: 2 to 3 us of Python per call in shared memory; at most 256 plans, without arrays.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

import numpy as np

from collectives.algorithms import letters
from collectives.algorithms.letters import HASH, INVERSE, Block, Letters
from collectives.arrays import reduction
from collectives.arrays.host import Array, address
from collectives.errors import MismatchError
from collectives.kernels import addresses
from collectives.node.engine import Rows, Work
from collectives.node.words import OUT, SEND
from collectives.operations import compare, messages
from collectives.operations.call import Call, enter
from collectives.operations.group import Group
from collectives.operations.messages import Reduction
from collectives.operations.signatures import A

__all__ = [
    "LATER",
    "MOST",
    "PLANNED",
    "LetterPlan",
    "MessagePlan",
    "NodePlan",
    "Plan",
    "again",
    "allreduce",
    "broadcast",
    "broadcast_part",
    "by_letter",
    "keep",
]

Key = tuple[object, ...]

# How the calls of a `Plan` describe themselves.
PLANNED = "planned allreduce"

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
        readable, writable = group.look
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


class _AddressPlan(ABC):
    """A call of compiled code that is ready but for the addresses of its arrays.

    Args:
        call: that makes it, and has been described.
        shape: of the result; that of the array if None.
    """

    by_messages = False

    # Callers that are no user's: `Group.begin`, `run`, `again`, and the operation.
    ours = 4

    def __init__(self, call: Call, shape: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.group = call.group
        self._description = call.description
        self._fields = dict(self._description)
        self._operation = str(self._fields.pop("operation"))

    def run(
        self, send: int, out: int, timeout: float | None, then: Callable[[], None] | None = None
    ) -> None:
        """Make the call once more.

        Args:
            send: address of this rank's array.
            out: address of the result.
            timeout: seconds, None for the setting.
            then: does the rest of the call.

        Raises:
            CollectiveError: an earlier call failed.
            MismatchError: the ranks do not make the same call; on all ranks.
            CollectiveTimeout: some rank did not come within `timeout` seconds.
        """
        group = self.group
        if group.unusable is not None:
            group.check_usable(self._operation)
        record = None
        try:
            group.number += 1
            record = group.begin(self._operation, self._fields, self.ours)
            self.meet(send, out, timeout)
            if then is not None:
                then()
        except BaseException as error:
            if not isinstance(error, MismatchError):
                group.failed(self._operation, error)  # also after Ctrl-C
            if record is not None:
                group.end(record, error)
            raise
        group.end(record, None)

    @abstractmethod
    def meet(self, send: int, out: int, timeout: float | None) -> None:
        """Call the kernel until it is done; arguments and errors as `run`."""


class NodePlan(_AddressPlan):
    """A call in the node engine that is ready but for the addresses of its arrays.

    Args:
        call: that makes it, and has been described.
        work: kernel, block and tables.
        shape: of the result; that of the array if None.
        before: how many bytes before the result the whole array would begin, of which it is a part.
    """

    def __init__(
        self,
        call: Call,
        work: Work,
        shape: tuple[int, ...] | None = None,
        before: int = 0,
    ) -> None:
        assert call.engine is not None
        super().__init__(call, shape)
        self._engine = call.engine
        self._before = before
        self._use(work)

    def _use(self, work: Work) -> None:
        self._work = work
        self._words = work.block.data
        self.kernel = work.kernel
        self.block = address(work.block)

    def like(self, nbytes: int, table: Rows, longest: int) -> NodePlan:
        """Plan another meeting of the same call; arguments as `Engine.plan_publish`."""
        other = copy.copy(self)
        digest = compare.digest(self._description)
        other._use(self._engine.plan_publish(nbytes, table, digest, longest))
        return other

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Carry out the call that has made the plan; raises what `Call.met` does."""
        self._words[SEND] = 0 if send is None else address(send)
        self._words[OUT] = 0 if out is None else address(out) - self._before
        call.drive(self._work)

    def meet(self, send: int, out: int, timeout: float | None) -> None:
        """Call the kernel until it is done; arguments and errors as `run`."""
        words = self._words
        words[SEND] = send
        words[OUT] = out - self._before
        if status := self.kernel(self.block):
            self.go_on(status, timeout)

    def go_on(self, status: int, timeout: float | None) -> None:
        """Wait for the others, of whom the kernel has told this status, or say in what they differ.

        Arguments and errors as `run`.
        """
        deadline = self.group.deadline(self._operation, timeout)
        if not self._engine.drive(self._work, deadline, status):
            compare.raise_mismatch(self.group.transport, self._description, deadline)


class LetterPlan(_AddressPlan):
    """A small call by messages of compiled code.

    Args:
        call: that makes it, and has been described.
        letters: by which it goes.
        block: of its kernel.
    """

    def __init__(self, call: Call, letters: Letters, block: Block) -> None:
        super().__init__(call)
        self._fields.pop(compare.NUMBER, None)  # of which every call has its own
        self._letters = letters
        self._kernel = letters.kernel
        self._block = block
        self._words = block.words.data
        self._digest = compare.digest({"operation": self._operation, **self._fields})

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Carry out the call that has made the plan; raises what `Call.met` does."""
        self._fill(*(0 if array is None else address(array) for array in (send, out)))
        call.post(self._letters, self._block)

    def meet(self, send: int, out: int, timeout: float | None) -> None:
        """Call the kernel until it is done; arguments and errors as `run`."""
        self._fill(send, out)
        if status := self._kernel(self._block.address):
            group = self.group
            deadline = group.deadline(self._operation, timeout)
            if not self._letters.drive(self._block, status, deadline):
                call = {**self._description, compare.NUMBER: group.number}
                compare.raise_mismatch(group.transport, call, deadline)

    def _fill(self, send: int, out: int) -> None:
        words, digest = self._words, compare.numbered(self._digest, self.group.number)
        words[HASH], words[INVERSE] = digest, ~digest
        words[letters.SEND], words[letters.OUT] = send, out


class MessagePlan:
    """A call by messages whose arguments have been looked at.

    Args:
        call: that makes it, and has been described.
        move: compares the call, and moves flat arrays.
        shape: of the result; that of the array if None.
    """

    by_messages = True

    def __init__(
        self, call: Call, move: Callable[..., None], shape: tuple[int, ...] | None = None
    ) -> None:
        self.shape = shape
        self.group = call.group
        self._fields = call.description
        self._operation = str(self._fields.pop("operation"))
        self._fields.pop(compare.NUMBER, None)  # of which later calls have their own
        self._move = move

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Carry out the call that has made the plan."""
        self._move(call, send, out)

    def run(self, send: Array | None, out: Array | None, timeout: float | None) -> None:
        """Make the call once more, with flat arrays; errors as `NodePlan.run`."""
        with enter(self.group, self._operation, timeout) as call:
            call.describe(**self._fields)
            self._move(call, send, out)


def allreduce(
    call: Call, send: Array, out: Array, how: Reduction
) -> NodePlan | LetterPlan | MessagePlan:
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


class Plan(Generic[A]):
    """Reduces one array in place, again and again; made by `Communicator.plan_allreduce`.

    Calling it is *collective*, and one of the communicator's calls: all ranks make the same calls
    in the same order. In the node engine everything is resolved when the plan is made, and a call
    costs little more than the exchange itself.

    Args:
        array: what the caller gave, and gets back.
        flat: its memory, shape (n,).
        plan: of its reduction.
        timeout: seconds, None for the setting.

    Raises (when called):
        MismatchError: the ranks do not make the same call; on all ranks.
        CollectiveTimeout: as `Communicator.allreduce`.
    """

    __slots__ = ("_address", "_flat", "_group", "_kernel", "_plan", "_timeout", "array")

    def __init__(
        self,
        array: A,
        flat: Array,
        plan: NodePlan | LetterPlan | MessagePlan,
        timeout: float | None,
    ) -> None:
        self.array = array
        self._flat: Any = flat if plan.by_messages else address(flat)
        self._plan = plan
        self._group = plan.group
        self._timeout = timeout
        self._kernel = None
        if isinstance(plan, NodePlan):  # whose block knows the array
            self._kernel, self._address = plan.kernel, plan.block
        elif isinstance(plan, LetterPlan):
            plan.ours -= 1  # it is run without `again`

    def __call__(self) -> A:
        """Reduce the array over all ranks, in place, and return it."""
        if self._kernel is None:
            self._plan.run(self._flat, self._flat, self._timeout)
            return self.array
        if self._group.unusable is not None:
            self._group.check_usable(PLANNED)
        try:
            if status := self._kernel(self._address):
                self._go_on(status)
        except BaseException as error:
            if not isinstance(error, MismatchError):
                self._group.failed(PLANNED, error)  # also after Ctrl-C
            raise
        return self.array

    def _go_on(self, status: int) -> None:
        """Wait for the others, and record that."""
        record = self._group.begin(PLANNED)
        failure = None
        try:
            assert isinstance(self._plan, NodePlan)
            self._plan.go_on(status, self._timeout)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._group.end(record, failure)
