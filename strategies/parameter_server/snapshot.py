"""Snapshots of all ps tasks: one version of all variables, while workers push."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strategies.checkpoint.manifest import SliceEntry
from strategies.checkpoint.remote_state import Written
from strategies.checkpoint.storage import Location
from strategies.errors import AbortedError, OpError
from strategies.parameter_server import state_io
from strategies.parameter_server.variable import ServedVariable
from strategies.rpc.client import Reply
from strategies.rpc.multi_request import RequestTo
from strategies.rpc.registry import Address
from strategies.rpc.service import Service
from strategies.rpc.wire import Array
from strategies.variables.variable_group import VariableState, unpack

__all__ = ["Snapshot"]

_numbers = itertools.count(1)
# Seconds that a ps may take to write its file: only a hanging file system takes longer.
_LIMIT = 3600.0


class Snapshot:
    """One version of all variables, which the ps tasks keep until `close`.

    Every change, such as a push, is in the parts of all ps tasks or in none. The ps tasks make no
    changes from the first message until all have taken their views: a few messages, and the time
    of changes that have reached only some ps tasks.

    Args:
        service: service that reaches the ps tasks.
        places: addresses of the parameter servers.
        devices: names of their tasks, for errors.
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
        service: Service,
        places: Sequence[Address],
        devices: Sequence[str],
        held: Sequence[Sequence[str]],
        variables: Iterable[ServedVariable],
        *,
        synchronous: bool,
        timeout: float | None,
    ) -> None:
        self._service = service
        self._places = places
        self._devices = devices
        self._held = held
        self._variables = list(variables)
        self._number = next(_numbers)
        self._requests: list[int] = []
        try:
            # ps 0 first: it decides which of two snapshots is first.
            answers = self._hold(places[:1], timeout) + self._hold(places[1:], timeout)
            changes: dict[int, int] = {}
            for answer in answers:
                for task, number in answer.metadata["changes"]:
                    changes[task] = max(number, changes.get(task, 0))
            told = {"changes": list(changes.items())}
            taken = self._ask("take", [told] * len(places), timeout=timeout)
            self._resume()
            self._facts = [answer.metadata["parts"] for answer in taken]
            self._updates = [answer.metadata["updates"] for answer in taken]
            if synchronous and len(set(self._updates)) > 1:
                counts = ", ".join(
                    f"{n} on {device}" for n, device in zip(self._updates, devices, strict=True)
                )
                raise AbortedError(
                    f"snapshot: ps tasks have made different numbers of updates, expected the "
                    f"same, got {counts}; start again from a checkpoint"
                )
        except BaseException:
            self.close()
            raise

    def _hold(self, places: Sequence[Address], timeout: float | None) -> list[Reply]:
        for place in places:
            # No reply: the ps releases the snapshot when this request, or this task, has ended.
            told = {"snapshot": self._number}
            self._requests.append(self._service.start(place, "snapshot", lambda answer: None, told))
        return self._ask("hold", [{}] * len(places), places, timeout)

    def _resume(self) -> None:
        """Let the ps tasks make changes again, without waiting for their replies."""
        for place in self._places:
            told = {"snapshot": self._number}
            self._service.start(place, "snapshot_resume", lambda answer: None, told)

    def state_dict(self) -> dict[str, Array]:
        """Return all arrays, in this task's memory."""
        states: dict[str, VariableState] = {}
        answers = self._ask("read", [{}] * len(self._places))
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
        return [_written(answer.metadata) for answer in self._ask("write", told, timeout=_LIMIT)]

    def close(self) -> None:
        """Release the snapshot; harmless when repeated."""
        requests, self._requests = self._requests, []
        for request in requests:
            with contextlib.suppress(OpError):  # the service may be closed by now
                self._service.disown(request)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _entries(self) -> list[list[list[Any]]]:
        """Return per ps: name, number of the part, kind, start and shape of each array."""
        servers = len(self._places)
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

    def _ask(
        self,
        operation: str,
        told: Sequence[Mapping[str, Any]],
        places: Sequence[Address] | None = None,
        timeout: float | None = None,
    ) -> list[Reply]:
        """Send one request to each ps, in parallel; raise the first error, with its task."""
        chosen = self._places if places is None else places
        questions = [
            RequestTo(place, f"snapshot_{operation}", {**facts, "snapshot": self._number})
            for place, facts in zip(chosen, told, strict=True)
        ]
        # All replies are awaited: a ps may still write to a directory that is removed afterwards.
        answers = self._service.ask(questions).answers(timeout)
        for place, answer in zip(chosen, answers, strict=True):
            if answer.error is not None:
                device = self._devices[self._places.index(place)]
                raise type(answer.error)(
                    f"save: {answer.error.message} ({device})"
                ) from answer.error
        return answers


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
