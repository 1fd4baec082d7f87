"""Snapshots of all ps tasks: one version of all variables, while workers push."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strategies.checkpoint.manifest import SliceEntry
from strategies.checkpoint.remote_state import Written
from strategies.checkpoint.storage import Location
from strategies.errors import AbortedError
from strategies.parameter_server import state_io
from strategies.parameter_server.task_requests import FILE_LIMIT, TaskRequests
from strategies.parameter_server.variable import ServedVariable
from strategies.rpc.client import Reply
from strategies.rpc.registry import Address
from strategies.rpc.wire import Array
from strategies.variables.variable_group import VariableState, unpack

__all__ = ["Snapshot"]


class Snapshot:
    """One version of all variables, which the ps tasks keep until `close`.

    Every change, such as a push, is in the parts of all ps tasks or in none. The ps tasks make no
    changes from the first message until all have taken their views: a few messages, and the time
    of changes that have reached only some ps tasks.

    Args:
        requests: requests to the ps tasks.
        held: per ps, names of the parts in the order of their numbers.
        variables: the variables.
        synchronous: whether all ps tasks make the same number of updates.
        timeout: seconds to wait for all views; None for no limit.

    Raises:
        AbortedError: the ps tasks differ, because a change has failed on some of them.
        DeadlineExceededError: a change has not reached all ps tasks; names the sender.
        UnavailableError: a ps task is lost.
    """

    def __init__(
        self,
        requests: TaskRequests,
        held: Sequence[Sequence[str]],
        variables: Iterable[ServedVariable],
        *,
        synchronous: bool,
        timeout: float | None,
    ) -> None:
        self._requests = requests
        self._held = held
        self._variables = list(variables)
        places = requests.places
        try:
            # ps 0 first: it decides which of two snapshots is first.
            answers = self._hold(places[:1], timeout) + self._hold(places[1:], timeout)
            changes: dict[int, int] = {}
            for answer in answers:
                for task, number in answer.metadata["changes"]:
                    changes[task] = max(number, changes.get(task, 0))
            told = {"changes": list(changes.items())}
            taken = requests.ask("take", [told] * len(places), timeout=timeout)
            # The ps tasks make changes again; their replies need no wait.
            requests.send("resume")
            self._facts = [answer.metadata["parts"] for answer in taken]
            self._updates = [answer.metadata["updates"] for answer in taken]
            if synchronous and len(set(self._updates)) > 1:
                counts = ", ".join(
                    f"{n} on {device}"
                    for n, device in zip(self._updates, requests.devices, strict=True)
                )
                raise AbortedError(
                    f"snapshot: ps tasks have made different numbers of updates, expected the "
                    f"same, got {counts}; start again from a checkpoint"
                )
        except BaseException:
            self.close()
            raise

    def _hold(self, places: Sequence[Address], timeout: float | None) -> list[Reply]:
        self._requests.begin(places)
        return self._requests.ask("hold", [{}] * len(places), places, timeout)

    def state_dict(self) -> dict[str, Array]:
        """Return all arrays, in this task's memory."""
        states: dict[str, VariableState] = {}
        answers = self._requests.ask("read", [{}] * len(self._held))
        for names, facts, answer in zip(self._held, self._facts, answers, strict=True):
            states |= zip(names, unpack(facts, answer.values), strict=True)
        return state_io.joined(self._variables, states, self._updates)

    def names(self) -> list[str]:
        """Return the names of the arrays."""
        entries = itertools.chain.from_iterable(self._entries())
        return list(dict.fromkeys(name for name, *_ in entries))

    def write(
        self, names: Mapping[str, str], part: Location, suffix: str, *, gently: bool
    ) -> list[Written]:
        """Let each ps write its slices to a file; see `RemoteState.write`."""
        told = [
            {
                "index": index,
                "entries": [[names[name], *rest] for name, *rest in entries if name in names],
                # Absolute, because a ps may have another working directory.
                "part": str(part.absolute() if isinstance(part, Path) else part),
                "suffix": suffix,
                "gently": gently,
            }
            for index, entries in enumerate(self._entries())
        ]
        answers = self._requests.ask("write", told, timeout=FILE_LIMIT)
        return [_written(answer.metadata) for answer in answers]

    def close(self) -> None:
        """Release the snapshot; harmless when repeated."""
        self._requests.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _entries(self) -> list[list[list[Any]]]:
        """Return per ps: name, number of the part, kind, start and shape of each array."""
        servers = len(self._held)
        found: list[list[list[Any]]] = [
            [[state_io.UPDATES, None, "", [server], [servers]]] for server in range(servers)
        ]
        numbers = [{name: n for n, name in enumerate(names)} for names in self._held]
        for variable in self._variables:
            for number, part in enumerate(variable.parts):
                on_server = numbers[part.task][part.name]
                counts, kinds = self._facts[part.task][on_server]
                state = VariableState(counts, dict.fromkeys(kinds))  # type: ignore[arg-type]
                found[part.task] += [
                    [piece.name, on_server, piece.kind, piece.start, piece.shape]
                    for piece in state_io.pieces(variable, number, state)
                ]
        return found


def _written(facts: Mapping[str, Any]) -> Written:
    """Return the facts of a file that a ps has written."""
    return Written(
        facts["file"],
        facts["nbytes"],
        {name: (dtype, tuple(shape)) for name, dtype, shape in facts["shapes"]},
        [
            (name, SliceEntry(file, tuple(start), tuple(shape), checksum))
            for name, file, start, shape, checksum in facts["slices"]
        ],
    )
