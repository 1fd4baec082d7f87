"""A reduction in place that is resolved once and called at every step."""

from __future__ import annotations

from typing import Generic

from collectives.arrays.host import Array, address
from collectives.arrays.reduction import Op
from collectives.errors import MismatchError
from collectives.operations import compare, ways
from collectives.operations.call import Call, Calls
from collectives.operations.resolved import Resolved
from collectives.signatures import A

__all__ = ["Plan"]


class Plan(Generic[A]):
    """Reduces one array in place, again and again; made by `Communicator.plan_allreduce`.

    Calling it is *collective*, and one of the communicator's calls: all ranks make the same calls
    in the same order. In the node engine everything is resolved when the plan is made, and a call
    costs little more than the exchange itself.

    Args:
        calls: those of the communicator.
        call: the one that made the plan.
        array: what the caller gave, and gets back.
        flat: its memory, shape (n,).
        op: how to combine.
        timeout: seconds, None for the setting.

    Raises (when called):
        MismatchError: the ranks do not make the same call; on all ranks.
        CollectiveTimeout: as `Communicator.allreduce`.
    """

    __slots__ = ("_address", "_calls", "_facts", "_flat", "_kernel", "_op", "_resolved", "_timeout",
                 "array")  # fmt: skip

    def __init__(
        self, calls: Calls, call: Call, array: A, flat: Array, op: Op, timeout: float | None
    ) -> None:
        self.array = array
        self._flat = flat
        self._calls = calls
        self._op = op
        self._timeout = timeout
        self._facts = {**call.description, "operation": "planned allreduce"}
        self._kernel = None
        if call.engine is not None:
            if place := call.engine.shared.place_of(flat):
                self._facts["memory"] = f"shared array {place.number} + {place.offset} bytes"
            work = call.engine.plan_allreduce(flat, flat, op, compare.digest(self._facts))
            self._resolved = Resolved(calls, call.engine, "allreduce", self._facts, work)
            self._kernel = work.kernel
            self._address = address(work.block)

    def __call__(self) -> A:
        """Reduce the array over all ranks, in place, and return it."""
        if self._kernel is None:
            return self._by_messages()
        if self._calls.unusable is not None:
            self._calls.check_usable("allreduce")
        try:
            if status := self._kernel(self._address):
                self._go_on(status)
        except BaseException as error:
            if not isinstance(error, MismatchError):
                self._calls.failed("allreduce", error)  # also after Ctrl-C
            raise
        return self.array

    def _go_on(self, status: int) -> None:
        """Wait for the others, and record that."""
        record = self._calls.begin("planned allreduce")
        failure = None
        try:
            self._resolved.go_on(status, self._timeout)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._calls.end(record, failure)

    def _by_messages(self) -> A:
        flat = self._flat
        with self._calls.enter("allreduce", self._timeout) as call:
            facts = {k: v for k, v in self._facts.items() if k not in ("operation", compare.NUMBER)}
            call.describe(**facts, planned=True)
            ways.allreduce(self._calls.transport, call, flat, flat, self._op, "auto")
        return self.array
