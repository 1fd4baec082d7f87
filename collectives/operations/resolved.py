"""A call in the node engine that is ready but for the addresses of its arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from collectives.arrays.host import address
from collectives.errors import MismatchError
from collectives.operations import compare
from collectives.operations.call import Calls

if TYPE_CHECKING:
    from collectives.node.engine import Engine, Rows, Work

__all__ = ["Resolved"]

# Frames from the recorder to the caller of a method of `Communicator`: `Recorder.begin`,
# `Calls.begin`, `Resolved.run`, the method of `Repeats`, and that of `Communicator`.
_DEPTH = 5


class Resolved:
    """Description, hash, kernel and tables of a call, found once and used again and again.

    Args:
        calls: those of the communicator.
        engine: where the ranks meet.
        operation: the name that errors carry.
        description: what must be equal on all ranks.
        work: kernel, block and tables.
    """

    __slots__ = (
        "_block", "_calls", "_description", "_engine", "_fields", "_kernel", "_operation", "_out",
        "_send", "_words", "_work",
    )  # fmt: skip

    def __init__(
        self, calls: Calls, engine: Engine, operation: str, description: compare.Description,
        work: Work,
    ) -> None:  # fmt: skip
        from collectives.node import rounds

        self._calls = calls
        self._engine = engine
        self._operation = operation
        self._description = description
        self._fields = {name: fact for name, fact in description.items() if name != "operation"}
        self._work = work
        self._kernel = work.kernel
        self._block = address(work.block)
        self._words = work.block.data
        self._send, self._out = rounds.SEND, rounds.OUT

    def run(
        self, send: int, out: int, timeout: float | None, then: Callable[[], None] | None = None
    ) -> None:
        """Make the call once more, with arrays at these addresses.

        Args:
            send: address of this rank's array.
            out: address of the result.
            timeout: seconds, None for the setting.
            then: does the rest of the call.

        Raises:
            CollectiveError: an earlier call on the communicator failed.
            MismatchError: the ranks do not make the same call; on all ranks.
            CollectiveTimeout: some rank did not come within `timeout` seconds.
        """
        calls = self._calls
        if calls.unusable is not None:
            calls.check_usable(self._operation)
        record = None
        try:
            calls.number += 1
            record = calls.begin(self._operation, self._fields, _DEPTH)
            self.meet(send, out, timeout)
            if then is not None:
                then()
        except BaseException as error:
            if not isinstance(error, MismatchError):
                calls.failed(self._operation, error)  # also after Ctrl-C
            if record is not None:
                calls.end(record, error)
            raise
        calls.end(record, None)

    def like(self, nbytes: int, rows: Rows, longest: int) -> Resolved:
        """Resolve another meeting of the same call; arguments as `Engine.plan_publish`."""
        digest = compare.digest(self._description)
        work = self._engine.plan_publish(nbytes, rows, digest, longest)
        return Resolved(self._calls, self._engine, self._operation, self._description, work)

    def meet(self, send: int, out: int, timeout: float | None) -> None:
        """Call the kernel until it is done; arguments and errors as `run`."""
        words = self._words
        words[self._send] = send
        words[self._out] = out
        if status := self._kernel(self._block):
            self.go_on(status, timeout)

    def go_on(self, status: int, timeout: float | None) -> None:
        """Wait for the others, or say in what they differ; errors as `run`.

        Args:
            status: what the kernel has returned.
            timeout: seconds, None for the setting.
        """
        calls = self._calls
        limit = calls.settings.timeout if timeout is None else timeout
        deadline = calls.deadline(self._operation, limit)
        if not self._engine.drive(self._work, deadline, status):
            compare.raise_mismatch(calls.transport, self._description, deadline)
