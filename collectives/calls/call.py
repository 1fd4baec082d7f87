"""One call of an operation: deadline, signature check, and the effect of its failure.

    enter       step 2 of docs/how-a-call-goes.md: number the call, begin the wait's limit, make the
                node engine in the first one
    describe    step 4: what must be equal on all ranks, once the arguments have been looked at
    compare     step 6: by `agree`, `reduce_eager` or `exchange_integers`, or as the ranks meet in
    the engine (`checked`) refuse      where this rank's arguments are wrong: the others are told,
    and none goes on end         record it; after any other error the group is unusable

Memory is changed, and data sent, only after the comparison.
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

__all__ = ["Call", "begin_call"]

E = TypeVar("E", bound=BaseException)

# Operations that tell each other how many rows they bring compare their calls even if nothing else
# is compared.
_ALWAYS_COMPARED = (
    "allgather", "allgather_object", "alltoall", "gather", "gather_object", "grouped_allgather",
    "plan_allgather", "sparse_allreduce",
)  # fmt: skip


def begin_call(group: Group, operation: str, timeout: float | None = None) -> Call:
    """Begin a call; use as a context manager.

    Raises:
        CollectiveError: the group was closed, or an earlier call failed.
        ValueError: the timeout is not a positive number.
    """
    if timeout is None or (isinstance(timeout, Real) and timeout > 0):
        return Call(group, operation, timeout)
    with Call(group, operation):  # so that the others hear of it
        raise ValueError(f"{operation}: timeout must be seconds > 0, got {timeout!r}")


class Call:
    """A call under way, as a block: in it `describe` comes before the comparison, and that before
    any data.

    Attributes:
        group: the ranks.
        operation: its name.
        deadline: of every wait.
        engine: where all ranks meet in shared memory; None where messages have to serve.
        digest: of the description.
    """

    def __init__(self, group: Group, operation: str, timeout: float | None = None) -> None:
        self.group = group
        self.operation = operation
        self._timeout = timeout
        self._outer: object = None
        self.digest = 0
        self._known: BaseException | None = None
        self._description: signature.Description = {}

    def describe(self, **fields: object) -> None:
        """Say what must be equal on all ranks.

        Raises:
            ValueError: there is no such `algorithm`, or not here.
        """
        if "algorithm" in fields:
            name = cast(str, fields["algorithm"])
            selection.check(
                self.operation,
                name,
                in_memory=self.engine is not None,
                on_device=fields.get("memory") == "device",
            )
        self._record.fields = fields
        self._description = {"operation": self.operation, **fields}
        if self.engine is None:
            # The engine numbers its rounds itself.
            self._description[signature.NUMBER] = self.group.call_number
        self.digest = signature.hash_of(self._description)

    def add(self, **fields: object) -> None:
        """Add to what must be equal on all ranks."""
        self._description |= fields
        self.digest = signature.hash_of(self._description)

    @property
    def description(self) -> signature.Description:
        """What must be equal on all ranks."""
        return dict(self._description)

    def check_root(self, root: int) -> None:
        """Refuse a root that is not a rank of the group.

        Raises:
            ValueError: it is not.
        """
        if not 0 <= root < self.group.size:
            raise ValueError(
                f"{self.operation}: no such root, expected 0 .. {self.group.size - 1}, got {root}"
            )

    def agree(self) -> None:
        """Check that all ranks make this call.

        Raises:
            MismatchError: they do not; the same error on all ranks.
        """
        if self.engine is not None:
            self.checked(self.engine.agree(self.digest, self.deadline))
            return
        self._compared = True
        if self.group.verifies:
            self._compare(signature_check.NOTHING)

    def fits_eager(
        self, algorithm: str, nbytes: int, most: int = signature_check.MAX_PAYLOAD_BYTES
    ) -> bool:
        """Whether an operation by messages is so small that it travels with the comparison.

        Args:
            algorithm: as the caller has it.
            nbytes: of all that a rank contributes, equal on all ranks.
            most: of them.
        """
        checks = self.group.settings.check != "off"
        return checks and algorithm == "auto" and nbytes <= most

    def reduce_eager(self, data: Array, op: Op = MAX) -> Array:
        """Check as `agree`, and combine what the ranks contribute on the way.

        Args:
            data: shape (n,), as `fits_eager` has accepted it, prepared for `op`.
            op: how it is combined; MAX for bytes that are zero on all ranks but one.

        Returns:
            The combination of all, the same bits on all ranks.
        """
        self._compared = True
        return self._compare(signature_check.Piggyback(data, op))

    def _compare(self, contribution: signature_check.Piggyback) -> Array:
        """Compare by messages, and combine what the ranks contribute."""
        deadline = self.deadline
        waits, deadline.waits = deadline.waits, None  # this is one wait, for all ranks
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
        """As `agree`, always, and return what numbers every rank tells, shape (size, n), int64."""
        assert self.operation in _ALWAYS_COMPARED
        own = np.array(numbers, np.int64)
        told = np.zeros((self.group.size, own.size), np.int64)
        if self.engine is not None:
            wanted = [(rank, 0, told[rank]) for rank in range(self.group.size)]
            self.checked(self.engine.publish(own, wanted, self.digest, self.deadline, own.nbytes))
            return told
        told[self.group.rank] = own
        if told.nbytes <= signature_check.MAX_PAYLOAD_BYTES:
            carried = self.reduce_eager(told.reshape(-1).view(np.uint8)).view(np.int64)
            return carried.reshape(told.shape)
        self.reduce_eager(*signature_check.NOTHING)
        bounds = range(0, told.size + 1, own.size)
        halving_doubling.allgather(self.group.transport, told.reshape(-1), bounds, self.deadline)
        return told

    def announce(self, error: E) -> E:
        """Note that the other ranks know of this rank's wrong arguments, and raise an error, too.

        Returns:
            The error, about to be raised, after which the group can go on.
        """
        self._known = error
        return error

    def next_chunk(self) -> None:
        """Begin a part that the ranks compare once more: until then this rank may still refuse."""
        self._compared = False
        self._driven = 0 if self.engine is None else self.engine.driven

    def engine_for(self, algorithm: str) -> Engine | None:
        """Return the node engine if this call's data goes through it, None if by messages."""
        return self.engine if algorithm in ("auto", "node") else None

    def drive(self, work: KernelCall) -> None:
        """Meet in the node engine, and do the work there; errors as `checked`."""
        assert self.engine is not None
        self.checked(self.engine.run(work, self.deadline))

    def exchange_eager(self, exchange: EagerExchange, block: EagerBlock) -> None:
        """Exchange eager messages; errors as `checked`."""
        self._compared = True
        self.checked(exchange.exchange(block, self.deadline))

    def checked(self, alike: bool) -> None:
        """Take note of what the ranks found as they met.

        Raises:
            MismatchError: they do not make the same call; the same error on all ranks.
        """
        self._compared = True
        self.deadline.first_call = False  # all ranks have entered the call
        if not alike:
            signature.raise_mismatch(self.group.transport, self._description, self.deadline)

    def algorithm(
        self, operation: str, name: str, nbytes: int, levels: hierarchical.Levels | None = None
    ) -> Callable[..., Any]:
        """Return the function that carries out an operation by messages, and knows the ranks.

        Args:
            operation: a key of `selection.ALGORITHMS`.
            name: of the algorithm there, or "auto".
            nbytes: the size of the whole array, equal on all ranks; not used where "auto" has only
                one algorithm to pick.
            levels: the stages of a hierarchical one; those of the group if None.
        """
        group = self.group
        if name == "auto":
            name = selection.pick(operation, nbytes, group.layout)
        if self.deadline.waits is not None:
            self.deadline.waits.algorithm_chosen(name)
        ranks = (levels or group.levels) if name == "hierarchical" else group.transport
        return partial(selection.ALGORITHMS[operation][name].run, ranks)

    def __enter__(self) -> Call:
        group = self.group
        if group.gate is not None:
            group.check_free(self.operation)
        self._outer = group.gate
        try:
            group.gate = self
            group.call_number += 1
            self.deadline = group.deadline(self.operation, self._timeout)
            self.deadline.first_call = group.call_number == 1
            self.engine = group.shared_memory_engine(self.deadline)
            self.next_chunk()
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
        """Open the gate for the group's next call, or return it to the call around this one."""
        group = self.group
        group.gate = group.unusable if group.unusable is not None else self._outer

    def _end(self, error: BaseException | None) -> None:
        """Record the end of the call, and announce a refusal to the other ranks."""
        refused = self._is_refusal(error)
        harmless = refused or isinstance(error, MismatchError) or error is self._known
        if error is not None and not harmless:
            # Also after Ctrl-C, and first: another one may end the writing of records.
            self.group.mark_failed(self.operation, error)
        self.group.end(self._record, error)
        if refused and error is not None:
            self._refuse(error)

    def _is_refusal(self, error: BaseException | None) -> bool:
        """Whether the error concerns this rank's own arguments, or its memory for them.

        What is raised once this rank has begun to meet the others, as by a signal handler while it
        waits, is not a refusal: they would take what they are told for the next part of the call.
        """
        own = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        in_engine = self.engine is not None and self.engine.driven != self._driven
        return own and not self._compared and not in_engine

    def _refuse(self, error: BaseException) -> None:
        """Let the other ranks know that this one will not take part; the error goes on as it is."""
        self.describe(refused=f"{type(error).__name__}: {error}")
        # Without a look at `checked`: the others may be in an operation that is compared anyway.
        told = self.group.settings.check != "off" or self.operation in _ALWAYS_COMPARED
        try:
            with contextlib.suppress(MismatchError):
                if told and self.engine is None:
                    self.reduce_eager(*signature_check.NOTHING)
                else:
                    self.agree()
        except BaseException as failure:
            self.group.mark_failed(self.operation, failure)
            if not isinstance(failure, CollectiveError):  # but of a signal handler
                raise
