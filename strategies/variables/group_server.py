"""Server of a variable group: one thread handles all requests in order.

Only this thread reads and changes the variables, so that no reply contains half of an update.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from strategies.errors import CancelledError, OpError
from strategies.optimizers import Optimizer
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.wire import Array
from strategies.variables.variable_group import VariableGroup, VariableState, pack, unpack

__all__ = ["GroupServer"]

R = TypeVar("R")


class GroupServer:
    """Serve a `VariableGroup`.

    Args:
        name: name in messages and of the threads.

    Attributes:
        group: the variables; only for functions that run in the server's thread.
    """

    def __init__(self, name: str) -> None:
        self.group = VariableGroup(name)
        self._name = name
        # An executor of one thread is the queue: it keeps the order of requests.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def add(
        self,
        name: str,
        value: Array | Callable[[], Array],
        optimizer: Optimizer | None,
        *,
        resident: bool,
    ) -> None:
        """Add a variable; see `VariableGroup.add`."""
        self.run(lambda: self.group.add(name, value, optimizer, resident=resident))

    def own_state(self) -> tuple[dict[str, VariableState], int]:
        """Return name -> state of each variable, as views, and the number of updates."""
        return self.run(lambda: (self.group.states(), self.group.updates))

    def run(self, function: Callable[[], R]) -> R:
        """Call a function between two requests and return its result."""
        # Not for calls in the thread itself, which would wait for itself.
        return self._thread.submit(function).result()

    def serve(
        self,
        work: ServerRequest,
        request: Callable[[ServerRequest], None],
        end: Callable[[OpError | None], None],
    ) -> None:
        """Queue a request for the thread.

        Args:
            work: the request.
            request: handles the request, now or later; its exception is sent as the reply.
            end: ends a waiting request, with an error or, for None, without a reply.
        """

        def answer() -> None:
            try:
                request(work)
            except Exception as error:
                work.fail(error)

        # Set before the request is queued, because it may be withdrawn before its turn. `end` runs
        # in the same thread after the request.
        work.wait(
            lambda error: self._submit(lambda: end(error)), lambda: self._submit(lambda: end(None))
        )
        if not self._submit(answer):
            work.fail(CancelledError(f"{self._name}: it was discarded"))

    def close(self, last: Callable[[], None]) -> None:
        """Call a function after all requests, then stop the threads."""

        def end() -> None:
            last()
            self.group.close()

        # The thread has been stopped before, so nothing can run in parallel.
        if not self._submit(end):
            end()
        # Without waiting: `close` may run in the message loop, which must not block.
        self._thread.shutdown(wait=False)

    def _submit(self, function: Callable[[], object]) -> bool:
        """Queue a function for the thread; return False if the server is closed."""
        try:
            self._thread.submit(function)
        except RuntimeError:
            # Raised by an executor after `shutdown`.
            return False
        return True

    # Request handlers, called in the thread.

    def pull(self, work: ServerRequest, **facts: Any) -> None:
        """Reply with the values that another task's copies lack, and with `facts`."""
        told = work.arguments
        # In the thread, between two updates, so that all values are of one version.
        values, counts = self.group.updates_since(told["version"], told.get("values_as"))
        work.reply(values, version=self.group.version, frames=counts, **facts)

    def rows(self, work: ServerRequest) -> None:
        """Reply with some rows of a variable."""
        told = work.arguments
        work.reply([self.group.rows(told["part"], work.values[0], told.get("values_as"))])

    def assign(self, work: ServerRequest) -> None:
        """Set the values of some variables, which are given by number."""
        for number, value in zip(work.arguments["parts"], work.values, strict=True):
            self.group.assign(number, value)
        work.reply()

    def like(self, work: ServerRequest) -> None:
        """Reply with the kinds and dtypes of the state, and no elements."""
        parts, arrays = pack(self.group.states().values())
        work.reply([array.reshape(-1)[:0] for array in arrays], parts=parts)

    def load(
        self, work: ServerRequest, read: tuple[list[VariableState], int] | None = None
    ) -> None:
        """Restore the states of all variables, and the number of updates.

        Args:
            work: the request.
            read: states and number of updates; None for those in the request.
        """
        if read is None:
            read = unpack(work.arguments["parts"], work.values), work.arguments["updates"]
        states, updates = read
        # States have no names in messages; the order of `add` is the same on all tasks.
        named = dict(zip(self.group.names(), states, strict=True))
        self.group.load(named, updates)
        work.reply()
