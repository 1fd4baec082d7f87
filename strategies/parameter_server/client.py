"""Worker side of the parameter server: requests and known versions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies.cluster.cluster import Cluster
from strategies.core.sparse import Gradient, Rows
from strategies.core.validation import number
from strategies.errors import FailedPreconditionError, UnavailableError
from strategies.parameter_server import state_io
from strategies.parameter_server.server import PARAMETERS
from strategies.parameter_server.staleness import Decision, WorkerStats
from strategies.parameter_server.state_io import ServerState
from strategies.parameter_server.variable import ServedVariable
from strategies.rpc.client import Reply
from strategies.rpc.multi_request import RequestTo
from strategies.rpc.registry import Address
from strategies.rpc.service import Service
from strategies.variables import partition
from strategies.variables.requests import packing
from strategies.variables.server_ops import compressed, widened

__all__ = ["Client", "ServerStats"]


class ServerStats(NamedTuple):
    """What one ps task has done.

    Attributes:
        version: number of its updates.
        records: rank of a worker -> what came of its gradients there.
        members: ranks of the workers that are still training.
    """

    version: int
    records: dict[int, WorkerStats]
    members: tuple[int, ...]


class Client:
    """The ps tasks, as another task sees them.

    Args:
        service: reaches them.
        cluster: in which they are.
        compression: how gradients travel.
        value_compression: how values travel, without feedback.

    Attributes:
        servers: their ranks.

    Raises:
        ValueError: gradients or values are to be rounded in a way that is not supported here.
    """

    def __init__(
        self,
        service: Service,
        cluster: Cluster,
        compression: cc.Compression,
        value_compression: cc.Compression,
    ) -> None:
        if value_compression.residuals is not None:
            raise ValueError(
                f"ParameterServerStrategy: value_compression: feedback is for gradients, expected "
                f"a compression without, got {value_compression}"
            )
        self._compression = compression
        self._as = packing(compression, "ParameterServerStrategy: compression").get("as")
        packed = packing(value_compression, "ParameterServerStrategy: value_compression")
        self._values_as = packed.get("as")
        self.servers = tuple(cluster.ranks_of("ps"))
        self._service = service
        self._cluster = cluster
        self._places: list[Address] = []
        self._memberships: list[int] = []
        self._variables: list[ServedVariable] = []
        self._numbers: dict[str, int] = {}  # name of a part -> its number on its ps
        self._held: list[list[str]] = [[] for _ in self.servers]  # names by number
        self._residents: list[list[str]] = [[] for _ in self.servers]
        self._versions = [0] * len(self.servers)  # of the copies here
        self._differ: str | None = None  # why the ps tasks are not of one state any more

    def open(self, name: str) -> None:
        """Find the ps tasks' parameters of this name."""
        for task in self.servers:
            self._places.append(self._service.open(PARAMETERS, {}, name=name, task=task)[0])

    def join(self) -> None:
        """Let the ps tasks know of this worker."""
        told = {"worker": self._cluster.comm.rank}
        for place in self._places:
            membership = self._service.start(place, "join", lambda answer: None, told)
            self._memberships.append(membership)
        self.reports()  # when that is answered, they do

    def leave(self) -> None:
        """Let the ps tasks know that this worker is one no more."""
        memberships, self._memberships = self._memberships, []
        for membership in memberships:
            self._service.disown(membership)

    def add(self, variable: ServedVariable) -> None:
        """Note where a new variable is."""
        for part in variable.parts:
            self._numbers[part.name] = len(self._held[part.task])
            self._held[part.task].append(part.name)
            if variable.resident:
                self._residents[part.task].append(part.name)
        self._variables.append(variable)

    def pull(self) -> None:
        """Bring the copies of all resident variables up to date."""
        told = [{"version": v, "values_as": self._values_as} for v in self._versions]
        self._take(self._ask("pull", told))

    def push(
        self,
        pairs: Iterable[tuple[Gradient, ServedVariable]],
        examples: int | None,
        timeout: float | None,
    ) -> tuple[Decision, ...]:
        """Send gradients to where the variables are, and bring the copies up to date."""
        if not self._memberships:
            raise FailedPreconditionError(
                f"apply_gradients: expected a worker that has not left, got "
                f"{self._cluster.device_of(self._cluster.comm.rank)}"
            )
        if self._differ is not None:
            raise UnavailableError(self._differ)
        parts: list[list[Any]] = [[] for _ in self.servers]
        arrays: list[list[Any]] = [[] for _ in self.servers]
        for gradient, variable in pairs:
            pieces = self._pack(gradient, variable)
            rate = variable.learning_rate
            if rate is not None:
                rate = number("apply_gradients", "learning rate", rate)
            for part, piece in zip(variable.parts, pieces, strict=True):
                parts[part.task].append([self._numbers[part.name], len(piece) == 2, rate])
                arrays[part.task] += piece
        worker = self._cluster.comm.rank
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
        answers = self._ask("push", told, arrays, timeout)
        self._take(answers)
        return tuple(Decision(a.metadata["staleness"], a.metadata["weight"]) for a in answers)

    def _pack(self, gradient: Gradient, variable: ServedVariable) -> list[list[npt.NDArray[Any]]]:
        """Return what travels of a gradient to each part of its variable."""
        pieces: list[list[npt.NDArray[Any]]]
        if isinstance(gradient, Rows):
            found = partition.row_pieces(gradient, variable.offsets)
            pieces = [[rows.indices, np.asarray(rows.values)] for rows in found]
        else:
            pieces = [[piece] for piece in variable.pieces(gradient)]
        return [
            compressed(arrays, self._compression, part.name)
            for part, arrays in zip(variable.parts, pieces, strict=True)
        ]

    def rows(self, variable: ServedVariable, indices: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return some rows of a variable."""
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
        """Let a variable take another value."""
        questions = [
            RequestTo(
                self._places[part.task], "assign", {"part": self._numbers[part.name]}, [piece]
            )
            for part, piece in zip(variable.parts, variable.pieces(value), strict=True)
        ]
        self._answers(questions)

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Return what a checkpoint keeps; see `saved`."""
        return state_io.joined(self._variables, *self._states())

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Let the ps tasks go on from a state, and bring the copies up to date."""
        like, _ = self._states()
        states, updates = state_io.divided(state, self._variables, like, len(self.servers))
        told, values = [], []
        for names, count in zip(self._held, updates, strict=True):
            own = [states[name] for name in names]
            parts = [[held.counts, list(held.arrays)] for held in own]
            told.append({"parts": parts, "updates": count})
            values.append([array for held in own for array in held.arrays.values()])
        self._ask("load", told, values)
        self.pull()

    def _states(self) -> tuple[dict[str, ServerState], list[int]]:
        """Return name of a part -> its state, and the updates of each ps."""
        answers = self._ask("state", [{}] * len(self.servers))
        states: dict[str, ServerState] = {}
        for names, answer in zip(self._held, answers, strict=True):
            arrays = iter(answer.values)
            for name, (counts, kinds) in zip(names, answer.metadata["parts"], strict=True):
                states[name] = ServerState(counts, {kind: next(arrays) for kind in kinds})
        return states, [answer.metadata["updates"] for answer in answers]

    def reports(self) -> list[ServerStats]:
        """Return what each ps task has done."""
        told = [answer.metadata for answer in self._ask("report", [{}] * len(self.servers))]
        return [
            ServerStats(
                facts["version"],
                {worker: WorkerStats(*numbers) for worker, *numbers in facts["records"]},
                tuple(facts["members"]),
            )
            for facts in told
        ]

    def _ask(
        self,
        operation: str,
        told: Sequence[dict[str, Any]],
        values: Sequence[Sequence[Any]] | None = None,
        timeout: float | None = None,
    ) -> list[Reply]:
        """Ask all ps tasks at once."""
        if self._cluster.job == "ps":
            raise FailedPreconditionError(
                f"{operation}: a ps task serves others, and asks for nothing"
            )
        frames = values or [()] * len(told)
        questions = [
            RequestTo(place, operation, facts, own)
            for place, facts, own in zip(self._places, told, frames, strict=True)
        ]
        return self._answers(questions, timeout)

    def _answers(self, questions: Sequence[RequestTo], timeout: float | None = None) -> list[Reply]:
        answers = self._service.ask(questions).answers(timeout)
        errors = [answer.error for answer in answers if answer.error is not None]
        if not errors:
            return answers
        error = next((e for e in errors if isinstance(e, UnavailableError)), errors[0])
        # A weight says what has become of gradients: these were applied by some, and not by all.
        if any(answer.error is None and answer.metadata.get("weight") for answer in answers):
            self._differ = (
                f"{error.message}; the ps tasks differ now: start again from a checkpoint"
            )
            raise UnavailableError(self._differ) from error
        if isinstance(error, UnavailableError):
            raise UnavailableError(f"{error.message}; start again from a checkpoint") from error
        raise error

    def _take(self, answers: Sequence[Reply]) -> None:
        """Bring the copies up to date by what the ps tasks have answered.

        For each part that is nothing, if the copy here is up to date, the whole, or indices and
        rows.
        """
        found: dict[str, list[npt.NDArray[Any]]] = {}
        for server, answer in enumerate(answers):
            self._versions[server] = answer.metadata["version"]
            values = iter(answer.values)
            for name, count in zip(self._residents[server], answer.metadata["frames"], strict=True):
                found[name] = list(itertools.islice(values, count))
        for variable in self._variables:
            if variable.resident:
                news = [found[part.name] for part in variable.parts]
                variable.refresh(
                    [[*new[:-1], self._widen(new[-1], variable)] if new else [] for new in news]
                )

    def _widen(self, value: npt.NDArray[Any], variable: ServedVariable) -> npt.NDArray[Any]:
        """Return values of a variable as they were before they travelled."""
        return widened(value, {"as": self._values_as}, variable.dtype)
