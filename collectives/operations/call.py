"""One call of one operation: its limit, its check, and what its failure means for later calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any

from collectives import settings
from collectives.algorithms import hierarchical, selection, stages
from collectives.algorithms.selection import Layout
from collectives.arrays.host import Array
from collectives.errors import CollectiveError, CollectiveTimeout, MismatchError, PeerFailure
from collectives.node import engine as node
from collectives.operations import compare, recorder, status
from collectives.transport import liveness
from collectives.transport.transport import Deadline, Transport

__all__ = ["Call", "Calls"]

# UNISONO_CHECK=sample compares the first calls, where programs are wrong from the start, and then
# every so many, where ranks drift apart. Counted per communicator, so that all ranks choose alike.
_SAMPLE_FIRST = 64
_SAMPLE_EVERY = 64


# Operations that tell each other how many rows they bring compare their calls even if nothing else
# is compared.
_ALWAYS_COMPARED = ("allgather", "allgather_object", "gather", "sparse_allreduce")

# After a failure MPI may take as long to end as an operation may wait, but not less than this: a
# short limit of operations says nothing about how long the other ranks' programs go on.
_LEAST_EXIT_SECONDS = 60.0

_NO_FIELDS: Mapping[str, object] = {}


class Calls:
    """The calls made on one communicator, one after the other.

    Args:
        transport: the ranks.
        leaders: for every rank an integer that is the same exactly for the ranks of one node.
        configuration: the settings.
        name: of the communicator, in flight records.
    """

    def __init__(
        self,
        transport: Transport,
        leaders: Sequence[int],
        configuration: settings.Settings,
        name: str,
    ) -> None:
        self.transport = transport
        self.name = name
        self.recorder = recorder.Recorder(name, transport.rank, transport.size)
        self.board: status.Board | None = None
        self.settings = configuration
        self.layout = Layout(transport.size, len(set(leaders)), configuration.links.machine)
        self.levels = hierarchical.levels(transport, leaders)
        self.number = 0
        self.unusable: str | None = None
        self._on_one_node = self.layout.num_nodes == 1
        self._met = False  # whether the ranks of a node have tried to make an engine
        self.node_engine: node.Engine | None = None  # of the ranks of this rank's node

    def enter(self, operation: str, timeout: float | None) -> Call:
        """Begin a call; use as a context manager.

        Raises:
            CollectiveError: the communicator was closed, or an earlier call on it failed.
            ValueError: the timeout is no time.
        """
        self.check_usable(operation)
        limit = self.settings.timeout if timeout is None else timeout
        self.number += 1
        if not isinstance(limit, Real) or not limit > 0:
            with Call(self, operation, self.settings.timeout):  # so that the others hear of it
                raise ValueError(
                    f"{operation}: timeout is no time, expected seconds > 0, got {limit!r}"
                )
        return Call(self, operation, limit)

    def deadline(self, operation: str, limit: float) -> Deadline:
        """Return a deadline that begins now."""
        return Deadline(operation, limit, self.settings.stall_warning, self._missing)

    def begin(
        self, operation: str, fields: Mapping[str, object] = _NO_FIELDS, depth: int = 3
    ) -> recorder.Record:
        """Record that an operation begins, where other ranks of the node can see it.

        Args:
            operation: its name.
            fields: what is known of it.
            depth: how many frames, from the recorder's, belong to our packages.
        """
        record = self.recorder.begin(self.number, operation, fields, depth)
        if self.board is not None:
            self.board.enter(record)
        return record

    def end(self, record: recorder.Record, error: BaseException | None) -> None:
        """Record that it ends; write all records to a file if a rank was missing or dead."""
        record.end(error)
        if self.board is not None:
            self.board.leave(record)
        if error is not None and isinstance(error, (CollectiveTimeout, PeerFailure)):
            recorder.write(f"{record.operation}: {type(error).__name__}")

    def close(self) -> None:
        """Refuse later calls, and give back what the node engine holds."""
        self.unusable = "it was closed"
        if self.node_engine is not None:
            self.node_engine.close()

    def dead_here(self) -> list[int]:
        """Return the ranks of this node that have died, as far as shared memory tells."""
        return [] if self.node_engine is None else self.node_engine.dead()

    def _missing(self) -> str:
        """Say what the ranks that have not come did last, where that is known."""
        return "" if self.board is None else self.board.missing()

    def check_usable(self, operation: str) -> None:
        """Refuse to go on after a failure."""
        if self.unusable is not None:
            raise CollectiveError(
                f"{operation}: this communicator is not usable any more, since {self.unusable} "
                f"({self.transport.where})"
            )

    def engine(self, deadline: Deadline) -> node.Engine | None:
        """Return the node engine if all ranks meet there, None where messages have to serve.

        It is made in the first call, in which all ranks take part, however it ends. Where there are
        several nodes, each has its own, for the stages inside it.
        """
        if not self._met:
            try:
                self._meet(deadline)
            except BaseException as error:
                self.failed(deadline.operation, error)
                raise
            self._met = True
        return self.node_engine if self._on_one_node else None

    @property
    def by_messages(self) -> bool:
        """Whether the ranks exchange messages in their operations; known after the first call."""
        return self.transport.size > 1 and not (self._on_one_node and self.node_engine)

    def _meet(self, deadline: Deadline) -> None:
        """Make the engine of this rank's node, where it has company and memory to share."""
        ranks = self.transport if self._on_one_node else self.levels.node
        engine = node.start(ranks, self.settings.shared_memory, deadline)
        if engine is not None:
            names = [self.transport.name([ranks.number(rank)]) for rank in range(ranks.size)]
            self.node_engine = engine
            self.board = status.Board(engine.notes, ranks.rank, names)
            engine.last_call = self.board.last
            self.levels = stages.in_shared_memory(self.levels, engine)

    def failed(self, operation: str, error: BaseException) -> None:
        """Close the communicator to later calls: they would meet what is left of this one.

        The end of MPI is one more wait for the others, and gets a limit, too.
        """
        self.unusable = f"{operation} failed: {type(error).__name__}: {error}"
        liveness.limit_exit(max(self.settings.timeout, _LEAST_EXIT_SECONDS))

    @property
    def checked(self) -> bool:
        """Whether the ranks compare their descriptions of the current call by messages."""
        if self.settings.check == "sample":
            return self.number <= _SAMPLE_FIRST or self.number % _SAMPLE_EVERY == 0
        return self.settings.check == "always"


class Call:
    """A call under way.

    The block in which it runs first looks at its arguments and calls `describe`; then the ranks
    agree, by `agree` or `agree_on_rows`, in a small operation that travels with the comparison
    (`carry`), or while they meet in the node engine (`met`); only then is memory changed or data
    sent.
    """

    def __init__(self, calls: Calls, operation: str, limit: float) -> None:
        self._calls = calls
        self._agreed = False
        self._description: compare.Description = {}
        self.operation = operation
        self.deadline = calls.deadline(operation, limit)
        self.engine = calls.engine(self.deadline)
        self._driven = 0 if self.engine is None else self.engine.driven
        self.digest = 0
        self._record = calls.begin(operation)

    def describe(self, **fields: object) -> None:
        """Say what must be equal on all ranks."""
        self._record.fields = fields
        self._description = {"operation": self.operation, **fields}
        if self.engine is None:
            # The engine numbers its rounds itself.
            self._description[compare.NUMBER] = self._calls.number
        self.digest = compare.digest(self._description)

    def add(self, **fields: object) -> None:
        """Add to what must be equal on all ranks."""
        self._description |= fields
        self.digest = compare.digest(self._description)

    @property
    def description(self) -> compare.Description:
        """What must be equal on all ranks."""
        return dict(self._description)

    def agree(self) -> None:
        """Check that all ranks make this call.

        Raises:
            MismatchError: they do not; the same error on all ranks.
        """
        if self.engine is not None:
            self.met(self.engine.agree(self.digest, self.deadline))
            return
        self._agreed = True
        self._compare()

    def _compare(self) -> None:
        """Compare the ranks' descriptions by messages, the same ones for every operation."""
        if self._calls.checked:
            compare.agree(self._ranks, self.digest, self._description, self.deadline)

    def carries(self, algorithm: str, nbytes: int) -> bool:
        """Whether an operation by messages is so small that it travels with the comparison.

        Args:
            algorithm: which is asked for.
            nbytes: of all that a rank contributes, equal on all ranks.
        """
        checks = self._calls.settings.check != "off"
        return checks and algorithm == "auto" and nbytes <= compare.CARRIED_BYTES

    def carry(self, data: Array, combine: Callable[[Array, Array], object]) -> Array:
        """Check as `agree`, and combine what the ranks contribute on the way.

        Args:
            data: shape (n,), as `carries` has accepted it.
            combine: changes its first argument by another rank's contribution.

        Returns:
            The combination of all, the same bits on all ranks.
        """
        self._agreed = True
        contribution = compare.Contribution(data, combine)
        return compare.agree(
            self._ranks, self.digest, self._description, self.deadline, contribution
        )

    def agree_on_rows(self, rows: int) -> list[int]:
        """As `agree`, always, and return how many rows every rank brings."""
        if self.engine is not None:
            facts = self.engine.exchange(rows, self.digest, self.deadline)
            self.met(facts is not None)
            assert facts is not None
            return facts
        self._agreed = True
        return compare.agree_on_rows(
            self._ranks, self.digest, self._description, rows, self.deadline
        )

    def shared_empty(self, nbytes: int) -> Array | None:
        """Make memory that all ranks of the node can reach; None on a node where there is none."""
        calls = self._calls
        if calls.node_engine is None or calls.settings.shared_memory is None:
            return None
        ranks = calls.levels.node
        return calls.node_engine.shared.create(
            nbytes, ranks, calls.settings.shared_memory, self.deadline
        )

    def by_messages(self, operation: str, algorithm: str, nbytes: int) -> Callable[..., Any]:
        """Return the function that carries out an operation by messages, and knows the ranks.

        Args:
            operation: a key of `selection.ALGORITHMS`.
            algorithm: its name there, or "auto".
            nbytes: the size of the whole array, equal on all ranks.
        """
        calls = self._calls
        name = self.picks(operation, algorithm, nbytes)
        ranks = calls.levels if name == "hierarchical" else calls.transport
        return partial(selection.ALGORITHMS[operation][name], ranks)

    def picks(self, operation: str, algorithm: str, nbytes: int) -> str:
        """Return the name of the algorithm that `by_messages` would use."""
        return selection.choose(operation, algorithm, nbytes, self._calls.layout)

    @property
    def _ranks(self) -> compare.Ranks:
        return compare.Ranks(self._calls.transport, self.levels)

    @property
    def levels(self) -> hierarchical.Levels | None:
        """What stages need; None where all ranks are on one node, or each is on its own."""
        return self._calls.levels if self._calls.layout.is_hierarchical else None

    def met(self, alike: bool) -> None:
        """Take note of what the ranks found as they met in the node engine.

        Raises:
            MismatchError: they do not make the same call; the same error on all ranks.
        """
        self._agreed = True
        if not alike:
            compare.raise_mismatch(self._calls.transport, self._description, self.deadline)

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        refused = self._is_refusal(error)
        if error is not None and not refused and not isinstance(error, MismatchError):
            # Also after Ctrl-C, and first: another one may end the writing of records.
            self._calls.failed(self.operation, error)
        self._calls.end(self._record, error)
        if refused and error is not None:
            self._refuse(error)

    def _is_refusal(self, error: BaseException | None) -> bool:
        """Whether the error concerns this rank's own arguments, or its memory for them."""
        own = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        return own and not self._has_met

    @property
    def _has_met(self) -> bool:
        """Whether this rank has begun to meet the others in this call.

        What is raised from then on, as by a signal handler while this rank waits, is no refusal:
        the others would take what they are told of it for the next part of the call.
        """
        in_engine = self.engine is not None and self.engine.driven != self._driven
        return self._agreed or in_engine

    def _refuse(self, error: BaseException) -> None:
        """Let the other ranks know that this one will not take part; the error goes on as it is."""
        self.describe(refused=f"{type(error).__name__}: {error}")
        # Without a look at `checked`: the others may be in an operation that is compared anyway.
        told = self._calls.settings.check != "off" or self.operation in _ALWAYS_COMPARED
        try:
            with contextlib.suppress(MismatchError):
                if told and self.engine is None:
                    self.carry(*compare.NOTHING)
                else:
                    self.agree()
        except BaseException as failure:
            self._calls.failed(self.operation, failure)
            if not isinstance(failure, CollectiveError):  # but of a signal handler
                raise
