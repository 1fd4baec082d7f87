"""Worker side of the parameter server: requests and versions of the copies."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies.cluster.cluster import Cluster
from strategies.core.sparse import Gradient, Rows
from strategies.core.validation import number
from strategies.errors import FailedPreconditionError, UnavailableError
from strategies.parameter_server import state_io
from strategies.parameter_server.options import ServingOptions
from strategies.parameter_server.restore import Restore
from strategies.parameter_server.server import PARAMETERS
from strategies.parameter_server.snapshot import Snapshot
from strategies.parameter_server.staleness import Decision, WorkerStats
from strategies.parameter_server.task_requests import TaskRequests
from strategies.parameter_server.variable import ServedVariable
from strategies.rpc.client import Reply
from strategies.rpc.multi_request import RequestTo
from strategies.rpc.registry import Address
from strategies.rpc.service import Service
from strategies.variables import partition
from strategies.variables.requests import packing
from strategies.variables.server_ops import compressed, widened
from strategies.variables.variable_group import VariableState, pack, unpack

__all__ = ["Client", "ServerStats"]


class ServerStats(NamedTuple):
    """Statistics of one ps task.

    Attributes:
        version: number of its updates.
        records: worker rank -> statistics of its gradients on this ps task.
        members: ranks of the workers that are still training.
    """

    version: int
    records: dict[int, WorkerStats]
    members: tuple[int, ...]


class Client:
    """Access to the ps tasks from another task.

    Args:
        service: service that reaches the ps tasks.
        cluster: cluster of the tasks.
        options: compression of gradients and values.

    Attributes:
        servers: ranks of the ps tasks.

    Raises:
        ValueError: the compression is not supported for variables on tasks.
    """

    def __init__(self, service: Service, cluster: Cluster, options: ServingOptions) -> None:
        compression = options.value_compression
        if compression.residuals is not None:
            # A ps sends values to many workers, and would need residuals for each of them.
            raise ValueError(
                f"ParameterServerStrategy: value_compression: feedback is for gradients, expected "
                f"a compression without, got {compression}"
            )
        self._options = options
        self._as = packing(options.compression, "ParameterServerStrategy: compression").get("as")
        packed = packing(compression, "ParameterServerStrategy: value_compression")
        self._values_as = packed.get("as")
        self.servers = tuple(cluster.ranks_of("ps"))
        self._service = service
        self._cluster = cluster
        self._places: list[Address] = []
        # Numbers of the open `join` requests, one per ps.
        self._memberships: list[int] = []
        self._variables: list[ServedVariable] = []
        self._numbers: dict[str, int] = {}  # name of a part -> number on its ps
        self._held: list[list[str]] = [[] for _ in self.servers]  # per ps: names by number
        self._residents: list[list[str]] = [[] for _ in self.servers]
        self._versions = [0] * len(self.servers)  # per ps: version of the copies
        self._differ: str | None = None  # why the ps tasks are inconsistent
        self._changes = 0  # number of this task's last change
        self._order = threading.Lock()

    def open(self) -> None:
        """Open the parameter servers of the strategy."""
        name = self._options.shared_name
        for task in self.servers:
            self._places.append(self._service.open(PARAMETERS, {}, name=name, task=task)[0])

    def join(self) -> None:
        """Register this worker on all ps tasks."""
        told = {"worker": self._cluster.comm.rank}
        for place in self._places:
            membership = self._service.start(place, "join", lambda answer: None, told)
            self._memberships.append(membership)
        self.reports()  # requests are handled in order: the reply confirms the joins

    def leave(self) -> None:
        """Deregister this worker from all ps tasks."""
        memberships, self._memberships = self._memberships, []
        for membership in memberships:
            # Undoes the request on the ps, which removes the member; no reply follows.
            self._service.disown(membership)

    def add(self, variable: ServedVariable) -> None:
        """Register the placement of a new variable."""
        for part in variable.parts:
            # The same numbers as in `VariableGroup.add`: parts are added in the same order on each
            # ps.
            self._numbers[part.name] = len(self._held[part.task])
            self._held[part.task].append(part.name)
            if variable.resident:
                self._residents[part.task].append(part.name)
        self._variables.append(variable)

    def pull(self) -> None:
        """Update the copies of all resident variables."""
        # The version of the copies, so that each ps sends only rows that have changed since.
        told = [{"version": v, "values_as": self._values_as} for v in self._versions]
        self._take(self._ask("pull", told))

    def push(
        self,
        pairs: Iterable[tuple[Gradient, ServedVariable]],
        examples: int | None,
        timeout: float | None,
    ) -> tuple[Decision, ...]:
        """Send gradients to the ps tasks, and update the copies with the replies.

        Args:
            pairs: pairs of gradient and variable.
            examples: number of rows that the gradients average; None if unknown.
            timeout: seconds to wait; None for no limit.

        Returns:
            Decision of each ps task about the gradients.
        """
        if not self._memberships:
            raise FailedPreconditionError(
                f"apply_gradients: expected a worker that has not left, got "
                f"{self._cluster.device_of(self._cluster.comm.rank)}"
            )
        if self._differ is not None:
            # Further updates would only increase the difference between the ps tasks.
            raise UnavailableError(self._differ)
        parts: list[list[Any]] = [[] for _ in self.servers]
        arrays: list[list[Any]] = [[] for _ in self.servers]
        for gradient, variable in pairs:
            pieces = self._pack(gradient, variable)
            rate = variable.learning_rate
            if rate is not None:
                # Read at each push: a schedule of the worker may have changed it.
                rate = number("apply_gradients", "learning rate", rate)
            for part, piece in zip(variable.parts, pieces, strict=True):
                # Two arrays, indices and rows, mark a sparse gradient.
                parts[part.task].append([self._numbers[part.name], len(piece) == 2, rate])
                arrays[part.task] += piece
        worker = self._cluster.comm.rank
        # Each ps gets a request, even without gradients: a synchronous round needs all workers, and
        # the reply contains new values.
        told = [
            {
                "worker": worker,
                "version": version,
                "examples": examples,
                "parts": own,
                "as": self._as,
                "values_as": self._values_as,
            }
            for version, own in zip(self._versions, parts, strict=True)
        ]
        answers = self._change("push", told, arrays, timeout)
        self._take(answers)
        return tuple(Decision(a.metadata["staleness"], a.metadata["weight"]) for a in answers)

    def _pack(self, gradient: Gradient, variable: ServedVariable) -> list[list[npt.NDArray[Any]]]:
        """Return the encoded piece of a gradient for each part of its variable."""
        pieces: list[list[npt.NDArray[Any]]]
        if isinstance(gradient, Rows):
            found = partition.row_pieces(gradient, variable.offsets)
            # Every part gets a piece, also without rows, so that all parts make the same steps.
            pieces = [[rows.indices, np.asarray(rows.values)] for rows in found]
        else:
            pieces = [[piece] for piece in variable.pieces(gradient)]
        return [
            # By the name of the part, which has error feedback of its own.
            compressed(arrays, self._options.compression, part.name)
            for part, arrays in zip(variable.parts, pieces, strict=True)
        ]

    def rows(self, variable: ServedVariable, indices: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return some rows of a variable."""
        # Filled part by part, at the positions that the caller asked for.
        result = np.empty((len(indices), *variable.shape[1:]), variable.dtype)
        found = partition.positions(indices, variable.offsets)
        asked = [n for n, places in enumerate(found) if places.size]
        questions = []
        for n in asked:
            part, rows = variable.parts[n], indices[found[n]] - variable.offsets[n]
            told = {"part": self._numbers[part.name], "values_as": self._values_as}
            questions.append(RequestTo(self._places[part.task], "rows", told, [rows]))
        for n, answer in zip(asked, self._answers(questions), strict=True):
            result[found[n]] = self._widen(answer.values[0], variable)
        return result

    def assign(self, variable: ServedVariable, value: npt.NDArray[Any]) -> None:
        """Set the value of a variable on its ps tasks."""
        told: list[dict[str, Any]] = [{"parts": []} for _ in self.servers]
        arrays: list[list[Any]] = [[] for _ in self.servers]
        for part, piece in zip(variable.parts, variable.pieces(value), strict=True):
            told[part.task]["parts"].append(self._numbers[part.name])
            arrays[part.task].append(piece)
        self._change("assign", told, arrays)

    def snapshot(self, *, synchronous: bool, timeout: float | None) -> Snapshot:
        """Take one version of all variables; see `Snapshot`."""
        self._refuse_ps("state_dict")
        return Snapshot(
            self._requests("snapshot", "save"),
            self._held,
            self._variables,
            synchronous=synchronous,
            timeout=timeout,
        )

    def restore(self) -> Restore:
        """Return a restore by all ps tasks; see `Restore`."""
        self._refuse_ps("restore")

        def load(told: Sequence[dict[str, Any]]) -> None:
            self._load(told, [()] * len(told))

        requests = self._requests("restore", "restore")
        return Restore(requests, self._held, self._variables, self._like, load)

    def _requests(self, kind: str, purpose: str) -> TaskRequests:
        devices = [self._cluster.device_of(rank) for rank in self.servers]
        return TaskRequests(self._service, self._places, devices, kind, purpose)

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Restore a state on the ps tasks and update the copies."""
        states, updates = state_io.divided(state, self._variables, self._like(), len(self.servers))
        told, values = [], []
        for names, count in zip(self._held, updates, strict=True):
            parts, arrays = pack(states[name] for name in names)
            told.append({"parts": parts, "updates": count})
            values.append(arrays)
        # Everything was checked above, so that a wrong state reaches no ps.
        self._load(told, values)

    def _like(self) -> dict[str, VariableState]:
        """Return name of a part -> state without elements: the expected slots and dtypes."""
        like: dict[str, VariableState] = {}
        kinds = self._ask("like", [{}] * len(self.servers))
        for held, answer in zip(self._held, kinds, strict=True):
            like |= zip(held, unpack(answer.metadata["parts"], answer.values), strict=True)
        return like

    def _load(self, told: Sequence[dict[str, Any]], values: Sequence[Sequence[Any]]) -> None:
        self._change("load", told, values)
        # The copies on this task still have the old values.
        self.pull()

    def reports(self) -> list[ServerStats]:
        """Return the statistics of each ps task."""
        told = [answer.metadata for answer in self._ask("report", [{}] * len(self.servers))]
        return [
            ServerStats(
                facts["version"],
                {worker: WorkerStats(*numbers) for worker, *numbers in facts["records"]},
                tuple(facts["members"]),
            )
            for facts in told
        ]

    def _ask(self, operation: str, told: Sequence[dict[str, Any]]) -> list[Reply]:
        """Send one request to each ps task, in parallel."""
        self._refuse_ps(operation)
        pairs = zip(self._places, told, strict=True)
        return self._answers([RequestTo(place, operation, facts) for place, facts in pairs])

    def _change(
        self,
        operation: str,
        told: Sequence[dict[str, Any]],
        values: Sequence[Sequence[Any]],
        timeout: float | None = None,
    ) -> list[Reply]:
        """Send one change to each ps task, in parallel."""
        self._refuse_ps(operation)
        # All ps tasks get the changes of this task in the order of their numbers, also if several
        # threads send some.
        with self._order:
            self._changes += 1
            questions = [
                RequestTo(place, operation, {**facts, "change": self._changes}, own)
                for place, facts, own in zip(self._places, told, values, strict=True)
            ]
            request = self._service.ask(questions)
        return self._checked(request.answers(timeout))

    def _refuse_ps(self, operation: str) -> None:
        if self._cluster.job == "ps":
            # A ps opens no other ps; see `ServedVariables._open`.
            raise FailedPreconditionError(
                f"{operation}: a ps task serves others, and asks for nothing"
            )

    def _answers(self, questions: Sequence[RequestTo]) -> list[Reply]:
        return self._checked(self._service.ask(questions).answers())

    def _checked(self, answers: list[Reply]) -> list[Reply]:
        # All replies are there, so that the error below can name what the other ps tasks have done.
        errors = [answer.error for answer in answers if answer.error is not None]
        if not errors:
            return answers
        # A lost ps explains more than the errors that follow from it.
        error = next((e for e in errors if isinstance(e, UnavailableError)), errors[0])
        # A reply with a weight means that this ps applied the gradients, while another one failed.
        if any(answer.error is None and answer.metadata.get("weight") for answer in answers):
            self._differ = (
                f"{error.message}; the ps tasks differ now: start again from a checkpoint"
            )
            raise UnavailableError(self._differ) from error
        if isinstance(error, UnavailableError):
            raise UnavailableError(f"{error.message}; start again from a checkpoint") from error
        raise error

    def _take(self, answers: Sequence[Reply]) -> None:
        """Update the copies with the replies of the ps tasks.

        A reply has, per part, no array (up to date), the whole part, or indices and rows.
        """
        # `_answers` has raised if a ps failed, so the copies of all ps tasks change together.
        found: dict[str, list[npt.NDArray[Any]]] = {}
        for server, answer in enumerate(answers):
            self._versions[server] = answer.metadata["version"]
            values = iter(answer.values)
            for name, count in zip(self._residents[server], answer.metadata["frames"], strict=True):
                # Collected from all ps tasks first, because the parts of a variable may be on
                # several.
                found[name] = list(itertools.islice(values, count))
        for variable in self._variables:
            if variable.resident:
                news = [found[part.name] for part in variable.parts]
                variable.refresh(
                    [[*new[:-1], self._widen(new[-1], variable)] if new else [] for new in news]
                )

    def _widen(self, value: npt.NDArray[Any], variable: ServedVariable) -> npt.NDArray[Any]:
        """Return values in the dtype of their variable."""
        return widened(value, {"as": self._values_as}, variable.dtype)
