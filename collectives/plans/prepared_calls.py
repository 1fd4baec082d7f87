"""Prepared calls: their interface, and those of the node engine.

| plan | synchronization | contents |
| --- | --- | --- |
| `NodeCall` | shared memory | description and its hash, kernel, loops, bounds and tables |
| `LoneCall` | none: one rank | description, and later a kernel |
| `EagerCall` | small messages of compiled code | description and its hash, kernel, loops |
| `MessageCall` | messages | description, and the function that moves the arrays |

A call that creates a plan and a call that reuses one use the same rounds or messages and compare
the same hashes. So some ranks may have a plan while other ranks create one.

These classes, `gather_plan.GatherPlan` and `planner.CompositePlan` implement `PreparedCall`.
"""

from __future__ import annotations

import copy
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, cast

from collectives.arrays.host_arrays import Array
from collectives.calls import signature
from collectives.calls.call import Call
from collectives.calls.group import Group
from collectives.core.errors import MismatchError
from collectives.kernels.structures import field_view
from collectives.node.control_block import NOTED, Block
from collectives.node.engine import CopyTable, KernelCall
from collectives.tracing.peer_status import StatusBoard
from collectives.tracing.recorder import Record

__all__ = ["CompiledCall", "NodeCall", "PreparedCall"]


class PreparedCall(Protocol):
    """A call that needs only its arrays."""

    @property
    def group(self) -> Group:
        """The ranks."""

    def node_call(self) -> NodeCall | None:
        """Return the call of a kernel that repeats this one; None without one."""

    def run(
        self, send: Array, out: Array | None, timeout: float | None, frame: FrameType, /
    ) -> Array | None:
        """Repeat the call.

        Args:
            send: this rank's array, contiguous.
            out: contiguous array for the result; None if this rank has no result or needs a new
                array.
            timeout: seconds; None uses UNISONO_TIMEOUT.
            frame: frame of the operation's caller, as for `Recorder.take`.

        Returns:
            The result if the call created an array for it, else None.

        Raises:
            CollectiveError: an earlier call failed.
            MismatchError: the ranks do not make the same call; on all ranks.
            CollectiveTimeout: a rank is missing after `timeout` seconds.
        """


class CompiledCall(ABC):
    """A call of compiled code that needs only the addresses of its arrays.

    Args:
        call: the described call that creates the plan.
        shape: shape of the result; None for the shape of the array.
    """

    # Address of two words for the addresses of the arrays, which `repeat` needs; 0 without
    # `repeat`.
    arrays = 0

    def __init__(self, call: Call, shape: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.group = call.group
        self._description = call.description
        # Records name the operation apart from the fields; a mismatch needs both, in
        # `_description`.
        self.fields = dict(self._description)
        self.operation = str(self.fields.pop("operation"))

    def run(
        self,
        send: Array | None,
        out: Array | None,
        timeout: float | None,
        frame: FrameType,
        then: Callable[[], Exception | None] | None = None,
    ) -> Array | None:
        """Repeat the call as `PreparedCall.run`; `then` as for `NodeCall.repeat`."""
        group, error = self.group, None
        if group.gate is not None:
            group.check_free(self.operation)
        record = None
        # From here on an error makes the group unusable, because other ranks may be in the call.
        try:
            group.gate = self
            group.call_number += 1
            record = group.begin(self.operation, self.fields, frame)
            self.meet(send, out, timeout)
            if then is not None:
                error = then()
        except BaseException as failure:
            self._record_failure(record, failure)
            raise
        finally:
            group.gate = group.unusable
        group.end(record, error)
        if error is not None:
            raise error
        return None

    def node_call(self) -> NodeCall | None:
        """Return the call of a kernel that repeats this one; None without one."""
        return None

    def _record_failure(self, record: Record | None, error: BaseException) -> None:
        """Record the failure of a call, and make the group unusable except after a mismatch."""
        # After a mismatch no message is pending and all ranks raise, so the group stays usable.
        if not isinstance(error, MismatchError):
            self.group.mark_failed(self.operation, error)  # also after Ctrl-C
        if record is not None:
            self.group.end(record, error)

    @abstractmethod
    def meet(self, send: Array | None, out: Array | None, timeout: float | None) -> None:
        """Run the kernel until the call is complete; arguments and errors as `run`."""


class NodeCall(CompiledCall):
    """A call in the node engine that needs only the addresses of its arrays.

    Args:
        call: the described call that creates the plan.
        work: kernel, block and tables.
        shape: shape of the result; None for the shape of the array.
        before: offset of the result in the whole array, in bytes, if the result is a chunk.
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

    def node_call(self) -> NodeCall | None:
        """Return this call: its kernel repeats it."""
        return self

    def _use(self, work: KernelCall) -> None:
        self._work = work
        self.kernel = work.kernel
        self.block = ctypes.addressof(work.block)
        self._send, self._out = (field_view(work.block, name) for name in ("send", "out"))
        # `AddressReader.bind` stores addresses without an offset, and only for arrays of one shape.
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
        """Plan another round of the same call; arguments as `Engine.plan_publish`."""
        # The copy shares group, engine and description, and gets a block of its own.
        other = copy.copy(self)
        digest = signature.hash_of(self._description)
        other._use(self._engine.plan_publish(nbytes, table, digest, longest, kept, detail))
        return other

    @property
    def is_mismatch(self) -> bool:
        """Whether the last round found different details, so that no data moved."""
        return bool(self._work.block.detail_mismatch)

    @property
    def input_offset(self) -> int:
        """Bytes from the result to the start of this rank's array, if they share memory."""
        return -self._before

    def run(
        self,
        send: Array | None,
        out: Array | None,
        timeout: float | None,
        frame: FrameType,
        then: Callable[[], Exception | None] | None = None,
    ) -> Array | None:
        """Repeat the call as `PreparedCall.run`; `then` completes it after a detail mismatch."""
        if self.group.listener is not self.group.status:  # a timeline, which needs full records
            super().run(send, out, timeout, frame, then)
            return None
        group = self.group
        if group.gate is not None:
            group.check_free(self.operation)
        group.gate = self
        readable = group.address_reader.readable  # inline, because a call of `bind` costs 0.1 us
        self._send[0] = 0 if send is None else readable(send)
        self._out[0] = (0 if out is None else readable(out)) - self._before
        self.repeat(timeout, frame, then)
        return None

    def repeat(
        self,
        timeout: float | None,
        frame: FrameType,
        then: Callable[[], Exception | None] | None = None,
    ) -> None:
        """Repeat the call with the addresses in the block (`arrays`); the kernel writes the record.

        The caller stores this plan as the group's gate before it changes the block, because
        another thread may use the same plan. Flight records and status board get the same contents
        as from `run`.

        Args:
            timeout: seconds; None uses UNISONO_TIMEOUT.
            frame: frame of the operation's caller, as for `Recorder.take`.
            then: completes the call after a detail mismatch (`is_mismatch`); may return an error.
                All ranks raise it, and the group stays usable.
        """
        group, operation = self.group, self.operation
        record = error = None
        try:
            group.call_number = number = group.call_number + 1
            record = group.recorder.take(number, operation, self.fields, frame)
            board = cast(StatusBoard, group.status)  # exists, because the engine exists
            # Loops repeat a call from one line, and then the text of the last note still fits.
            if record.caller is not board.caller or operation != board.operation:
                board.write_text(record)
            status = self.kernel(self.block, record.address, number)
            if status or (then is not None and self.is_mismatch):
                error = self._complete(record, status, timeout, then)
                status = NOTED
        except BaseException as failure:
            self._record_failure(record, failure)
            raise
        finally:
            group.gate = group.unusable
        # After DONE the kernel has recorded the end itself.
        if status:
            group.end(record, error)
        if error is not None:
            raise error

    def complete(self, status: int, result: Any, x: Any, out: Any, timeout: float | None) -> Any:
        """Complete a call that the fast path has begun, and return its result.

        Args:
            status: of the kernel; not DONE, except after a detail mismatch.
            result: array or tensor for the result.
            x: array or tensor of the program.
            out: `out` of the program.
            timeout: seconds; None uses UNISONO_TIMEOUT.

        Raises:
            As `PreparedCall.run`.
        """
        self.complete_begun(status, timeout)
        return result

    def complete_begun(
        self, status: int, timeout: float | None,
        then: Callable[[], Exception | None] | None = None,
    ) -> None:  # fmt: skip
        """Complete a call that the fast path has begun; arguments as `repeat` and `complete`."""
        group, record = self.group, self.group.recorder.newest
        error = None
        try:
            group.fast_path.state.owner = 0  # from here on this frame shows the thread
            error = self._complete(record, status, timeout, then)
        except BaseException as failure:
            self._record_failure(record, failure)
            raise
        finally:
            group.gate = group.unusable
        group.end(record, error)
        if error is not None:
            raise error

    def _complete(
        self, record: Record, status: int, timeout: float | None,
        then: Callable[[], Exception | None] | None,
    ) -> Exception | None:  # fmt: skip
        """Wait after a nonzero status; after a detail mismatch return the error of `then`."""
        if status:
            self.go_on(status, timeout)
        # Different details are not an error: the kernel returns DONE, and has moved nothing.
        if then is None or not self.is_mismatch:
            return None
        if not status:  # the kernel has recorded the end: record a new start
            record.begin()
            cast(StatusBoard, self.group.status).enter(record)
        return then()

    def bind(self, send: Array | None, out: Array | None) -> None:
        """Write the addresses of the arrays into the block, for direct calls of the kernel."""
        readable = self.group.address_reader.readable
        self._send[0] = 0 if send is None else readable(send)
        self._out[0] = (0 if out is None else readable(out)) - self._before

    def first(self, call: Call, send: Array | None = None, out: Array | None = None) -> None:
        """Run the call that created the plan; errors as `Call.checked`."""
        self.bind(send, out)
        call.drive(self._work)

    def meet(self, send: Array | None, out: Array | None, timeout: float | None) -> None:
        """Run the kernel until the call is complete; arguments and errors as `run`."""
        self.bind(send, out)
        if status := self.kernel(self.block):
            self.go_on(status, timeout)

    def go_on(self, status: int, timeout: float | None) -> None:
        """Continue a call after a nonzero status of the kernel: wait, or raise a mismatch.

        Arguments and errors as `run`.
        """
        if status == NOTED:  # complete
            return
        deadline = self.group.deadline(self.operation, timeout)
        # The comparison fails on all ranks of the round, so all of them exchange descriptions.
        if not self._engine.run(self._work, deadline, status):
            signature.raise_mismatch(self.group.transport, self._description, deadline)
