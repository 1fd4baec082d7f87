"""One call of an operation: deadline, signature check, and the effect of a failure.

The steps of docs/how-a-call-goes.md, and the methods that carry them out:

    step 2   `__enter__`   number the call, start its deadline, create the node engine in the
                           first call
    step 4   `describe`    list the fields that must be equal on all ranks
    step 6   `agree`, `reduce_eager`, `exchange_integers`: compare by messages or in the engine;
             `checked`     record a comparison that the engine made
    end      `__exit__`    record the call. After a refusal (wrong arguments on this rank), inform
                           the other ranks; after any other error, make the group unusable

The comparison precedes every change of memory and every transfer of data.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, TypeVar, cast

import numpy as np

from collectives.algorithms import halving_doubling, hierarchical, selection
from collectives.algorithms.eager import EagerBlock, EagerExchange
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MAX, Op
from collectives.calls import signature, signature_check
from collectives.calls.group import Group
from collectives.core.errors import CollectiveError, MismatchError
from collectives.node.engine import Engine, KernelCall
from collectives.tracing.call_sites import caller

__all__ = ["Call", "begin_call", "is_timeout"]

E = TypeVar("E", bound=BaseException)

# Operations that exchange row counts; the exchange compares the calls even with UNISONO_CHECK=off.
_ALWAYS_COMPARED = (
    "allgather", "allgather_object", "alltoall", "gather", "gather_object", "grouped_allgather",
    "plan_allgather", "sparse_allreduce",
)  # fmt: skip


def is_timeout(timeout: float | None) -> bool:
    """Return whether a timeout is valid: seconds > 0, or None for the setting."""
    # Above 0: a limit that has already passed would only fail where ranks must wait.
    return timeout is None or (isinstance(timeout, Real) and timeout > 0)


def begin_call(group: Group, operation: str, timeout: float | None = None) -> Call:
    """Begin a call; use as a context manager.

    Raises:
        CollectiveError: the group was closed, or an earlier call failed.
        ValueError: the timeout is not a positive number.
    """
    if is_timeout(timeout):
        return Call(group, operation, timeout)
    with Call(group, operation):  # an error in the block informs the other ranks
        raise ValueError(f"{operation}: timeout must be seconds > 0, got {timeout!r}")


class Call:
    """A call under way, as a context manager.

    Call `describe` first, then compare, then move data.

    Attributes:
        group: the ranks.
        operation: name of the operation.
        deadline: limit of every wait in the call.
        engine: the node engine, if all ranks share one; None if the call uses messages.
        digest: hash of the description.
    """

    def __init__(self, group: Group, operation: str, timeout: float | None = None) -> None:
        self.group = group
        self.operation = operation
        self._timeout = timeout
        # The enclosing call of this thread, which gets the gate back; None without one.
        self._outer: object = None
        self.digest = 0
        # An error that all ranks raise, so that this rank need not announce it.
        self._known: BaseException | None = None
        self._description: signature.Description = {}

    def describe(self, **fields: object) -> None:
        """Set the fields that must be equal on all ranks.

        Raises:
            ValueError: `algorithm` is unknown, or not available here.
        """
        if "algorithm" in fields:
            name = cast(str, fields["algorithm"])
            selection.check(
                self.operation,
                name,
                in_memory=self.engine is not None,
                on_device=fields.get("memory") == "device",
            )
        # A record has operation and number as attributes of their own.
        self._record.fields = fields
        self._description = {"operation": self.operation, **fields}
        if self.engine is None:
            # The engine numbers its rounds itself, so only messages need the number of the call.
            self._description[signature.NUMBER] = self.group.call_number
        self.digest = signature.hash_of(self._description)

    def add(self, **fields: object) -> None:
        """Add fields that must be equal on all ranks."""
        self._description |= fields
        self.digest = signature.hash_of(self._description)

    @property
    def description(self) -> signature.Description:
        """The fields that must be equal on all ranks."""
        # A copy, because plans keep it beyond the call and remove fields.
        return dict(self._description)

    def check_root(self, root: int) -> None:
        """Check that the root is a rank of the group.

        Raises:
            ValueError: the root is outside 0 .. size - 1.
        """
        if not 0 <= root < self.group.size:
            raise ValueError(
                f"{self.operation}: no such root, expected 0 .. {self.group.size - 1}, got {root}"
            )

    def agree(self) -> None:
        """Check that all ranks make this call.

        Raises:
            MismatchError: the calls differ; the same error on all ranks.
        """
        if self.engine is not None:
            self.checked(self.engine.agree(self.digest, self.deadline))
            return
        # Before the messages, which other ranks may have received when an error interrupts this
        # rank.
        self._compared = True
        if self.group.verifies:
            self._compare(signature_check.NOTHING)

    def fits_eager(
        self, algorithm: str, nbytes: int, most: int = signature_check.MAX_PAYLOAD_BYTES
    ) -> bool:
        """Whether the data of an operation fits into the messages of its comparison.

        Args:
            algorithm: the caller's argument.
            nbytes: bytes that a rank contributes, equal on all ranks.
            most: largest number of bytes that fits.
        """
        # With checks off no comparison is sent, so no data can travel with it.
        checks = self.group.settings.check != "off"
        return checks and algorithm == "auto" and nbytes <= most

    def reduce_eager(self, data: Array, op: Op = MAX) -> Array:
        """Compare the calls as `agree` does, and reduce data in the same messages.

        Args:
            data: shape (n,), accepted by `fits_eager`, prepared for `op`.
            op: the reduction; MAX transports bytes that are zero on all ranks but one.

        Returns:
            The reduction over all ranks, the same bits on all ranks.
        """
        self._compared = True
        return self._compare(signature_check.Piggyback(data, op))

    def _compare(self, contribution: signature_check.Piggyback) -> Array:
        """Compare by messages, and reduce the contributions."""
        deadline = self.deadline
        waits, deadline.waits = deadline.waits, None  # the timeline shows one wait for all ranks
        began = 0 if waits is None else time.monotonic_ns()
        joined = signature_check.verify(
            self.group, self.digest, self._description, deadline, contribution
        )
        if waits is not None:
            waits.exchanged(began)
            deadline.waits = waits
        deadline.first_call = False  # all ranks have entered the call
        return joined

    def exchange_integers(self, *numbers: int) -> Array:
        """Compare the calls, and return the numbers of all ranks: shape (size, n), int64."""
        assert self.operation in _ALWAYS_COMPARED
        own = np.array(numbers, np.int64)
        told = np.zeros((self.group.size, own.size), np.int64)
        if self.engine is not None:
            wanted = [(rank, 0, told[rank]) for rank in range(self.group.size)]
            self.checked(self.engine.publish(own, wanted, self.digest, self.deadline, own.nbytes))
            return told
        told[self.group.rank] = own
        # As bytes, because MAX of bytes with zeros joins rows of any numbers, also negative ones.
        if told.nbytes <= signature_check.MAX_PAYLOAD_BYTES:
            carried = self.reduce_eager(told.reshape(-1).view(np.uint8)).view(np.int64)
            return carried.reshape(told.shape)
        # First the comparison: an all-gather of different calls would mix up their data.
        self.reduce_eager(*signature_check.NOTHING)
        bounds = range(0, told.size + 1, own.size)
        halving_doubling.allgather(self.group.transport, told.reshape(-1), bounds, self.deadline)
        return told

    def announce(self, error: E) -> E:
        """Mark an error that the other ranks also raise, and return it for `raise`.

        The group stays usable after an announced error.
        """
        self._known = error
        return error

    def next_chunk(self) -> None:
        """Start a chunk with a comparison of its own: until then this rank may refuse again."""
        # Each chunk is compared, so a wrong argument found between two chunks may be refused.
        self._compared = False
        # The engine counts the calls that it has run, so a larger count means that this rank has
        # synchronized.
        self._driven = 0 if self.engine is None else self.engine.driven

    def engine_for(self, algorithm: str) -> Engine | None:
        """Return the node engine if this call's data moves through it, None if by messages."""
        return self.engine if algorithm in ("auto", "node") else None

    def drive(self, work: KernelCall) -> None:
        """Run work in the node engine, which synchronizes all ranks; errors as `checked`."""
        assert self.engine is not None
        self.checked(self.engine.run(work, self.deadline))

    def exchange_eager(self, exchange: EagerExchange, block: EagerBlock) -> None:
        """Exchange eager messages; errors as `checked`."""
        # As in `agree`: the kernel sends at once.
        self._compared = True
        self.checked(exchange.exchange(block, self.deadline))

    def checked(self, alike: bool) -> None:
        """Record the result of a comparison.

        Args:
            alike: whether all ranks make the same call.

        Raises:
            MismatchError: the calls differ; the same error on all ranks.
        """
        # Also if the calls differ: all ranks know it, so this rank has nothing to announce.
        self._compared = True
        self.deadline.first_call = False  # all ranks have entered the call
        if not alike:
            signature.raise_mismatch(self.group.transport, self._description, self.deadline)

    def algorithm(
        self, operation: str, name: str, nbytes: int, levels: hierarchical.Levels | None = None
    ) -> Callable[..., Any]:
        """Return the function that runs an operation by messages, bound to the ranks.

        Args:
            operation: a key of `selection.ALGORITHMS`.
            name: name of the algorithm, or "auto".
            nbytes: bytes of the whole array, equal on all ranks; unused where "auto" has one
                choice.
            levels: stages of a hierarchical algorithm; None uses the stages of the group.
        """
        group = self.group
        # From the layout, which is equal on all ranks, so all pick the same algorithm.
        if name == "auto":
            name = selection.pick(operation, nbytes, group.layout)
        if self.deadline.waits is not None:
            self.deadline.waits.algorithm_chosen(name)
        ranks = (levels or group.levels) if name == "hierarchical" else group.transport
        return partial(selection.ALGORITHMS[operation][name].run, ranks)

    def __enter__(self) -> Call:
        group = self.group
        # A free gate costs a call one test.
        if group.gate is not None:
            group.check_free(self.operation)
        # After `check_free`, None or a call of this thread.
        self._outer = group.gate
        try:
            group.gate = self
            # In the try block, so that an error below reopens the gate.
            group.call_number += 1
            self.deadline = group.deadline(self.operation, self._timeout)
            self.deadline.first_call = group.call_number == 1
            # In the first call all ranks create the engine, even if some of them refuse the call.
            self.engine = group.shared_memory_engine(self.deadline)
            self.next_chunk()
            # The line of the program in records and errors, found from this frame outwards.
            self._record = group.begin(self.operation, frame=caller())
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._end(error)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Reopen the gate for the group's next call, or return the gate to the enclosing call."""
        group = self.group
        # A call that has made the group unusable leaves the gate closed.
        group.gate = group.unusable if group.unusable is not None else self._outer

    def _end(self, error: BaseException | None) -> None:
        """Record the end of the call, and announce a refusal to the other ranks."""
        refused = self._is_refusal(error)
        # After these all ranks are in step, and no message is pending.
        harmless = refused or isinstance(error, MismatchError) or error is self._known
        if error is not None and not harmless:
            # Before the records are written, because a second Ctrl-C may interrupt the writing.
            self.group.mark_failed(self.operation, error)
        self.group.end(self._record, error)
        # After the end of the record, so that a wait for the other ranks is not a part of the call.
        if refused and error is not None:
            self._refuse(error)

    def _is_refusal(self, error: BaseException | None) -> bool:
        """Whether the error concerns this rank's own arguments, or its memory for them.

        An error after this rank has begun to synchronize, such as one of a signal handler during a
        wait, is not a refusal: the other ranks would mistake the announcement for the next part of
        the call.
        """
        # A `CollectiveError` concerns other ranks, which have detected it themselves.
        own = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        in_engine = self.engine is not None and self.engine.driven != self._driven
        # After a comparison the other ranks continue, and wait for data of this rank.
        return own and not self._compared and not in_engine

    def _refuse(self, error: BaseException) -> None:
        """Announce the refusal to the other ranks; the caller then raises the error unchanged."""
        self.describe(refused=f"{type(error).__name__}: {error}")
        # Regardless of `verifies`: the other ranks may run an operation that is always compared.
        told = self.group.settings.check != "off" or self.operation in _ALWAYS_COMPARED
        try:
            # The other ranks raise `MismatchError`, and so does the comparison here; the caller
            # raises its own.
            with contextlib.suppress(MismatchError):
                if told and self.engine is None:
                    self.reduce_eager(*signature_check.NOTHING)
                else:
                    # The engine compares every call, and without checks no message is sent.
                    self.agree()
        except BaseException as failure:
            # A missing rank makes the group unusable, but the caller still raises the refusal.
            self.group.mark_failed(self.operation, failure)
            if not isinstance(failure, CollectiveError):  # a signal handler raised it
                raise
