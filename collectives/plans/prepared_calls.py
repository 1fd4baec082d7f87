"""Three kinds of prepared calls: node engine, eager and messages.

| plan | ranks meet | what is kept |
| --- | --- | --- |
| `NodeCall` | in shared memory | description and its hash, kernel, loops, bounds and tables |
| `EagerCall` | by small messages of compiled code | description and its hash, kernel, loops |
| `MessageCall` | by messages | description, and the function that moves the arrays |

A call that makes a plan and one that has found it meet in the same rounds, or messages, and compare
the same hashes, so that it does not matter which ranks found one.
"""

from __future__ import annotations

import copy
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, cast

from collectives.algorithms.eager import EagerBlock, EagerExchange
from collectives.arrays.host_arrays import Array, address
from collectives.calls import signature
from collectives.calls.call import Call, begin_call
from collectives.core.errors import MismatchError
from collectives.kernels.structures import field_view
from collectives.node.control_block import NOTED, Block
from collectives.node.engine import CopyTable, KernelCall
from collectives.tracing.peer_status import StatusBoard
from collectives.tracing.recorder import Record

__all__ = ["AnyCall", "EagerCall", "MessageCall", "NodeCall", "PlanArguments", "as_plan_argument"]


class _AddressCall(ABC):
    """A call of compiled code that is ready but for the addresses of its arrays.

    Args:
        call: that makes it, and has been described.
        shape: of the result; that of the array if None.
    """

    by_messages = False

    # Address of two words that are to have the addresses of the arrays, if `repeat` makes the call.
    arrays = 0

    def __init__(self, call: Call, shape: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.group = call.group
        self._description = call.description
        self.fields = dict(self._description)
        self.operation = str(self.fields.pop("operation"))

    def run(
        self,
        send: int,
        out: int,
        timeout: float | None,
        frame: FrameType,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Make the call once more.

        Args:
            send: address of this rank's array.
            out: address of the result.
            timeout: seconds, None for the setting.
            frame: of the operation's caller, as for `Recorder.take`.
            then: does the rest of the call.

        Raises:
            CollectiveError: an earlier call failed.
            MismatchError: the ranks do not make the same call; on all ranks.
            CollectiveTimeout: some rank did not come within `timeout` seconds.
        """
        group = self.group
        if group.gate is not None:
            group.check_free(self.operation)
        record = None
        try:
            group.gate = self
            group.call_number += 1
            record = group.begin(self.operation, self.fields, frame)
            self.meet(send, out, timeout)
            if then is not None:
                then()
        except BaseException as error:
            self._record_failure(record, error)
            raise
        finally:
            group.gate = group.unusable
        group.end(record, None)

    def _record_failure(self, record: Record | None, error: BaseException) -> None:
        """Record that a call has failed, and what that means for later ones."""
        if not isinstance(error, MismatchError):
            self.group.mark_failed(self.operation, error)  # also after Ctrl-C
        if record is not None:
            self.group.end(record, error)

    @abstractmethod
    def meet(self, send: int, out: int, timeout: float | None) -> None:
        """Call the kernel until it is done; arguments and errors as `run`."""


class NodeCall(_AddressCall):
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
        work: KernelCall,
        shape: tuple[int, ...] | None = None,
        before: int = 0,
    ) -> None:
        assert call.engine is not None
        super().__init__(call, shape)
        self._engine = call.engine
        self._before = before
        self._use(work)

    def _use(self, work: KernelCall) -> None:
        self._work = work
        self.kernel = work.kernel
        self.block = ctypes.addressof(work.block)
        self._send, self._out = (field_view(work.block, name) for name in ("send", "out"))
        takes = self.shape is None and self._before == 0
        self.arrays = self.block + Block.send.offset if takes else 0

    def matching_detail(
        self,
        nbytes: int,
        table: CopyTable,
        longest: int,
        kept: tuple[int, int] = (0, 0),
        detail: int = 0,
    ) -> NodeCall:
        """Plan another meeting of the same call; arguments as `Engine.plan_publish`."""
        other = copy.copy(self)
        digest = signature.hash_of(self._description)
        other._use(self._engine.plan_publish(nbytes, table, digest, longest, kept, detail))
        return other

    @property
    def is_mismatch(self) -> bool:
        """Whether the ranks knew different details in the last meeting, and nothing has moved."""
        return bool(self._work.block.detail_mismatch)

    @property
    def input_offset(self) -> int:
        """After how many bytes of the result this rank's array may begin, of which it is a part."""
        return -self._before

    def run(
        self,
        send: int,
        out: int,
        timeout: float | None,
        frame: FrameType,
        then: Callable[[], None] | None = None,
    ) -> None:
        """As for all plans; `then` does what is left where nothing has moved (`is_mismatch`)."""
        if self.group.listener is not self.group.status:  # who wants more than a kernel tells
            super().run(send, out, timeout, frame, then)
            return
        group = self.group
        if group.gate is not None:
            group.check_free(self.operation)
        group.gate = self
        self._send[0] = send
        self._out[0] = out - self._before
        self.repeat(timeout, frame, then)

    def repeat(
        self, timeout: float | None, frame: FrameType, then: Callable[[], None] | None = None
    ) -> None:
        """As `run`, with arrays of which the block knows (`arrays`), and told by the kernel itself.

        The caller stores this plan as the group's gate before it changes the block, because
        another thread may use the same plan.

        What the recorder and the other ranks of the node are told is the same.

        Args:
            timeout: seconds, None for the setting.
            frame: of the operation's caller, as for `Recorder.take`.
            then: does the rest of the call if nothing has moved (`is_mismatch`).
        """
        group, operation = self.group, self.operation
        record = None
        try:
            group.call_number = number = group.call_number + 1
            record = group.recorder.take(number, operation, self.fields, frame)
            board = cast(StatusBoard, group.status)  # there is one with the engine
            if record.caller is not board.caller or operation != board.operation:
                board.write_text(record)
            status = self.kernel(self.block, record.address, number)
            if status:
                self.go_on(status, timeout)
            if then is not None and self.is_mismatch:
                if not status:  # the kernel has told that it is over
                    record.begin()
                    board.enter(record)
                then()
                status = NOTED
        except BaseException as error:
            self._record_failure(record, error)
            raise
        finally:
            group.gate = group.unusable
        if status:
            group.end(record, None)

    def bind(self, send: Array | None, out: Array | None) -> None:
        """Say where its arrays are, for calls of the kernel alone."""
        self._send[0] = 0 if send is None else address(send)
        self._out[0] = 0 if out is None else address(out) - self._before

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Carry out the call that has made the plan; raises what `Call.checked` does."""
        self.bind(send, out)
        call.drive(self._work)

    def meet(self, send: int, out: int, timeout: float | None) -> None:
        """Call the kernel until it is done; arguments and errors as `run`."""
        self._send[0] = send
        self._out[0] = out - self._before
        if status := self.kernel(self.block):
            self.go_on(status, timeout)

    def go_on(self, status: int, timeout: float | None) -> None:
        """Wait for the others, of whom the kernel has told this status, or say in what they differ.

        Arguments and errors as `run`.
        """
        if status == NOTED:  # done
            return
        deadline = self.group.deadline(self.operation, timeout)
        if not self._engine.run(self._work, deadline, status):
            signature.raise_mismatch(self.group.transport, self._description, deadline)


class EagerCall(_AddressCall):
    """A small call by messages of compiled code.

    Args:
        call: that makes it, and has been described.
        exchange: that sends it.
        block: of its kernel.
    """

    def __init__(self, call: Call, exchange: EagerExchange, block: EagerBlock) -> None:
        super().__init__(call)
        self.fields.pop(signature.NUMBER, None)  # of which every call has its own
        self._exchange = exchange
        self._kernel = exchange.kernel
        self._block = block
        self._hash, self._inverse_hash, self._send, self._out = (
            field_view(block.fields, name) for name in ("hash", "inverse_hash", "send", "out")
        )
        self._digest = signature.hash_of({"operation": self.operation, **self.fields})

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Carry out the call that has made the plan; raises what `Call.checked` does."""
        self._fill(*(0 if array is None else address(array) for array in (send, out)))
        call.exchange_eager(self._exchange, self._block)

    def meet(self, send: int, out: int, timeout: float | None) -> None:
        """Call the kernel until it is done; arguments and errors as `run`."""
        self._fill(send, out)
        if status := self._kernel(self._block.address):
            group = self.group
            deadline = group.deadline(self.operation, timeout)
            if not self._exchange.run(self._block, status, deadline):
                call = {**self._description, signature.NUMBER: group.call_number}
                signature.raise_mismatch(group.transport, call, deadline)

    def _fill(self, send: int, out: int) -> None:
        digest = signature.with_number(self._digest, self.group.call_number)
        self._hash[0], self._inverse_hash[0] = digest, ~digest
        self._send[0], self._out[0] = send, out


class MessageCall:
    """A call by messages whose arguments have been looked at.

    Args:
        call: that makes it, and has been described.
        move: compares the call, and moves flat arrays.
        shape: of the result; that of the array if None.
    """

    by_messages = True
    arrays = 0
    input_offset = None  # nowhere: see `NodeCall.input_offset`

    def __init__(
        self, call: Call, move: Callable[..., None], shape: tuple[int, ...] | None = None
    ) -> None:
        self.shape = shape
        self.group = call.group
        self._fields = call.description
        self.operation = str(self._fields.pop("operation"))
        self._fields.pop(signature.NUMBER, None)  # of which later calls have their own
        self._move = move

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Carry out the call that has made the plan."""
        self._move(call, send, out)

    def run(
        self, send: Array | None, out: Array | None, timeout: float | None, frame: FrameType
    ) -> None:
        """Make the call once more, with flat arrays; arguments and errors as `NodeCall.run`.

        `begin_call` finds the caller without `frame`, in a microsecond of at least 20.
        """
        with begin_call(self.group, self.operation, timeout) as call:
            call.describe(**self._fields)
            self._move(call, send, out)


AnyCall = NodeCall | EagerCall | MessageCall


class PlanArguments(Protocol):
    """A plan, as far as it says how it takes arrays."""

    @property
    def by_messages(self) -> bool:
        """Whether as arrays; else by their addresses."""


def as_plan_argument(plan: PlanArguments, array: Array) -> Any:
    """Return an array as a plan takes it; whoever gives it, keeps it."""
    return array if plan.by_messages else address(array)
