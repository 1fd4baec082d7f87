"""A task's side of the variables on ps tasks: what it asks for, and which versions it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies.cluster.cluster import Cluster
from strategies.errors import FailedPreconditionError, UnavailableError
from strategies.parameter_layout import cut, cut_rows
from strategies.parameter_mean import Gradient
from strategies.parameter_shard import PARAMETERS
from strategies.resources import asking, bundles
from strategies.resources.asking import Question
from strategies.resources.container import Place
from strategies.resources.requests import Answer
from strategies.resources.service import Service
from strategies.served_variable import ServedVariable
from strategies.sparse import Rows
from strategies.staleness import Decision, Record

__all__ = ["Client", "Report"]


class Report(NamedTuple):
    """What one ps task has done.

    Attributes:
        version: number of its updates.
        records: rank of a worker -> what came of its gradients there.
        members: ranks of the workers that are still training.
    """

    version: int
    records: dict[int, Record]
    members: tuple[int, ...]


class Client:
    """The ps tasks, as another task sees them.

    Args:
        service: reaches them.
        cluster: in which they are.

    Attributes:
        servers: their ranks.
    """

    def __init__(self, service: Service, cluster: Cluster) -> None:
        self.servers = tuple(cluster.ranks_of("ps"))
        self._service = service
        self._cluster = cluster
        self._places: list[Place] = []
        self._memberships: list[int] = []
        self._variables: list[ServedVariable] = []
        self._numbers: dict[str, int] = {}  # name of a part -> its number on its ps
        self._counts = [0] * len(self.servers)  # parts on each ps
        self._residents: list[list[str]] = [[] for _ in self.servers]
        self._versions = [0] * len(self.servers)  # of the copies here

    def open(self, name: str) -> None:
        """Find the ps tasks' parameters of this name."""
        for task in self.servers:
            self._places.append(self._service.open(PARAMETERS, {}, name=name, task=task)[0])

    def join(self) -> None:
        """Let the ps tasks know of this worker."""
        told = {"worker": self._cluster.comm.rank}
        for place in self._places:
            number = self._service.start(place, "join", lambda answer: None, told)
            self._memberships.append(number)
        self.reports()  # when that is answered, they do

    def leave(self) -> None:
        """Let the ps tasks know that this worker is one no more."""
        memberships, self._memberships = self._memberships, []
        for membership in memberships:
            self._service.disown(membership)

    def add(self, variable: ServedVariable) -> None:
        """Note where a new variable is."""
        for part in variable.parts:
            self._numbers[part.name] = self._counts[part.task]
            self._counts[part.task] += 1
            if variable.resident:
                self._residents[part.task].append(part.name)
        self._variables.append(variable)

    def pull(self) -> None:
        """Bring the copies of all resident variables up to date."""
        self._take(self._ask("pull", [{}] * len(self.servers)))

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
        parts: list[list[Any]] = [[] for _ in self.servers]
        arrays: list[list[Any]] = [[] for _ in self.servers]
        for gradient, variable in pairs:
            for part in variable.parts:
                parts[part.task].append([self._numbers[part.name], isinstance(gradient, Rows)])
                if isinstance(gradient, Rows):
                    piece = cut_rows(gradient, part)
                    arrays[part.task] += [np.asarray(piece.indices), np.asarray(piece.values)]
                else:
                    arrays[part.task].append(cut(gradient, part))
        bundled = [bundles.pack(own) for own in arrays]
        worker = self._cluster.comm.rank
        told = [
            {
                "worker": worker,
                "version": version,
                "examples": examples,
                "parts": own,
                "layout": how,
            }
            for version, own, (how, _) in zip(self._versions, parts, bundled, strict=True)
        ]
        answers = self._ask("push", told, [frames for _, frames in bundled], timeout)
        self._take(answers)
        return tuple(Decision(a.metadata["staleness"], a.metadata["weight"]) for a in answers)

    def rows(self, variable: ServedVariable, indices: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return some rows of a variable."""
        result = np.empty((len(indices), *variable.shape[1:]), variable.dtype)
        held = [(part, np.flatnonzero(part.holds(indices))) for part in variable.parts]
        wanted = [(part, places) for part, places in held if places.size]
        questions = [
            Question(
                self._places[part.task],
                "rows",
                {"part": self._numbers[part.name]},
                [indices[places] - part.start],
            )
            for part, places in wanted
        ]
        for (_, places), answer in zip(wanted, self._answers(questions), strict=True):
            result[places] = answer.values[0]
        return result

    def assign(self, variable: ServedVariable, value: npt.NDArray[Any]) -> None:
        """Let a variable take another value."""
        self._answers(
            [
                Question(
                    self._places[part.task],
                    "assign",
                    {"part": self._numbers[part.name]},
                    [cut(value, part)],
                )
                for part in variable.parts
            ]
        )

    def reports(self) -> list[Report]:
        """Return what each ps task has done."""
        told = [answer.metadata for answer in self._ask("report", [{}] * len(self.servers))]
        return [
            Report(
                facts["version"],
                {worker: Record(*numbers) for worker, *numbers in facts["records"]},
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
    ) -> list[Answer]:
        """Ask all ps tasks at once."""
        if self._cluster.job == "ps":
            raise FailedPreconditionError(
                f"{operation}: a ps task serves others, and asks for nothing"
            )
        frames = values or [()] * len(told)
        questions = [
            Question(place, operation, facts, own)
            for place, facts, own in zip(self._places, told, frames, strict=True)
        ]
        return self._answers(questions, timeout)

    def _answers(self, questions: Sequence[Question], timeout: float | None = None) -> list[Answer]:
        answers = asking.ask(self._service, questions, timeout)
        errors = [answer.error for answer in answers if answer.error is not None]
        for error in errors:
            if isinstance(error, UnavailableError):
                raise UnavailableError(
                    f"{error.message}; what was on a ps task is lost: start again from a checkpoint"
                ) from error
        if errors:
            raise errors[0]
        return answers

    def _take(self, answers: Sequence[Answer]) -> None:
        """Let the copies be what the ps tasks have answered."""
        found: dict[str, npt.NDArray[Any]] = {}
        for server, answer in enumerate(answers):
            self._versions[server] = answer.metadata["version"]
            arrays = bundles.unpack(answer.metadata["layout"], answer.values)
            found |= zip(self._residents[server], arrays, strict=True)
        for variable in self._variables:
            if variable.resident:
                parts = [found[part.name] for part in variable.parts]
                variable.take(parts[0] if len(parts) == 1 else np.concatenate(parts))
